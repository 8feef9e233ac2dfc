"""Rules for the fields of a description in JSON, in tables, and one function that checks them.

A table is an object's fields and the rule of each.  A rule is another table, a list of rules that must hold in turn,
or one of the classes below.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any

LARGEST = 2**62  # an integer that the kernels can hold, and its sum with another
DEEPEST = 20  # levels of values within values
SHORT = Repr()  # so that a message stays short, whatever a file holds
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 60


@dataclass(frozen=True)
class Value:
    """A value for which a function returns true.

    Args:
        words: the values that are meant, after "must be".
    """

    words: str
    holds: Callable[[Any], bool]

    def faults(self, name: str, value: Any) -> Iterator[str]:
        if not self.holds(value):
            yield f"{name or 'it'} is {SHORT.repr(value)}; it must be {self.words}"


@dataclass(frozen=True)
class OrNull:
    """A value that may be null instead."""

    rule: Any

    def faults(self, name: str, value: Any) -> Iterator[str]:
        return iter(()) if value is None else faults_of(name, value, self.rule)


@dataclass(frozen=True)
class Each:
    """A list, or with `named` an object with any fields, of which each value obeys a rule."""

    rule: Any
    named: bool = False

    def faults(self, name: str, value: Any) -> Iterator[str]:
        unfit = [*(AN_OBJECT if self.named else A_LIST).faults(name, value)]
        yield from unfit
        for key, each in () if unfit else value.items() if self.named else enumerate(value):
            yield from faults_of(f"{name}[{SHORT.repr(key)}]", each, self.rule)


@dataclass(frozen=True)
class Maybe:
    """A field that an object may lack, as those lack it that earlier versions wrote."""

    rule: Any


@dataclass(frozen=True)
class Choice:
    """An object with a field that chooses the rules for its other fields."""

    field: str
    tables: dict[str, Any]

    def faults(self, name: str, value: Any) -> Iterator[str]:
        unknown = [*faults_of(name, value, {self.field: one_of(*self.tables)})]
        yield from unknown or faults_of(name, value, self.tables[value[self.field]])


@dataclass(frozen=True)
class Whole:
    """A rule for an object as a whole, after the rules of its fields, and the fault in words if it does not hold."""

    fault: str
    holds: Callable[[Any], bool]

    def faults(self, _: str, value: Any) -> Iterator[str]:
        if not self.holds(value):
            yield self.fault


def one_of(*known: Any) -> Value:
    words = f"one of {', '.join('null' if each is None else str(each) for each in known)}"
    return Value(words, lambda x: any(type(x) is type(each) and x == each for each in known))


def whole_number(low: int, high: int = LARGEST) -> Value:
    words = f"an integer, {low} {'or more' if high == LARGEST else f'to {high}'}"
    return Value(words, lambda x: type(x) is int and low <= x <= high)


AN_OBJECT, A_LIST = Value("an object", lambda x: type(x) is dict), Value("a list", lambda x: type(x) is list)
FLAG, TEXT = Value("true or false", lambda x: type(x) is bool), Value("a string", lambda x: type(x) is str)
NAME = Value("a name", lambda x: not isinstance(x, dict | list))
POSITIVE = Value("a number above 0, and finite", lambda x: type(x) in (int, float) and 0 < x < 1e300)
COUNT, SIZE = whole_number(0), whole_number(1)


def parse_json(path: Path, text: str | bytes, way_out: str) -> dict[str, Any]:
    """Return the JSON object of a file; raise ValueError, which names the file, if the text is none."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON, or cut short ({error}): {way_out}") from None
    level = [values]
    for _ in range(DEEPEST):  # else Python could write it no more, as checksums need it
        level = [each for x in level if isinstance(x, dict | list) for each in (x.values() if type(x) is dict else x)]
    if level:
        raise ValueError(f"{path} is nested {DEEPEST} deep: {way_out}")
    check_fields(path, values, AN_OBJECT, way_out)
    found: dict[str, Any] = values
    return found


def check_fields(path: Path, values: Any, rule: Any, way_out: str) -> None:
    """Raise ValueError if a value of a file breaks a rule; the message names the file, the field and the rule."""
    fault = next(faults_of("", values, rule), None)
    if fault is not None:
        raise ValueError(f"{path} cannot be used: {fault}; {way_out}")


def faults_of(name: str, value: Any, rule: Any) -> Iterator[str]:
    """Yield the faults of a field, and of all fields in it."""
    if isinstance(rule, list):
        yield from next(filter(None, ([*faults_of(name, value, each)] for each in rule)), [])
    elif not isinstance(rule, dict):
        yield from rule.faults(name, value)
    elif unfit := [*AN_OBJECT.faults(name, value)]:
        yield from unfit
    else:
        for key, each in rule.items():
            inner = f"{name}.{key}" if name else key
            if key in value:
                yield from faults_of(inner, value[key], each.rule if isinstance(each, Maybe) else each)
            elif not isinstance(each, Maybe):
                yield f"{inner} is missing"
