"""Rules for the fields of a description in JSON, in tables, and one function that checks them.

A table is an object's fields and the rule of each.  A rule is another table, a list of rules that must hold in turn,
or a function that yields the faults of a value, as the functions below return.  Classes would take longer to import.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from reprlib import Repr
from typing import Any

LARGEST = 2**62  # an integer that the kernels can hold, and its sum with another
DEEPEST = 20  # levels of values within values
SHORT = Repr()  # so that a message stays short, whatever a file holds
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 60
Rule = Callable[[str, Any], Iterator[str]]  # the name and the value of a field -> its faults


def must_be(words: str, holds: Callable[[Any], bool]) -> Rule:
    """Return a rule for values for which a function returns true; the words stand after "must be"."""

    def faults(name: str, value: Any) -> Iterator[str]:
        if not holds(value):
            yield f"{name or 'it'} is {SHORT.repr(value)}; it must be {words}"

    return faults


def or_null(rule: Any) -> Rule:
    """Return a rule for values that may be null instead."""
    return lambda name, value: iter(()) if value is None else faults_of(name, value, rule)


def every(rule: Any, *, named: bool = False) -> Rule:
    """Return a rule for a list, or with `named` an object with any fields, of values that all obey a rule."""

    def faults(name: str, value: Any) -> Iterator[str]:
        unfit = [*(AN_OBJECT if named else A_LIST)(name, value)]
        yield from unfit
        for key, inner in () if unfit else value.items() if named else enumerate(value):
            yield from faults_of(f"{name}[{key!r:.60}]", inner, rule)

    return faults


def choice(field: str, tables: dict[str, Any]) -> Rule:
    """Return a rule for an object with a field that chooses the rules for its other fields."""
    known = {field: one_of(*tables)}

    def faults(name: str, value: Any) -> Iterator[str]:
        unknown = [*faults_of(name, value, known)]
        yield from unknown or faults_of(name, value, tables[value[field]])

    return faults


def whole(fault: str, holds: Callable[[Any], bool]) -> Rule:
    """Return a rule for an object as a whole, after the rules for its fields, with its fault in words."""
    return lambda name, value: iter(() if holds(value) else (fault,))


class Maybe:
    """A field that an object may lack, as those lack it that earlier versions wrote."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule


def one_of(*known: Any) -> Rule:
    words = f"one of {', '.join('null' if x is None else str(x) for x in known)}"
    pairs = [(type(x), x) for x in known]  # true is no 1
    return must_be(words, lambda x: (type(x), x) in pairs)


def whole_number(low: int, high: int = LARGEST) -> Rule:
    words = f"an integer, {low} {'or more' if high == LARGEST else f'to {high}'}"
    return must_be(words, lambda x: type(x) is int and low <= x <= high)


AN_OBJECT, A_LIST = must_be("an object", lambda x: type(x) is dict), must_be("a list", lambda x: type(x) is list)
FLAG, TEXT = must_be("true or false", lambda x: type(x) is bool), must_be("a string", lambda x: type(x) is str)
NAME = must_be("a name", lambda x: not isinstance(x, dict | list))
POSITIVE = must_be("a number above 0, and finite", lambda x: type(x) in (int, float) and 0 < x < 1e30)  # in float32
ABOVE_1 = must_be("a number above 1, and finite", lambda x: type(x) in (int, float) and 1 < x < 1e30)
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
    return values


def check_fields(path: Path, values: Any, rule: Any, way_out: str) -> None:
    """Raise ValueError if a value of a file breaks a rule; the message names the file, the field and the rule."""
    fault = next(faults_of("", values, rule), None)
    if fault is not None:
        raise ValueError(f"{path} cannot be used: {fault}; {way_out}")


def faults_of(name: str, value: Any, rule: Any) -> Iterator[str]:
    """Yield the faults of a field, and of all fields in it."""
    if isinstance(rule, list):
        yield from next(filter(None, ([*faults_of(name, value, inner)] for inner in rule)), [])
    elif not isinstance(rule, dict):
        yield from rule(name, value)
    elif unfit := [*AN_OBJECT(name, value)]:
        yield from unfit
    else:
        for key, inner in rule.items():
            field = f"{name}.{key}" if name else key
            if key in value:
                yield from faults_of(field, value[key], inner.rule if isinstance(inner, Maybe) else inner)
            elif not isinstance(inner, Maybe):
                yield f"{field} is missing"
