"""bertlite/runtime/library.py: the kernels are compiled once and whole, or it is said why not."""

import itertools
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from natively import DTYPES, make_native, no_home, why_no_kernels

from bertlite import optimize_for_inference
from bertlite.inference.native import choice
from bertlite.runtime import library, self_test
from bertlite.runtime.library import INSTRUCTION_SETS, NativeKernelsError, kernels_for, load_kernels, usable_sets
from bertlite.runtime.shapes import BLOCKS

pytestmark = pytest.mark.skipif(library.missing_platform() is not None, reason=str(library.missing_platform()))


@pytest.fixture(scope="module", autouse=True)
def whole() -> str | None:
    """Return compiled kernels, from the user's own cache: before it is another; None if they cannot be compiled."""
    return None if why_no_kernels() else load_kernels().path


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Let the cache be an empty folder, and let nothing be compiled yet."""
    monkeypatch.setenv("BERTLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "no wheel")
    monkeypatch.setattr(library, "compiler_failures", {})
    forget()
    yield tmp_path / "cache" / "native"
    forget()


def forget() -> None:
    for each in (library.best_kernels, library.announce, kernels_for, choice.warn_once):
        each.cache_clear()


def script(path: Path, text: str, start: str = "#!/bin/sh\nfor word; do last=$out; out=$word; done\n") -> str:
    """Write a compiler, which is a script of the shell; $out is what it is to write."""
    path.write_text(start + text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def copying(tmp_path, whole) -> str:
    """Return a compiler that takes its time and then copies what another has compiled."""
    if whole is None:
        pytest.skip(str(why_no_kernels()))
    return script(tmp_path / "copying", f"echo run >> {tmp_path}/runs\nsleep 1\ncp {whole} $out\n")


def test_auto_runs_a_compiler_that_fails_once_until_a_setting_changes(cache, monkeypatch, tmp_path):
    def runs():
        return (tmp_path / "runs").read_text().count("run\n")

    failing = f"echo run >> {tmp_path}/runs\necho 'no such letter' >&2\nexit 3\n"
    monkeypatch.setenv("CXX", script(tmp_path / "broken", failing))
    monkeypatch.setenv("BERTLITE_NATIVE", "baseline")
    model = make_native().float()
    with pytest.warns(RuntimeWarning, match=r"(?s)copy of the plain model.*no such letter"):
        assert optimize_for_inference(model).backend == "plain"
    for _ in range(3):
        assert optimize_for_inference(model).backend == "plain"
    assert runs() == 1
    with pytest.raises(NativeKernelsError, match="no such letter"):
        optimize_for_inference(model, backend="native")  # who asks for it by name may have mended the compiler
    assert runs() == 2
    changes = {
        "CXX": script(tmp_path / "other", failing),
        "PATH": f"{os.environ['PATH']}:{tmp_path}",
        "BERTLITE_CACHE": str(tmp_path / "another"),
        "BERTLITE_NATIVE": "",
    }
    for done, (name, value) in enumerate(changes.items(), start=3):
        monkeypatch.setenv(name, value)
        done += 0 if value else len(usable_sets()) - 1  # each is tried
        with warnings.catch_warnings(action="ignore"):
            assert [optimize_for_inference(model).backend for _ in range(2)] == ["plain", "plain"]
        assert runs() == done, name


def test_a_compiler_that_fails_for_every_set_is_told_once_and_short(cache, monkeypatch, tmp_path, caplog):
    """One line when it begins and one warning with its first error; everything else is for DEBUG."""
    caplog.set_level("WARNING", "bertlite")
    monkeypatch.delenv("BERTLITE_NATIVE", raising=False)
    output = 'for i in $(seq 99); do echo "native.cpp:$i: error: no such letter $i" >&2; done\nexit 3\n'
    monkeypatch.setenv("CXX", script(tmp_path / "broken", f"echo 'native.cpp: In a function:' >&2\n{output}"))
    model = make_native().float()
    with pytest.warns(RuntimeWarning, match="copy of the plain model") as warned:
        assert {optimize_for_inference(model).backend for _ in range(2)} == {"plain"}
    (warning,) = [str(each.message) for each in warned]
    assert "native.cpp:1: error: no such letter 1; set CXX" in warning
    assert len(warning) < 500
    assert "\n" not in warning
    assert caplog.messages == [f"compiling the CPU kernels with {tmp_path}/broken, once; this takes some seconds"]


@pytest.mark.parametrize("part", [slice(0), slice(-1), slice(None, None, 2)])
def test_a_damaged_library_is_compiled_again(part, cache, whole, copying, monkeypatch, tmp_path):
    """To map half a file is to die of SIGBUS."""
    monkeypatch.setattr(library, "is_bfloat16_slow", lambda kernels: False)  # a busy machine's clock does not choose
    path = library.own_folder(cache) / library.file_name(usable_sets()[0])
    path.write_bytes(Path(whole).read_bytes()[part])
    monkeypatch.setenv("CXX", copying)
    for _ in range(2):
        library.best_kernels.cache_clear()
        kernels_for.cache_clear()
        assert load_kernels().path == str(path)
    assert (tmp_path / "runs").read_text() == "run\n"
    assert cache.stat().st_mode & 0o777 == 0o700


def without_symbols(folder: Path, monkeypatch) -> None:
    try:
        real = library.find_compiler()[0]
    except NativeKernelsError as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("CXX", script(folder / "empty", f"echo 'int x;' | {real} -shared -fPIC -x c++ - -o $out\n"))


def link_for_lock(folder: Path, monkeypatch) -> None:
    lock = folder.parent / "cache" / "native" / library.file_name(usable_sets()[0])
    library.own_folder(lock.parent)
    lock.with_suffix(".lock").symlink_to(folder / "precious")


def compiler(words: str, text: str = "") -> Any:
    """Return what names a compiler, or a script that is written."""
    return lambda folder, patch: patch.setenv("CXX", script(folder / words, text) if text else words)


FAULTS = {  # what is wrong, the message, and how it comes about
    "no compiler": (
        r"no C\+\+ compiler was found .*: install one, such as with `apt-get install g\+\+`",
        lambda folder, patch: (patch.delenv("CXX", raising=False), patch.setenv("PATH", str(folder))),
    ),
    "no such compiler": ("no-such-compiler", compiler("no-such-compiler -O2")),
    "no program": (
        "nothing cannot be run: .*; set CXX to GCC 11 or newer",
        lambda folder, patch: patch.setenv("CXX", script(folder / "nothing", " and no more", start="\x7fELF")),
    ),
    "an error of the compiler": (
        r"broken cannot compile the CPU kernels for \w+: native.cpp:7: no such letter; set CXX to GCC 11 or newer",
        compiler("broken", "echo half > $out\necho 'native.cpp:7: no such letter' >&2\nexit 3\n"),
    ),
    "no folder": (
        r"cannot be written or read: .*precious/native.*; set BERTLITE_CACHE to another folder",
        lambda folder, patch: patch.setenv("BERTLITE_CACHE", str(folder / "precious")),
    ),
    "no symbols": (r"\.so cannot be loaded: .*bertlite_run.*; delete it", without_symbols),
    "no library": (r"\.so cannot be loaded: .*; delete it", compiler("text", "echo text > $out\n")),
    "no quotation": (r"CXX is \"g\+\+ 'x\": No closing quotation; set it to GCC", compiler("g++ 'x")),
    "no output": ("true cannot compile .*: no output", compiler("true")),
    "no UTF-8": ("cannot compile .*; set CXX to GCC 11", compiler("latin", "printf '\\351' >&2\nexit 1\n")),
    "a link": ("Too many levels of symbolic links", link_for_lock),
    "another's": (
        r"native belongs to user \d+ and has mode 700: others may have put code there\. .*set BERTLITE_CACHE",
        lambda _, patch: patch.setattr(os, "geteuid", lambda: -1),
    ),
    "open to all": (
        r"has mode 777: others may have put code there\. Run `chmod 700 .*native` if it is yours",
        lambda folder, _: library.own_folder(folder.parent / "cache" / "native").chmod(0o777),
    ),
    "no home": (
        "there is no folder for compiled kernels",
        lambda _, patch: (patch.delenv("BERTLITE_CACHE"), patch.setattr(Path, "home", no_home)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_keeps_the_kernels_away_is_named_and_auto_is_plain(fault, cache, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("BERTLITE_NATIVE", usable_sets()[0].name)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "precious").write_text("precious")
    message, break_ = FAULTS[fault]
    break_(tmp_path / "inner", monkeypatch)
    model = make_native().float()
    for options in ({"backend": "native"}, {"dtype": torch.int8}):
        with pytest.raises(NativeKernelsError, match=message):
            optimize_for_inference(model, **options)
    with pytest.warns(RuntimeWarning, match="copy of the plain model") as warned:
        assert {optimize_for_inference(model, dtype=dtype).backend for dtype in DTYPES[:2]} == {"plain"}
    assert len(warned) == 1
    assert bool([*tmp_path.rglob("*.so")]) == (fault in ("no symbols", "no library")), "what a compiler began is left"
    assert (tmp_path / "inner" / "precious").read_text() == "precious"


def spoilt(runner, name: str):
    """Let the 8-bit results of one set be wrong in one number, if inputs are scaled."""

    def spoil(kernels, layer, numbers, x, scaled=False):
        out = runner(kernels, layer, numbers, x, scaled)()
        out[-1, -1] += 0.1 * (scaled and f"{name}-" in kernels.path)
        return lambda: out

    return spoil


LACKS = {  # why the best set has no kernels, and how it comes about
    "no C++ compiler was found": lambda folder, best, patch: (patch.delenv("CXX"), patch.setenv("PATH", str(folder))),
    "old cannot compile the CPU kernels": lambda folder, best, patch: patch.setenv(
        "CXX", script(folder / "old", f'case $out in */{best}-*) exit 3;; esac\nexec {os.environ["CXX"]} "$@"\n')
    ),
    "failed its self-test: scaled int8 of rotary positions is off by": lambda folder, best, patch: patch.setattr(
        self_test, "runner", spoilt(self_test.runner, best)
    ),
}


@pytest.mark.parametrize("reason", LACKS)
def test_where_the_best_set_has_no_kernels_the_next_is_taken_aloud(
    reason, cache, whole, copying, monkeypatch, tmp_path, caplog
):
    monkeypatch.delenv("BERTLITE_NATIVE", raising=False)
    monkeypatch.setenv("CXX", copying)
    best, following, *_ = [*usable_sets(), None]
    if following is None:
        pytest.skip("this processor has one set of instructions")
    LACKS[reason](tmp_path, best.name, monkeypatch)
    if "CXX" not in os.environ:  # and the wheel has no kernels for the best set
        library.PREBUILT.mkdir()
        shutil.copy(whole, library.PREBUILT / library.file_name(following))
    assert Path(load_kernels().path).name == library.file_name(following)
    assert optimize_for_inference(make_native().float(), backend="native").backend == "native"
    said = [record.message for record in caplog.records if record.name == "bertlite"]
    start = f"the native kernels are for {following.name}, not {best.name}: "
    (told,) = [each.removeprefix(start) for each in said if each.startswith(start)]
    assert reason in told


@pytest.mark.parametrize("best", ["avx512_bf16", "neon_bf16"])
@pytest.mark.parametrize(("bfloat16", "is_taken"), [(0.04, True), (0.11, False)])
def test_a_set_whose_bfloat16_is_slow_on_this_processor_is_not_taken(
    bfloat16, is_taken, best, cache, monkeypatch, caplog, capfd
):
    """By the clock of a thread, which only kernels move on: a machine may be busy with something else."""
    caplog.set_level("INFO", "bertlite")
    monkeypatch.delenv("BERTLITE_NATIVE", raising=False)
    monkeypatch.setattr(library, "processor_flags", lambda: INSTRUCTION_SETS[best].needs)
    busy, seconds = itertools.count(step=0.01), {"bfloat16": bfloat16, "float32": 0.08}
    clock: Any = SimpleNamespace(now=0.0, thread_time=lambda: clock.now, perf_counter=lambda: next(busy))
    monkeypatch.setattr(self_test, "time", clock)

    def runner(kernels, layer, numbers, x):
        def run():
            kernels.runs += 1
            clock.now += seconds[numbers]

        return run

    monkeypatch.setattr(self_test, "runner", runner)
    made = {
        name: SimpleNamespace(path=f"/cache/{name}-0.so", blocks={"float32": BLOCKS[0]}, runs=0)
        for name in INSTRUCTION_SETS
    }
    monkeypatch.setattr(library, "kernels_for", lambda name, *_: made[name])
    names = [each.name for each in usable_sets()]
    wanted = made[names[0 if is_taken else 1]]
    with warnings.catch_warnings(action="error"):
        assert load_kernels() is wanted
    runs = made[best].runs
    assert runs >= 8  # three rounds and one that warms up
    said = [f"one layer, measured once: bfloat16 {1000 * bfloat16:.2f} ms, float32 80.00 ms"]
    assert caplog.messages == said
    library.best_kernels.cache_clear()  # as another process
    assert load_kernels() is wanted
    assert (made[best].runs, caplog.messages, capfd.readouterr().err) == (runs, said, "")
    monkeypatch.setenv("BERTLITE_NATIVE", best)
    assert load_kernels() is made[best]
    monkeypatch.delenv("BERTLITE_NATIVE")
    library.best_kernels.cache_clear()
    monkeypatch.setattr(library, "processor_name", lambda: "another processor")
    seconds["bfloat16"] = 0.01
    assert load_kernels() is made[best]
    assert sum(each.runs for each in made.values()) > runs


@pytest.mark.slow
def test_without_the_systems_permission_for_amx_the_next_set_is_taken_aloud(monkeypatch, caplog):
    """Where Linux does not know AMX, or a sandbox forbids the call, its first instruction would end the process."""
    monkeypatch.delenv("BERTLITE_NATIVE", raising=False)
    if "amx_tile" in library.processor_flags() or usable_sets()[0].name != "avx512_bf16":
        pytest.skip("needs a processor with AVX-512 and BF16, and without AMX")
    monkeypatch.setattr(library, "processor_flags", lambda: INSTRUCTION_SETS["amx"].needs)
    monkeypatch.setattr(library, "is_bfloat16_slow", lambda kernels: False)  # nor is it measured for these flags
    library.best_kernels.cache_clear()
    assert "avx512_bf16-" in load_kernels().path
    assert "Linux does not let this process use the tiles" in caplog.text
    library.best_kernels.cache_clear()


def test_the_best_set_of_a_processor_is_taken_and_one_that_is_unknown_or_missing_is_named(monkeypatch):
    monkeypatch.delenv("BERTLITE_NATIVE", raising=False)
    for name, each in INSTRUCTION_SETS.items():
        monkeypatch.setattr(library, "processor_flags", lambda each=each: each.needs)
        assert usable_sets(reproducible=name == "baseline_exact")[0].name == name
    monkeypatch.setattr(library, "processor_flags", lambda: frozenset({"avx2"}))
    assert usable_sets()[0].name == "baseline"
    says = {"avx1024": "is unknown; have: amx, .*baseline", "avx2": "needs a processor with fma; unset it"}
    for name, message in says.items():
        monkeypatch.setenv("BERTLITE_NATIVE", name)
        with pytest.raises(NativeKernelsError, match=f"BERTLITE_NATIVE='{name}' {message}"):
            usable_sets()


@pytest.mark.parametrize(("system", "machine"), [("darwin", "ppc"), ("linux", "riscv64"), ("win32", "ARM64")])
def test_machines_that_have_kernels_and_others_are_refused(system, machine, monkeypatch):
    for each, known in [*library.MACHINES.items(), (system, [])]:
        monkeypatch.setattr(sys, "platform", each)
        for name in known or [machine]:
            monkeypatch.setattr(platform, "machine", lambda name=name: name)
            assert (library.missing_platform() is None) == (name in known)
    with pytest.raises(NativeKernelsError, match=f"and Windows on x86-64, not for {system} on {machine}"):
        load_kernels()


@pytest.mark.parametrize(
    ("system", "told", "best"),
    [
        ("darwin", "hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\n", "neon_dot"),
        ("darwin", "".join(f"hw.optional.arm.FEAT_{each}: 1\n" for each in ("DotProd", "I8MM", "BF16")), "neon_bf16"),
        ("darwin", "hw.optional.fma: 1\nhw.optional.avx2_0: 1\nhw.optional.avx512f: 0\n", "avx2"),
        ("linux", "processor\t: 0\nFeatures\t: fp asimd asimddp\n", "neon_dot"),
    ],
)
def test_what_a_processor_has_is_found(system, told, best, monkeypatch):
    monkeypatch.delenv("BERTLITE_NATIVE", raising=False)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, told))
    monkeypatch.setattr(Path, "read_text", lambda _: told)
    flags = library.processor_flags.__wrapped__()
    monkeypatch.setattr(library, "processor_flags", lambda: flags)
    assert usable_sets()[0].name == best


compiles = pytest.mark.skipif(library.PREBUILT.exists(), reason="this wheel holds compiled kernels")
CODE = "import sys, torch\nfrom bertlite.runtime.library import load_kernels\nprint(load_kernels().path)\n"


def begin(cache: Path, compiler: str) -> "subprocess.Popen[str]":
    named = usable_sets()[0].name  # so that a busy machine's clock does not choose
    environment = {**os.environ, "BERTLITE_CACHE": str(cache.parent), "CXX": compiler, "BERTLITE_NATIVE": named}
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-c", CODE], env=environment, **options)


@compiles
def test_of_two_processes_one_compiles(cache, copying, tmp_path):
    both = [begin(cache, copying) for _ in range(2)]
    outs = [each.communicate(timeout=120) for each in both]
    assert [each.returncode for each in both] == [0, 0], outs
    assert len({out for out, _ in outs}) == 1
    assert (tmp_path / "runs").read_text() == "run\n"
    assert sum("compiling the CPU kernels" in err for _, err in outs) == 1
    assert len(list(cache.glob("*.so"))) == 1
    assert [path for path in cache.iterdir() if path.is_dir()] == []


@compiles
def test_a_compiler_that_is_killed_leaves_nothing_that_is_taken_for_whole(cache, copying, whole, tmp_path):
    slow = script(tmp_path / "slow", f"echo half > $out\ntouch {tmp_path}/begun\nsleep 60\n")
    process = begin(cache, slow)
    limit = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert list(cache.glob("*.so")) == []
    again = begin(cache, copying)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert Path(out.strip()).read_bytes().startswith(Path(whole).read_bytes())


def test_other_sources_and_flags_have_other_names(monkeypatch, tmp_path):
    names = {library.file_name(each) for each in INSTRUCTION_SETS.values()}
    assert len(names) == len(INSTRUCTION_SETS)
    with monkeypatch.context() as patch:
        patch.setattr(library, "FLAGS", (*library.FLAGS, "-g"))
        assert not names & {library.file_name(each) for each in INSTRUCTION_SETS.values()}
    (tmp_path / "native.cpp").write_text("int x;")
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    assert not names & {library.file_name(each) for each in INSTRUCTION_SETS.values()}
