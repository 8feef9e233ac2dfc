"""Where kernels in Triton are tested: on a GPU, or by Triton's interpreter on the CPU, in a process of its own.

The interpreter takes 16-bit numbers for integers in matmuls, so tests in these run on a GPU alone.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from bertlite.inference.triton_kernels import INTERPRETED

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS = INTERPRETED or (find_spec("triton") is not None and HERE.type == "cuda")
with_triton = pytest.mark.skipif(not RUNS, reason="Triton is not installed, or does not interpret in this process")
here_or_interpreted = pytest.mark.skipif(
    RUNS or find_spec("triton") is None, reason="Triton is not installed, or runs in this process"
)
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(HERE.type != "cuda", reason="no CUDA device")]
FLOATS = [torch.float32, *(pytest.param(x, marks=ON_A_GPU) for x in (torch.bfloat16, torch.float16))]


def run_interpreted(file: str) -> None:
    """Run the tests of a file in a process in which Triton interprets: it asks when a kernel is decorated."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
