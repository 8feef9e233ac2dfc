"""scripts/make/wheel.py: wheels are whole; the runtime's runs packed folders without torch, compiler or network."""

import base64
import hashlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from natively import kernels_or_skip

from bertlite import __version__
from bertlite.runtime import library, load
from bertlite.runtime.library import INSTRUCTION_SETS, ON_MAC, crc_of, file_name, usable_sets
from bertlite.shipping.pack import pack
from scripts.make import wheel
from scripts.make.wheel_hook import ELF, MACH_O, PE
from tests.clients.checks.common import minilm

OF_ARM = frozenset({"asimddp", "i8mm", "bf16"})
OF_X86 = frozenset().union(*(each.needs for each in INSTRUCTION_SETS.values())) - OF_ARM
PROCESSORS = {  # by platform: its names in Python, the flags that Python finds there, and how its libraries begin
    "linux-x86_64": ("linux", "x86_64", OF_X86, (ELF, 18, 62)),
    "linux-aarch64": ("linux", "aarch64", OF_ARM, (ELF, 18, 183)),
    "macos-arm64": ("darwin", "arm64", OF_ARM.intersection(ON_MAC.values()), (MACH_O, 4, 12)),
    "macos-x86_64": ("darwin", "x86_64", OF_X86.intersection(ON_MAC.values()), (MACH_O, 4, 7)),
    "windows-x86_64": ("win32", "AMD64", frozenset({"avx2", "fma"}), (PE, 4, 0x8664)),
}
RUN = """
import sys
import bertlite_runtime
print(bertlite_runtime.load("packed").encode("Time flies.").tobytes().hex())
example = [line.strip() for line in bertlite_runtime.__doc__.splitlines() if line.startswith("    ")]
exec("\\n".join(example))
assert vectors.shape == (1, model.dimension) and "bertlite.runtime" not in bertlite_runtime.__doc__
assert bertlite_runtime.__version__ == sys.argv[1]
assert not {"torch", "bertlite", "transformers"} & sys.modules.keys()
"""


@pytest.fixture
def builder() -> None:
    """Skip a test where what builds wheels is not installed."""
    for name in ("build", "hatchling"):
        pytest.importorskip(name)


def test_the_wheel_runs_where_there_is_no_torch_and_no_compiler(builder, tmp_path, monkeypatch):
    kernels = kernels_or_skip()
    pack(minilm(), tmp_path / "packed", dtype="int8")
    monkeypatch.setattr(wheel, "compile_kernels", lambda wanted, path: shutil.copy(kernels.path, path))
    wheel.build_runtime(tmp_path / "dist", [usable_sets()[0].name])
    [built] = (tmp_path / "dist").glob("bertlite_runtime-*.whl")
    check_contents(built, tmp_path / "site")
    for name in ("numpy", "tokenizers", "numpy.libs", "tokenizers.libs"):  # and nothing else of this environment
        spec = find_spec(name)
        home = Path(find_spec("numpy").origin).parents[1] / name if spec is None else Path(spec.origin).parent  # type: ignore[union-attr,arg-type]
        if home.is_dir():
            (tmp_path / "site" / name).symlink_to(home)
    [found] = run_beside(tmp_path, "-S", "-c", RUN, __version__)
    assert found == load(tmp_path / "packed").encode("Time flies.").tobytes().hex()


def run_beside(folder: Path, *words: str) -> list[str]:
    """Run Python in a folder whose `site` alone it knows; return the lines that it prints."""
    environ = {"PYTHONPATH": str(folder / "site"), "PATH": "", "HOME": str(folder / "home")}
    done = subprocess.run([sys.executable, *words], env=environ, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


CHOOSE = """
import platform, sys, types
import numpy, tokenizers  # as this system has them
sys.platform, machine, *processors = sys.argv[1:]
platform.machine = lambda: machine
from bertlite_runtime import library
library.find_fault, library.is_bfloat16_slow = lambda kernels: None, lambda kernels: False
library.Kernels = lambda path, reproducible: types.SimpleNamespace(path=path)
for flags in processors:
    library.processor_flags = lambda: frozenset(flags.split())
    for reproducible in (False, True):
        library.best_kernels.cache_clear()
        print(library.load_kernels(reproducible).path)
"""


@pytest.mark.parametrize("platform", PROCESSORS)
def test_a_wheel_is_complete_and_has_what_every_processor_takes(builder, platform, tmp_path, monkeypatch):
    system, machine, flags, (start, at, number) = PROCESSORS[platform]
    code = bytearray(100)
    code[: len(start)], code[at : at + 2] = start, number.to_bytes(2, "little")
    monkeypatch.setattr(wheel, "compile_kernels", lambda wanted, path: path.write_bytes(code + crc_of(code)))
    wheel.build_runtime(tmp_path, wheel.SETS[platform], wheel.NOT_RUN)
    [built] = tmp_path.glob(f"bertlite_runtime-{__version__}-py3-none-{wheel.TAGS[platform]}.whl")
    assert check_contents(built, tmp_path / "site").endswith(wheel.NOT_RUN)
    taken = [each for each in INSTRUCTION_SETS.values() if each.needs <= flags and each.name != "baseline_exact"]
    found = run_beside(tmp_path, "-c", CHOOSE, system, machine, *(" ".join(each.needs) for each in taken))
    exact = "baseline" if flags <= OF_ARM else "baseline_exact"
    wanted = [file_name(each) for each in taken for _ in range(2)]
    assert [Path(line).name for line in found] == [*wanted[:-1], file_name(INSTRUCTION_SETS[exact])]


def check_contents(built: Path, site: Path) -> str:
    """Unpack a wheel of the runtime as pip does; assert that it has all that it lists and all of the package.

    Returns:
        its description.
    """
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)
        names = set(archive.namelist())
    found = Distribution.at(site / f"bertlite_runtime-{__version__}.dist-info")
    files = {str(file): file for file in found.files or ()}
    assert files.keys() == names
    for name, file in files.items():
        if file.hash:  # RECORD has none
            digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
            assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value, name
    sources = [*library.SOURCES.parent.glob("*.py"), *library.SOURCES.iterdir()]
    assert {f"bertlite_runtime/{path.relative_to(library.SOURCES.parent)}" for path in sources} < names
    assert "bertlite_runtime/py.typed" in names
    assert (found.name, found.version) == ("bertlite-runtime", __version__)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"bertlite_runtime"}, "bertlite's wheel has it"
    return found.metadata["Summary"]


TINY = """
#if defined(__linux__)
#include <dlfcn.h>
#include <pthread.h>
#include <vector>
static long run() {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_t thread;
    pthread_create(&thread, nullptr, [](void* self) { return dlsym(self, "x"); }, nullptr);
    static volatile unsigned long many;
    return pthread_detach(thread) || pthread_mutex_trylock(&lock) || !std::allocator<long>().allocate(many);
}
#else
static long run() { return 0; }
#endif
"""
NEWER_GLIBC = pytest.mark.skipif(platform.libc_ver()[1] < "2.34", reason="needs glibc 2.34")
CLANG = "clang++ -w -c -target"  # not linked, so that they need no library of macOS


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is compiled be no kernels, but functions of their names that call what they call of Linux."""
    pytest.importorskip("lief")
    function = 'extern "C" __attribute__((visibility("default"))) long {}() {{ return run(); }}\n'
    (tmp_path / "tiny.cpp").write_text(TINY + "".join(map(function.format, sorted(wheel.FUNCTIONS))))
    monkeypatch.setattr(library, "MAIN", str(tmp_path / "tiny.cpp"))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("platform", "compiler", "change", "fault"),
    [
        (wheel.HERE, "", {}, ""),
        pytest.param(
            wheel.HERE, "", {"OLDER_GLIBC": ""}, "needs GLIBC 2.34, .*\nneeds GLIBCXX 3.4.29, ", marks=NEWER_GLIBC
        ),
        (wheel.HERE, "g++ -Wl,--no-as-needed -l:libresolv.so.2", {}, "needs libresolv.so.2, which"),
        (wheel.HERE, "", {"FUNCTIONS": {"bertlite_run", "bertlite_walk"}}, "lacks bertlite_walk"),
        ("linux-aarch64", "aarch64-linux-gnu-g++", {}, ""),
        ("linux-x86_64", "aarch64-linux-gnu-g++", {}, "is for manylinux_2_27_aarch64"),
        ("macos-x86_64", f"{CLANG} x86_64-apple-macos13", {}, ""),
        ("macos-x86_64", f"{CLANG} x86_64-apple-macos14", {}, "needs macOS 14.0, which macosx_13_0_x86_64"),
        ("macos-x86_64", f"{CLANG} x86_64-apple-macos13", {"FUNCTIONS": {"bertlite_walk"}}, "lacks bertlite_walk"),
        ("macos-arm64", f"{CLANG} arm64-apple-macos13", {}, "is not signed"),
    ],
)
def test_kernels_that_do_not_fit_the_tag_are_found(platform, compiler, change, fault, tmp_path, monkeypatch):
    if compiler and shutil.which(shlex.split(compiler)[0]) is None:
        pytest.skip(f"needs {compiler}: apt-get install clang g++-aarch64-linux-gnu")
    for name, value in change.items():
        monkeypatch.setattr(wheel, name, value)
    monkeypatch.setenv("CXX", compiler)
    wheel.add_kernels(tmp_path, ["baseline"])
    [path] = tmp_path.glob("*.so")
    faults = [*wheel.faults_of(path.read_bytes(), platform)]
    assert re.fullmatch(f"{fault}.*" if fault else "", "\n".join(sorted(faults)))


def test_only_a_wheel_without_faults_is_written(builder, tiny, tmp_path, monkeypatch, capsys):
    out = tmp_path / "dist"
    monkeypatch.setitem(wheel.SETS, wheel.HERE, ("baseline",))
    assert wheel.main(["--runtime", "--out", str(out)]) == 0
    [built] = out.iterdir()
    assert capsys.readouterr().out == f"{built}\n"
    built.unlink()
    monkeypatch.setattr(wheel, "LARGEST", 1000)
    monkeypatch.setattr(wheel, "FUNCTIONS", {"bertlite_walk"})
    with pytest.raises(SystemExit, match=rf"(?s){built.name} is not written:.* of 1,000 allowed.*lacks bertlite_walk"):
        wheel.main(["--runtime", "--out", str(out)])
    assert not [*out.iterdir()]


def test_a_wheel_without_a_set_or_for_another_platform_has_faults(tmp_path):
    lacking = tmp_path / "bertlite-0.1.0-py3-none-win_amd64.whl"
    with zipfile.ZipFile(lacking, "w"):
        pass
    tag, kernels = wheel.find_faults(lacking, "linux-aarch64")
    assert tag == "it is not for manylinux_2_27_aarch64"
    assert all(file_name(INSTRUCTION_SETS[name]) in kernels for name in wheel.SETS["linux-aarch64"])


def test_a_library_of_visual_cpp_has_faults():
    pytest.importorskip("lief")
    spec = find_spec("setuptools") or find_spec("pip")
    programs = [*Path(spec.origin).parent.rglob("*-64.exe")] if spec and spec.origin else []
    if not programs:
        pytest.skip("needs setuptools, which has programs of Windows")
    faults = [*wheel.faults_of(programs[0].read_bytes(), "windows-x86_64")]
    assert faults[:2] == ["has another checksum", f"lacks {', '.join(sorted(wheel.FUNCTIONS))}"]
    assert faults[2:] == ["needs VCRUNTIME140.dll, which not every system has"]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["macos-arm64", "macos-x86_64", "windows-x86_64"])
def test_whole_wheels_for_macos_and_windows_have_no_fault(builder, platform, tmp_path, monkeypatch):
    pytest.importorskip("ziglang", reason="needs PyPI's ziglang, a compiler for other systems")
    pytest.importorskip("lief")
    monkeypatch.setenv("CXX", shlex.join(wheel.COMPILERS[platform]))
    assert wheel.main(["--runtime", "--platform", platform, "--out", str(tmp_path)]) == 0
    [built] = tmp_path.iterdir()
    check_contents(built, tmp_path / "site")
    monkeypatch.setattr(wheel, "FUNCTIONS", {"bertlite_walk"})
    monkeypatch.setitem(wheel.SYSTEMS, platform.partition("-")[0], ("", {}))
    faults = "\n".join(wheel.find_faults(built, platform))
    assert faults.count("lacks bertlite_walk") == faults.count("which not every") == len(wheel.SETS[platform])
    assert faults.count("needs macOS 13.0") == ("macos" in platform) * len(wheel.SETS[platform])


@pytest.mark.parametrize("missing", [["hatchling"], ["build", "lief"]])
def test_it_names_the_packages_that_it_lacks_before_it_compiles(missing, monkeypatch, tmp_path, capsys):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(wheel, "compile_kernels", lambda *given: pytest.fail("it compiles first"))
    with pytest.raises(SystemExit, match="2"):
        wheel.main(["--runtime", "--out", str(tmp_path)])
    assert f"pip install {' '.join(missing)}" in capsys.readouterr().err


def test_here_compiles_for_this_processor_alone_and_the_rest_side_by_side(monkeypatch, tmp_path, capsys):
    compiled = []
    monkeypatch.setattr(wheel, "compile_kernels", lambda wanted, path: compiled.append(wanted.name))
    wheel.add_kernels(tmp_path, wheel.SETS["linux-x86_64"])
    assert sorted(compiled) == sorted(wheel.SETS["linux-x86_64"])
    assert "at once" in capsys.readouterr().err
    found = []
    monkeypatch.setattr(wheel, "build_runtime", lambda out, sets, note: found.append(sets))
    with pytest.raises(ValueError, match="unpack"):  # no wheel was built
        wheel.main(["--runtime", "--here", "--out", str(tmp_path)])
    assert found == [tuple(dict.fromkeys(usable_sets(reproducible=each)[0].name for each in (False, True)))]
    with pytest.raises(SystemExit):
        wheel.main(["--runtime", "--here", "--platform", "windows-x86_64"])
    assert "leave out one of them" in capsys.readouterr().err
