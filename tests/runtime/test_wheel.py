"""scripts/make/wheel.py --runtime: a wheel that runs packed folders without torch, compiler or network."""

import re
import shlex
import shutil
import struct
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from natively import kernels_or_skip

from bertlite.runtime import library, load
from bertlite.runtime.library import INSTRUCTION_SETS, file_name, usable_sets
from bertlite.shipping.pack import pack
from scripts.make import wheel, wheel_hook
from tests.clients.checks.common import minilm

MACHINES = {"macos-arm64": "arm64", "macos-x86_64": "x86_64", "windows-x86_64": "AMD64"}
RUN = """
import sys
from bertlite_runtime import load
print(load(sys.argv[1]).encode("Time flies.").tobytes().hex())
assert not {"torch", "bertlite", "transformers"} & sys.modules.keys()
"""


def test_the_wheel_runs_where_there_is_no_torch_and_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    kernels = kernels_or_skip()
    pack(minilm(), tmp_path / "packed", dtype="int8")
    monkeypatch.setattr(wheel, "compile_kernels", lambda wanted, path: shutil.copy(kernels.path, path))
    wheel.build_runtime(tmp_path / "dist", [usable_sets()[0].name])
    [built] = (tmp_path / "dist").glob("bertlite_runtime-*.whl")
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert all(name.startswith(("bertlite_runtime/", "bertlite_runtime-")) for name in names), (
        "bertlite's own wheel has it"
    )
    for name in ("numpy", "tokenizers", "numpy.libs", "tokenizers.libs"):  # and nothing else of this environment
        spec = find_spec(name)
        home = Path(find_spec("numpy").origin).parents[1] / name if spec is None else Path(spec.origin).parent  # type: ignore[union-attr,arg-type]
        if home.is_dir():
            (tmp_path / "site" / name).symlink_to(home)
    done = subprocess.run(
        [sys.executable, "-S", "-c", RUN, tmp_path / "packed"],
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == load(tmp_path / "packed").encode("Time flies.").tobytes().hex()


ELSEWHERE = {  # the tag of a wheel, and the libraries of the system that its kernels import, by platform
    "macos-arm64": ("macosx_13_0_arm64", r"/usr/lib/libSystem\.B\.dylib"),
    "macos-x86_64": ("macosx_13_0_x86_64", r"/usr/lib/libSystem\.B\.dylib"),
    "windows-x86_64": ("win_amd64", r"(?i)(kernel32|kernelbase|api-ms-win-crt-[\w-]+)\.dll"),
}
LOADS = (0xC, 0x80000018, 0x8000001F)  # load commands of macOS that name a library


@pytest.mark.slow
@pytest.mark.parametrize("platform", ELSEWHERE)
def test_wheels_for_macos_and_windows_hold_libraries_of_their_system(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ziglang", reason="needs PyPI's ziglang, a compiler for other systems")
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    tag, system = ELSEWHERE[platform]
    name = wheel.SETS[platform][0]  # one of them, for time
    monkeypatch.setitem(wheel.SETS, platform, (name,))
    monkeypatch.setenv("CXX", shlex.join(wheel.COMPILERS[platform]))
    assert wheel.main(["--runtime", "--platform", platform, "--out", str(tmp_path)]) == 0
    [built] = tmp_path.glob(f"bertlite_runtime-*-py3-none-{tag}.whl")
    with zipfile.ZipFile(built) as archive:
        [about] = (archive.read(each).decode() for each in archive.namelist() if each.endswith("/METADATA"))
        code = archive.read(f"bertlite_runtime/prebuilt/{file_name(INSTRUCTION_SETS[name])}")
    assert "On this platform it has not been run." in about
    assert wheel_hook.platform_of(code) == tag
    assert all(function in code for function in (b"bertlite_run", b"bertlite_pack", b"bertlite_linear"))
    imported = imports(code)
    assert imported
    assert all(re.fullmatch(system, each) for each in imported), imported


def imports(code: bytes) -> list[str]:
    """Return the libraries that a library of macOS loads, or all that one of Windows names."""
    if code.startswith(b"MZ"):
        return [each.decode() for each in re.findall(rb"(?i)[\w+.-]+\.dll", code)]
    found, at = [], 32
    for _ in range(int.from_bytes(code[16:20], "little")):
        kind, size, name = struct.unpack_from("<III", code, at)
        if kind in LOADS:
            found.append(code[at + name : at + size].rstrip(b"\0").decode())
        at += size
    return found


@pytest.mark.parametrize(
    ("platform", "system", "flags", "wanted"),
    [
        ("macos-arm64", "darwin", {"asimddp"}, "neon_dot"),
        ("macos-arm64", "darwin", {"asimddp", "i8mm", "bf16"}, "neon_bf16"),
        ("macos-x86_64", "darwin", {"avx2", "fma"}, "avx2"),
        ("windows-x86_64", "win32", {"avx2", "fma"}, "avx2"),
        ("windows-x86_64", "win32", set(), "baseline"),
    ],
)
def test_the_set_that_a_processor_elsewhere_takes_is_in_its_wheel(
    platform: str, system: str, flags: set[str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BERTLITE_NATIVE", raising=False)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(library, "processor_flags", lambda: frozenset(flags))
    monkeypatch.setattr("platform.machine", lambda: MACHINES[platform])
    assert library.missing_platform() is None
    for reproducible in (False, True):
        found = usable_sets(reproducible=reproducible)
        assert found[0].name in wheel.SETS[platform]
        assert reproducible or found[0].name == wanted
