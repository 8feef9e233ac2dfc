"""scripts/make/wheel.py --runtime: a wheel that runs packed folders without torch, compiler or network."""

import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from natively import kernels_or_skip

from bertlite.runtime import load
from bertlite.runtime.library import usable_sets
from bertlite.shipping.pack import pack
from scripts.make import wheel, wheel_hook
from tests.clients.checks.common import minilm

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "tag"),
    [
        ("macos-arm64", "macosx_13_0_arm64"),
        ("macos-x86_64", "macosx_13_0_x86_64"),
        ("windows-x86_64", "win_amd64"),
    ],
)
def test_the_kernels_compile_for_macos_and_windows(
    platform: str, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ziglang", reason="needs PyPI's ziglang, a compiler for other systems")
    pytest.importorskip("hatchling")
    monkeypatch.setenv("CXX", shlex.join(wheel.COMPILERS[platform]))
    wheel.add_kernels(tmp_path, wheel.SETS[platform][:1])
    [built] = tmp_path.glob("*.so")
    assert wheel_hook.platform_of(built.read_bytes()) == tag
