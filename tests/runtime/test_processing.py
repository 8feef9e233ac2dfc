"""bertlite/runtime/processing.py: one description of the steps before and after an encoder, and its JSON."""

from typing import Any

import pytest

from bertlite.runtime.processing import Processing
from bertlite.runtime.tasks import from_dict, to_dict

TEXTS = {
    "max_length": 9,
    "lower_case": True,
    "segments": False,
    "truncation_side": "left",
    "prompts": {"ask": "query: "},
    "default_prompt": "ask",
}
SCORES = {"labels": ["no", "yes"], "activation": "sigmoid"}
OWN: dict[str, dict[str, Any]] = {
    "encoder": {
        "pooling": {"modes": ["cls", "max"], "include_prompt": False},
        "after": [{"type": "truncate", "size": 5}],
        "similarity": "dot",
    },
    "cross-encoder": SCORES,
    "classifier": SCORES,
    "tagger": {"unknown": "<unk>", **SCORES},
}
MADE = {"checkpoint": "me/bert", "bertlite": "0.1.0", "kept": {}, "rounding": None}


@pytest.mark.parametrize("kind", OWN)
def test_a_description_is_written_as_it_was_read(kind: str) -> None:
    values = {"format": 1, "kind": kind, "texts": TEXTS, **OWN[kind], "made": MADE}
    assert [*to_dict(from_dict(values)).items()] == [*values.items()], "in the order of its entries"


def test_entries_that_an_earlier_version_did_not_write_have_their_defaults() -> None:
    pooling = {"modes": ["mean"], "include_prompt": True}
    about = from_dict({"format": 1, "kind": "encoder", "texts": {"max_length": 7, "prompts": {}}, "pooling": pooling})
    assert about == Processing(max_length=7, modes=["mean"])
    assert (about.segments, about.similarity, about.prompt()) == (True, "cosine", "")


def test_an_entry_counts_only_in_its_own_place() -> None:
    texts = {**TEXTS, "kind": "tagger", "labels": 3, "fault": "none"}
    about = from_dict({"format": 1, "kind": "classifier", "texts": texts, **SCORES, "max_length": 99})
    assert (about.kind, about.labels, about.fault, about.max_length) == ("classifier", ["no", "yes"], "", 9)
