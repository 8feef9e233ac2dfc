"""scripts/stress/native.py: sanitizers find nothing in the kernels, and a fault would be found."""

import functools
import platform
import shutil
import subprocess

import pytest
import torch
from natively import native

from bertlite.runtime.library import FLAGS, INSTRUCTION_SETS, MAIN, SOURCES, find_compiler, usable_sets
from scripts.make import wheel
from scripts.stress import native as stress

pytestmark = native
CASES = 12
STRICT = ("-Wall", "-Wextra", "-Werror")


def skip_without_tools(*tools: str) -> None:
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"needs {' and '.join(missing)}: apt-get install clang g++-aarch64-linux-gnu qemu-user")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "neon_bf16")) for name in wheel.SETS["linux-aarch64"]],
)
def test_arm_computes_the_same_by_emulation(name):
    tools = "aarch64-linux-gnu-g++", "qemu-aarch64"
    skip_without_tools(*tools)
    compiler = [tools[0], "-static", *STRICT, *INSTRUCTION_SETS[name].flags]
    found = stress.run_harness(compiler, 600, 1, [tools[1], "-cpu", "max"], CASES)
    assert found["cases"] == CASES
    assert 0 < found["float32"] < 1e-5
    assert found["bits"] == bits_here()


@functools.cache
def bits_here() -> str:
    """Return the hash of the harness's outputs on this machine."""
    flags = usable_sets(reproducible=True)[0].flags
    return str(stress.run_harness([*find_compiler(), "-w", *flags], 600, 1, cases=CASES)["bits"])


@pytest.mark.parametrize(
    "name",
    ["avx512_bf16", pytest.param("avx_vnni", marks=pytest.mark.slow), "avx2", "baseline"],  # the three forms
)
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_compilers_have_no_warnings(compiler, name):
    skip_without_tools(compiler)
    if name != "baseline" and platform.machine() != "x86_64":
        pytest.skip("for x86-64")
    flags = [flag for flag in (*FLAGS, *INSTRUCTION_SETS[name].flags) if flag != "-shared"]
    flags += [*STRICT, "-Wno-unknown-warning-option", "-fsyntax-only", SOURCES / MAIN]
    done = subprocess.run([compiler, *flags], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]


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
    found = stress.run_sanitized(sanitizer, 4, seed=1)
    assert found["cases"] > 0
    assert 0 < found["float32"] < 1e-5


def test_random_models_are_near_and_a_fault_ends_the_run(monkeypatch, capsys):
    assert stress.run_python(1, seed=1)["cases"] > 0
    monkeypatch.setitem(stress.ALLOWED, torch.float32, 0.0)
    assert stress.main(["--sanitizer", "python", "--minutes", "0"]) == 1
    assert "case 1 of seed 0 in torch.float32: error" in capsys.readouterr().err
