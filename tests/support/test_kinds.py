"""bertlite/support/kinds.py: a value of another kind than the annotation's is an error that names the argument."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertlite.support.kinds import check_settings, checked

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Settings:
    text: tuple[str, ...] = ("text",)
    rate: float = 0.5
    length: int | None = None

    def __post_init__(self) -> None:
        check_settings(self)


@checked
def work(
    checkpoint: str | os.PathLike[str] = "a",
    files: Paths = "a",
    *,
    settings: Settings = Settings(),
    count: int | None = None,
    share: float = 0.5,
    quick: bool = False,
    rows: Iterable[Mapping[str, Any]] = (),
    call: Callable[[], int] | None = None,
    anything: Any = None,
    quoted: "str | None" = None,
) -> str:
    """Return the first argument as a string."""
    return os.fspath(checkpoint)


class Model:
    config = None


@pytest.mark.parametrize(
    "given",
    [
        {"checkpoint": Path("a"), "files": [Path("a"), "b"]},
        {"files": ("a",), "count": np.int64(3), "share": np.float32(0.5), "quick": np.bool_(True)},
        {"count": None, "share": 1, "rows": iter([{}]), "call": lambda: 3},
        {"rows": np.array([{"a": 1}]), "anything": 3, "quoted": 3, "settings": Settings(text=["a"])},  # type: ignore[arg-type]
    ],
)
def test_values_of_the_kind_are_taken(given: dict[str, Any]) -> None:
    work(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checkpoint": None}, "checkpoint is None; give the path of a folder, or a hub id"),
        ({"checkpoint": b"a"}, "checkpoint is b'a'; give the path of a folder, or a hub id"),
        ({"checkpoint": ""}, "checkpoint is ''; give the path of a folder, or a hub id"),
        ({"checkpoint": Model()}, "hub id; save_pretrained(FOLDER) writes a model there"),
        ({"files": 3}, "files is 3; give a path or a list"),
        ({"files": ["a", None]}, "files[1] is None; give a path"),
        ({"files": {"a": 1}}, "files is {'a': 1}; give a path or a list"),
        ({"files": np.zeros((2, 2))}, "files is of type ndarray; give a path or a list"),
        ({"settings": {"rate": 1}}, "settings is {'rate': 1}; give a test_kinds.Settings"),
        ({"count": 1.5}, "count is 1.5; give an integer or None"),
        ({"count": True}, "count is True; give an integer or None"),
        ({"share": "half"}, "share is 'half'; give a number"),
        ({"quick": 1}, "quick is 1; give True or False"),
        ({"rows": [{}, 3]}, "rows[1] is 3; give a dict"),
        ({"rows": {"a": 1}}, "rows is {'a': 1}; give a list"),
        ({"rows": "ab"}, "rows is 'ab'; give a list"),
        ({"call": 3}, "call is 3; give a "),
    ],
)
def test_other_values_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        work(**given)
    assert message in str(caught.value).replace("tests.support.", "")


def test_fields_of_settings_are_checked() -> None:
    for given, message in (({"text": ("a", 3)}, r"text\[1\] is 3; give a string"), ({"length": "3"}, "length is '3'")):
        with pytest.raises(TypeError, match=message):
            Settings(**given)


def test_calls_that_do_not_fit_have_pythons_own_error() -> None:
    with pytest.raises(TypeError, match=r"work\(\) got an unexpected keyword argument 'chekpoint'"):
        work(chekpoint="a")  # type: ignore[call-arg]
    assert work("b") == "b"
    assert work.__doc__ == "Return the first argument as a string."
