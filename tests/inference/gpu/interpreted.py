"""Where kernels in Triton are tested: on a GPU, or by Triton's interpreter on the CPU, in a process of its own.

The interpreter takes 16-bit numbers for integers in matmuls, so tests in these run on a GPU alone.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bertlite.inference.gpu.triton_kernels import INTERPRETED, missing_for_triton

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS = INTERPRETED or (HERE.type == "cuda" and missing_for_triton("cuda", torch.float32) is None)
here_or_interpreted = pytest.mark.skipif(
    RUNS or find_spec("triton") is None, reason="Triton is not installed, or runs in this process"
)
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(HERE.type != "cuda", reason="no CUDA device")]
FLOATS = [torch.float32, *(pytest.param(x, marks=ON_A_GPU) for x in (torch.bfloat16, torch.float16))]


if INTERPRETED:  # numpy 2.4 makes no index of an array of one number, which Triton 3.6 has for a number
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


def with_triton(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test where kernels run; on a GPU it is one of those that need one."""
    reason = "Triton is not installed, finds no C compiler, or does not interpret in this process"
    test = pytest.mark.skipif(not RUNS, reason=reason)(test)
    return pytest.mark.gpu(test) if HERE.type == "cuda" else test


def run_interpreted(file: Path) -> None:
    """Run the tests of a file in a process in which Triton interprets: it asks when a kernel is decorated."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
