"""The order of the tests, the time left, and the choice of `scripts/test --quick`."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import schedule
from tests.schedule import TimeLeft, expected, longest_first, stored

ROOT = Path(__file__).resolve().parents[1]
pytest_plugins = ["pytester"]
QUICK = (ROOT / "tests" / "quick.txt").read_text(encoding="utf-8").splitlines()
CHOSEN = [line for line in QUICK if not line.startswith("--deselect=")]
NOTEBOOKS = ["tests/test_notebooks.py::test_runs[one]", "tests/test_notebooks.py::test_runs[two]"]
TESTS = ["tests/a.py::one", "tests/a.py::two", "tests/b.py::one", *NOTEBOOKS, "tests/new.py::one", "tests/a.py::three"]
SECONDS = {"tests/a.py": 6.0, "tests/b.py": 8.0, "tests/test_notebooks.py": 14.0}


def test_each_test_takes_its_share_of_its_file_and_a_new_one_the_mean():
    seconds = expected(TESTS, SECONDS)
    assert [seconds[test] for test in TESTS] == pytest.approx([2, 2, 8, 7, 7, 28 / 6, 2])
    assert expected(["tests/new.py::one"], {}) == {"tests/new.py::one": 1.0}


def test_the_longest_group_is_first_and_a_group_stays_together():
    ordered = [TESTS[i] for i in longest_first(TESTS, SECONDS)]
    assert ordered == [
        "tests/b.py::one",
        *NOTEBOOKS,  # each is a group
        *("tests/a.py::one", "tests/a.py::two", "tests/a.py::three"),
        "tests/new.py::one",
    ]
    assert sorted(longest_first(TESTS, {})) == list(range(len(TESTS)))


@pytest.mark.slow
def test_a_file_is_run_by_one_worker_and_a_notebook_by_any(pytester):
    """In processes of pytest-xdist, whose own groups pytest 9.2 does not see."""
    pytest.importorskip("xdist")
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.schedule import pytest_addoption, pytest_collection_modifyitems, pytest_xdist_make_scheduler"
    )
    one = """
import os, pytest

@pytest.mark.parametrize("i", range(4))
def test_it(i):
    with open("ran.txt", "a") as file:
        print(__name__, os.environ["PYTEST_XDIST_WORKER"], file=file)
"""
    pytester.makepyfile(test_a=one, test_b=one, test_notebooks=one)
    assert pytester.runpytest_subprocess("-n2", "--no-loadscope-reorder", "-p", "no:cacheprovider").ret == 0
    ran = (pytester.path / "ran.txt").read_text().splitlines()
    assert len(ran) == 12
    workers = {name: {line for line in ran if line.startswith(name)} for name in ("test_a", "test_b")}
    assert [len(found) for found in workers.values()] == [1, 1]


class Terminal:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def ensure_newline(self) -> None:
        pass

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def reporting(monkeypatch: pytest.MonkeyPatch, store: bool = False) -> tuple[TimeLeft, Terminal, list[float]]:
    """Return the plugin over TESTS, what it writes to, and a clock that the test sets."""
    clock, terminal = [100.0], Terminal()
    config = SimpleNamespace(
        pluginmanager=SimpleNamespace(get_plugin=lambda name: terminal), getoption=lambda name: store
    )
    monkeypatch.setattr(f"{schedule.__name__}.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(schedule, "stored", lambda: SECONDS)
    plugin = TimeLeft(config)
    clock[0] = 110.0  # collection does not count
    plugin.pytest_xdist_node_collection_finished(TESTS)
    return plugin, terminal, clock


def test_the_time_left_follows_from_what_is_done(monkeypatch):
    plugin, terminal, clock = reporting(monkeypatch)
    report = SimpleNamespace(nodeid="tests/b.py::one", when="call", duration=3.0)
    clock[0] = 120.0
    plugin.pytest_runtest_logreport(report)
    assert terminal.lines == []
    clock[0] = 126.0
    plugin.pytest_runtest_logreport(SimpleNamespace(**{**vars(report), "when": "teardown"}))
    done = 8 / (28 + 28 / 6)
    assert terminal.lines == [f"[{100 * done:3.0f} %] 1 of 7 tests, {16 * (1 / done - 1):.0f} s left"]
    clock[0] = 130.0
    plugin.pytest_runtest_logreport(SimpleNamespace(**{**vars(report), "nodeid": "tests/a.py::one"}))
    assert len(terminal.lines) == 1, "a line every 15 seconds at most"


def test_durations_are_stored_if_asked(monkeypatch, tmp_path):
    path = tmp_path / "durations.json"
    monkeypatch.setattr(schedule, "DURATIONS", path)
    for store in (False, True):
        plugin, _, _ = reporting(monkeypatch, store)
        for when in ("setup", "call", "teardown"):
            plugin.pytest_runtest_logreport(SimpleNamespace(nodeid="tests/b.py::x[a@b]", when=when, duration=0.51))
        plugin.pytest_sessionfinish()
        assert path.exists() is store
    assert path.read_text() == '{\n "tests/b.py": 1.5\n}\n'


def test_the_stored_durations_are_of_files_that_exist():
    """`scripts/test --store-durations` measures them anew."""
    assert [name for name in stored() if not (ROOT / name).is_file()] == []
    assert sum(stored().values()) > 100


def test_every_line_of_the_quick_choice_names_tests():
    for line in QUICK:
        path, _, test = line.removeprefix("--deselect=").partition("::")
        assert (ROOT / path).is_file(), line
        name = test.partition("[")[0]
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), line


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("", "-m not slow"),
        ("--all", ""),
        ("--quick", "-m not slow @tests/quick.txt"),
        ("--quick --all", "@tests/quick.txt"),
        ("--all --with 4.57.6", "4.57.6"),
        ("-m slow", "-m not slow -m slow"),  # pytest takes the last
    ],
)
def test_slow_tests_are_run_if_asked(given, asked, tmp_path):
    """By scripts/test, beside an interpreter that prints what it is asked."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts")
    for name in ("scripts/bootstrap", ".venv/bin/python", ".venv-4.57.6/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / name).chmod(0o755)
    command = [tmp_path / "scripts" / "test", *given.split()]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for common in ("-m pytest", "-n auto --no-loadscope-reorder"):
        assert common in said
        said = said.replace(common, "")
    assert said.split() == asked.split()


def test_the_quick_choice_touches_every_room():
    """Every folder of tests, and every room of the package that has tests by its name."""
    rooms = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert {line.split("/")[1] for line in CHOSEN if line.count("/") == 2} == rooms
    packages = {path.parent.name for path in (ROOT / "bertlite").glob("*/__init__.py")}
    assert packages - rooms == {"attention_view", "cli"}
    assert {"tests/test_attention_view.py", "tests/test_cli.py"} <= set(CHOSEN)


@pytest.mark.slow
def test_the_quick_choice_is_a_part_of_the_tests():
    """As pytest collects it, through the file that scripts/test passes."""
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", "@tests/quick.txt", "--collect-only", "-qq", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout[-2000:]
    counts = dict(re.findall(r"^(tests/\S+\.py): (\d+)$", shown.stdout, re.MULTILINE))
    assert set(counts) == {line.partition("::")[0] for line in CHOSEN}
