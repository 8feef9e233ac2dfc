"""The quick choice of cases: few, and of every value that each facet of the whole has."""

import random
from dataclasses import asdict

import pytest

pytest.importorskip("transformers")

from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity import Case, cases, command, reference
from bertlite.parity.cases import CASES, GRADIENTS, cases_for, choose, facets_of, seconds_of

WHOLES = {(device, shape): cases_for(device, shape) for device in ("cpu", "cuda") for shape in (False, True)}
EACH = pytest.mark.parametrize("whole", WHOLES.values(), ids=lambda cases: f"{len(cases)} cases")


def touched(cases, pairs=True):
    return set().union(*(facets_of(case, pairs) for case in cases))


@EACH
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "single"])
def test_every_facet_of_the_whole_is_touched(whole, pairs):
    chosen = choose(whole, reference.unsupported, pairs)
    assert touched(chosen, pairs) == touched(whole, pairs)
    assert list(chosen) == [case for case in whole if case in set(chosen)]
    assert 3 * len(chosen) < len(whole) or len(whole) < 100
    for case in chosen:
        others = [each for each in chosen if each is not case]
        assert touched(others, pairs) != touched(whole, pairs), f"{case.name} is superfluous"


@EACH
def test_what_transformers_vouches_for_is_touched_by_what_it_vouches_for(whole):
    """A facet that only unchecked cases had would be untouched."""
    vouched = [case for case in whole if not reference.unsupported(case)]
    chosen = [case for case in choose(whole, reference.unsupported) if not reference.unsupported(case)]
    assert touched(chosen) == touched(vouched)


def test_the_choice_is_the_same_in_every_process(monkeypatch):
    """A set of names has another order in each."""
    draw = random.Random(0)
    monkeypatch.setattr(cases, "facets_of", lambda *args: sorted(facets_of(*args), key=lambda _: draw.random()))
    assert len({choose(CASES, reference.unsupported, pairs=False) for _ in range(4)}) == 1


def test_the_facets_are_the_fields_of_a_case_and_pairs_of_them():
    found = {name for name, *_ in facets_of(Case(feature="gradients"))}
    assert found >= {*asdict(CASES[0]), "backend × dtype", "backend × feature", "gradients of"}


def test_a_case_that_is_not_vouched_for_stands_for_its_facet_alone():
    one, other = Case("BertModel", "eager", dtype="float32"), Case("BertModel", "sdpa", dtype="float32")
    assert choose([one, other], lambda case: case is other) == (one, other)
    relative = Case("BertModel", "eager", dtype="float32", feature="relative_key")
    plain = Case("BertModel", "eager", dtype="float32")
    assert choose([relative, plain], lambda case: case is relative) == (relative, plain)


def test_a_dear_case_is_chosen_only_where_nothing_cheaper_will_do():
    short, long = Case(batch="padded"), Case(batch="long")
    assert seconds_of(long) > seconds_of(short)
    chosen = choose(CASES, reference.unsupported)
    assert {case.dtype for case in chosen if case.batch == "long"} == {"float32"}
    assert sum(case.dtype == "float16" for case in chosen) <= 5, "float32 is compared bit for bit, in half the time"
    shape = choose(cases_for("cpu", True), reference.unsupported, pairs=False)
    assert "long" not in {case.batch for case in shape}, "of a large checkpoint it takes longer than all else"
    assert {case.dtype for case in shape if case.feature in GRADIENTS} == {"float32"}, "of float16, 28 seconds"


def test_a_large_checkpoint_has_fewer_cases(tmp_path, monkeypatch):
    sizes = {"vocab_size": 31, "num_attention_heads": 4, "max_position_embeddings": 16}
    reference.base_shaped(tmp_path / "small", **sizes, hidden_size=16, num_hidden_layers=1, intermediate_size=24)
    small_one = Checkpoint(tmp_path / "small")
    small = command.quick_choice(CASES, small_one)
    assert small == choose(CASES, reference.unsupported)
    assert reference.weights_of_layers(small_one.config) == 4 * 16 * 16 + 2 * 16 * 24
    monkeypatch.setattr(reference, "weights_of_layers", lambda config: 85_000_000)
    large = command.quick_choice(CASES, small_one)
    assert large == choose(CASES, reference.unsupported, pairs=False)
    assert len(large) < len(small)
