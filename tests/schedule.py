"""The order in which workers take groups of tests, how long the rest will take, and the durations that both need.

tests/durations.json holds the seconds of every file's tests.  `scripts/test --store-durations` measures them anew.
"""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bertlite.progress import in_words
from bertlite.records import write_json

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = Path(__file__).with_name("durations.json")
SECONDS_BETWEEN_LINES = 15.0
ALONE = ("test_notebooks.py",)  # files whose tests take long each, and may go to any worker


def file_of(test: str) -> str:
    """Return the file of a test's id, as tests/durations.json names it."""
    return test.partition("::")[0]


def group_of(test: str) -> str:
    """Return the group that one worker runs: a file, for its fixtures, or a single test of the files ALONE."""
    path = file_of(test)
    return test if path.rpartition("/")[2] in ALONE else path


def stored() -> dict[str, float]:
    """Return the seconds of each file's tests."""
    found: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return found


def expected(tests: Sequence[str], durations: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds that each test will take: its share of its file, or the mean where the file is new."""
    counts = Counter(map(file_of, tests))
    known = [name for name in counts if name in durations]
    mean = sum(durations[name] for name in known) / sum(counts[name] for name in known) if known else 1.0
    return {test: durations.get(file_of(test), mean * counts[file_of(test)]) / counts[file_of(test)] for test in tests}


def longest_first(tests: Sequence[str], durations: Mapping[str, float]) -> list[int]:
    """Return the positions of the tests with the longest group first; within a group their order stays."""
    seconds, groups = expected(tests, durations), defaultdict[str, float](float)
    for test in tests:
        groups[group_of(test)] += seconds[test]
    first = {group_of(test): i for i, test in reversed(list(enumerate(tests)))}
    return sorted(range(len(tests)), key=lambda i: (-groups[group_of(tests[i])], first[group_of(tests[i])], i))


class TimeLeft:
    """A plugin that prints now and then how many tests are done and how long the rest will take."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.seconds = config, dict[str, float]()
        self.finished: set[str] = set()
        self.measured: defaultdict[str, float] = defaultdict(float)
        self.started = self.last_line = time.monotonic()

    def begin(self, tests: Iterable[str]) -> None:
        """Take the tests that will run."""
        if not self.seconds:
            self.seconds = expected(list(tests), stored())
            self.started = self.last_line = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.begin(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.begin([item.nodeid for item in session.items])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self.measured[file_of(test)] += report.duration
        if report.when == "teardown":
            self.finished.add(test)
        if time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            terminal: Any = self.config.pluginmanager.get_plugin("terminalreporter")
            if terminal is not None:
                terminal.ensure_newline()
                terminal.write_line(self.line())

    def line(self) -> str:
        """Return how the tests stand: "[ 40 %] 1,210 of 5,334 tests, 2 min 17 s left"."""
        whole = sum(self.seconds.values())
        done = sum(self.seconds.get(test, 0.0) for test in self.finished)
        share = done / whole if whole else 0.0
        left = (time.monotonic() - self.started) * (1 / share - 1) if share > 0.01 else None
        words = "" if left is None else f", {in_words(max(left, 0))} left"
        return f"[{100 * share:3.0f} %] {len(self.finished):,} of {len(self.seconds):,} tests{words}"

    def pytest_sessionfinish(self) -> None:
        if self.config.getoption("--store-durations"):
            write_json(DURATIONS, {name: round(self.measured[name], 1) for name in sorted(self.measured)})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--store-durations", action="store_true", help="measure tests/durations.json anew; for a run of all tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(TimeLeft(config), "time-left")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let workers begin with the groups that take longest."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        tests = [item.nodeid for item in items]
        items[:] = [items[i] for i in longest_first(tests, stored())]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each group to one worker, whatever --dist says."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)
