"""A second device: tests/device/checks.py passes in a process of its own, before whose first backward it is made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bertlite.runtime.library import NativeKernelsError
from tests.device.device import HeadersDoNotFitError, compiled

ROOT = Path(__file__).resolve().parents[1]


def test_every_path_runs_on_a_second_device():
    pytest.importorskip("transformers")
    try:
        compiled()
    except (NativeKernelsError, HeadersDoNotFitError) as error:
        pytest.skip(str(error))
    run_tests("checks.py")


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch was built without CUDA; no GPU is needed")
def test_what_a_gpu_records_reads_no_value():
    run_tests("recorded.py")


def run_tests(name):
    """Run the tests of a file in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", f"tests/device/{name}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
