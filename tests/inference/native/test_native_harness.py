"""scripts/stress/native.py: sanitizers find nothing in the kernels, and a fault would be found."""

import subprocess

import pytest
import torch
from natively import native

from bertlite.inference.native.library import find_compiler
from scripts.stress import native as stress

pytestmark = native


def skip_without(sanitizer: str, folder) -> None:
    """Skip a test where the compiler has no such sanitizer, or its programs cannot start."""
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }")
    flags = stress.SANITIZERS[sanitizer]
    built = subprocess.run([*find_compiler(), *flags, source, "-o", folder / "empty"], capture_output=True, text=True)
    ran = built.returncode or subprocess.run([folder / "empty"], capture_output=True).returncode
    if ran:
        pytest.skip(f"{find_compiler()[0]} has no sanitizer {flags[0]} that runs here: {built.stderr[-200:]}")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", stress.SANITIZERS)
def test_a_sanitizer_finds_nothing(sanitizer, tmp_path):
    skip_without(sanitizer, tmp_path)
    found = stress.run_harness(sanitizer, 4, seed=1)
    assert found["cases"] > 0
    assert 0 < found["float32"] < 1e-5


def test_random_models_are_near():
    assert stress.run_python(1, seed=1)["cases"] > 0


def test_a_fault_ends_the_run(monkeypatch, capsys):
    monkeypatch.setitem(stress.ALLOWED, torch.float32, 0.0)
    assert stress.main(["--sanitizer", "python", "--minutes", "0"]) == 1
    assert "case 1 of seed 0 in torch.float32: error" in capsys.readouterr().err
