"""One table of laws: each way to run a model obeys each law, with each kind of model, or a reason says why not."""

import copy
import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
import ways
from conftest import HEADS, SIZES, assert_same, distance, tensors
from natively import assert_near
from simulated import record
from torch import nn
from ways import KINDS, WAYS, Row, batch_of, made_again, made_of, make_way, model_of, rows_of_batch, text_of

from bertlite import BertModel, prune_heads
from bertlite.checkpoint.families import FAMILIES
from bertlite.inference import InferenceModel
from bertlite.inference.gpu import graphs
from bertlite.shipping.pack import pack
from bertlite.stack.body import BertBody

ALL = range(SIZES["num_attention_heads"])
EQUAL = [text_of(11, seed) for seed in (1, 2)]
MIXED = [text_of(length) for length in (11, 3, 7, 2, 10)]
MANY = [text_of(33, seed) for seed in range(40)]
Call = Callable[[Any], list[Row]]


def assert_rows(got: list[Row], wanted: list[Row], within: float = 0) -> None:
    places, others = (
        [[(place, x.shape, x.dtype) for place, x in row.items()] for row in each] for each in (got, wanted)
    )
    assert places == others
    assert places
    mine, other = (torch.cat([x.flatten() for row in each for x in row.values()]) for each in (got, wanted))
    if not (torch.equal(mine, other) or (mine - other).abs().max() <= within):  # quick; else say where
        for row, same in zip(got, wanted, strict=True):
            assert_same(row, same, atol=within)


def assert_near_rows(*rows: list[Row]) -> None:
    """Assert that rows are as near to the truth as those of another way."""
    assert_near(*({place: torch.cat([row[place].flatten() for row in each]) for place in rows[0][0]} for each in rows))


def calls_of(way: str, kind: str) -> list[Call]:
    """Return calls that ask what runs for different things."""
    it, config = WAYS[way], model_of(kind).config
    calls: list[Call] = [partial(it.rows, texts=texts) for texts in ([text_of(3)], EQUAL, MIXED)]
    if it.is_model:
        calls += [partial(it.rows, texts=MIXED, **it.asks), partial(it.rows, texts=MIXED, first_token_only=True)]
    if it.is_model and it.takes_masks:
        draw = torch.Generator().manual_seed(5)
        heads = 1 if config.pruned_heads else len(ALL)
        allowed = torch.rand(2, heads, 11, 11, generator=draw, dtype=torch.float32) > 0.4
        gates = torch.rand(3, 2, len(ALL), generator=draw, dtype=torch.float32)
        batch = {**batch_of(EQUAL, config), "attention_mask": allowed, "head_mask": gates}
        calls.append(torch.no_grad()(lambda made: [tensors(made(**batch, **ways.BOTH))]))
    return calls


def answers(calls: list[Call], made: Any) -> list[Row]:
    return [row for call in calls for row in call(made)]


# Laws, of a way and a kind


def padding(way: str, kind: str, folder: Path) -> None:
    """Padding on any side changes nothing; where the kernels compute it, on the left, they add in another order."""
    made, it = made_of(way, kind), WAYS[way]
    wanted, skips = it.rows(made, EQUAL, **it.asks), getattr(made.config, "positions_skip_padding", False)
    for left, right in ((0, 4), (4, 0), (1, 2)) if it.is_model or skips else [(0, 4)]:
        got = it.rows(made, EQUAL, left=left, right=right, **it.asks)
        unpadded = [{place: row[place] for place in got[0]} for row in wanted]
        if left and it.rounded is not None:
            assert_near_rows(got, unpadded, it.rows(made_of("eager", kind), EQUAL, **it.asks))
        else:
            assert_rows(got, unpadded, it.within)


def alone(way: str, kind: str, folder: Path) -> None:
    """A text gives alone what it gives among others, in any order."""
    made, it, order = made_of(way, kind), WAYS[way], [3, 0, 4, 2, 1]
    together = it.rows(made, MIXED, **it.asks)
    assert_rows([it.rows(made, [text], **it.asks)[0] for text in MIXED], together, it.within)
    shuffled = it.rows(made, [MIXED[i] for i in order], **it.asks)
    assert_rows(shuffled, [together[i] for i in order], it.within)


def copied(way: str, kind: str, folder: Path) -> None:
    """A copy gives the same bits, and a change of it, or of the model, changes nothing else."""
    it, source = WAYS[way], copy.deepcopy(model_of(kind))
    made = make_way(way, source)
    wanted = it.rows(made, MIXED, **it.asks)
    spoil_(source)
    assert_rows(it.rows(made, MIXED, **it.asks), wanted)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert_rows(it.rows(other, MIXED, **it.asks), wanted)
        assert_alike(other, made)
        if type(made) is BertModel:
            assert other.config == made.config
            assert other.is_gradient_checkpointing
        spoil_(other)
        if isinstance(made, BertBody):
            other.prune_heads({2: [0]})
            assert 2 not in made.config.pruned_heads
        assert_rows(it.rows(made, MIXED, **it.asks), wanted)


def assert_alike(other: Any, made: Any) -> None:
    for name in ("backend", "compute_dtype", "rounding", "settings", "threads", "batch_tokens"):
        assert getattr(other, name, None) == getattr(made, name, None), name


def spoil_(made: Any) -> None:
    """Set all weights of a module to 0."""
    for part in made.modules() if isinstance(made, nn.Module) else ():
        for x in (*part.parameters(), *([part.weights] if hasattr(part, "weights") else [])):  # the latter are packed
            x.data.zero_()


def loaded(way: str, kind: str, folder: Path) -> None:
    """What was saved gives the same bits when it is loaded, by several threads at once too."""
    made, calls, load, packed = made_of(way, kind), calls_of(way, kind), WAYS[way].load, way.startswith("native")
    assert load is not None
    (made.save if packed else made.save_pretrained)(folder)
    with ThreadPoolExecutor(4) as pool:  # transformers' loading is not for threads
        found = list(pool.map(partial(load, made), [folder] * (1 if way == "hf" else 3)))
    for path in folder.glob("*.safetensors") if packed else ():  # what is loaded does not change with the file
        with path.open("rb+") as file:
            file.write(bytes(path.stat().st_size))
    wanted = answers(calls, made)
    for again in found:
        assert_rows(answers(calls, again), wanted)
        assert_alike(again, made)


def gated(way: str, kind: str, folder: Path) -> None:
    """A model without heads gives what the whole one gives with gates of 0 at these heads, as eager attention does."""
    it, model = WAYS[way], model_of(kind)
    rows_of = rows_of_batch if it.rows is rows_of_batch else ways.means_of_texts
    many = way in ("eager", "sdpa") and kind in ("bert", "relative_key", "mpnet", "deberta-v2")
    for heads in [*HEADS.values()][: len(HEADS) if many else 2]:
        gates = torch.ones(len(model.encoder.layer), len(ALL), dtype=torch.float64)
        for layer, gone in model.config.pruned_heads.items():
            gates[layer, list(gone)] = 99  # a head that is gone is not heard
        for layer, gone in heads.items():
            gates[layer, list(gone)] = 0
        truth = rows_of(made_of("eager", kind), MIXED, **it.asks, head_mask=gates)
        small = prune_heads(model, heads) if heads else model
        found = [it.rows(make_way(way, small) if heads else made_of(way, kind), MIXED, **it.asks)]
        if it.is_model and way != "eager":
            cast = gates if it.rounded is None else gates.float()
            found.append(it.rows(made_of(way, kind), MIXED, **it.asks, head_mask=cast))
        theirs = rows_of(it.rounded(copy.deepcopy(small)), MIXED, **it.asks) if it.rounded else None
        for each in found:
            if theirs is None:
                assert_rows(each, truth, it.within)
            else:
                assert_near_rows(each, theirs, truth)
        if kind == "bert" and any(heads.values()):  # these heads matter
            pairs = zip(found[0], it.rows(made_of(way, kind), MIXED), strict=True)
            assert all(distance(row[place], whole[place]) > 1e-3 for row, whole in pairs for place in whole)


def threads(way: str, kind: str, folder: Path) -> None:
    """Any number of torch's threads gives the same."""
    it, calls, found, packed = WAYS[way], calls_of(way, kind), [], way.startswith("native")
    if packed and kind == "bert":
        calls += [partial(it.rows, texts=MANY, **each) for each in ({}, it.asks, {"first_token_only": True})]
    for count in (1, 2, 3, 7) if packed and kind == "bert" else (1, 3):
        torch.set_num_threads(count)
        found.append(answers(calls, made_again(way, kind)))
    for other in found[1:]:
        assert_rows(other, found[0], WAYS[way].within)


def shared(way: str, kind: str, folder: Path) -> None:
    """Threads of Python that share it, while the kernels run another model too, get what one gets."""
    it, calls, packed = WAYS[way], calls_of(way, kind), way.startswith("native")
    models = [made_of(way, each) for each in ((kind, "bert") if packed else (kind,))]
    calls += [partial(it.rows, texts=MANY)] * (it.within == 0)
    wanted, barrier = [[call(made) for made in models] for call in calls], Barrier(4)

    def work(shift: int) -> None:
        torch.set_num_threads(1 + packed)
        barrier.wait(60)
        for i in range(2 * len(calls) * len(models)):
            place, which = (i // len(models) + shift) % len(calls), (i + shift) % len(models)
            assert_rows(calls[place](models[which]), wanted[place][which])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def forked(way: str, kind: str, folder: Path) -> None:
    """A forked process gets what its parent gets."""
    made, calls = made_of(way, kind), calls_of(way, kind)[2:]
    wanted = answers(calls, made)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            assert_rows(answers(calls, made), wanted)
            status = 0
        finally:
            os._exit(status)
    assert_rows(answers(calls, made), wanted)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def defaults(way: str, kind: str, folder: Path) -> None:
    """Another default dtype or device changes nothing, neither when it is made nor when it runs."""
    made, calls = made_of(way, kind), calls_of(way, kind)
    wanted = answers(calls, made)
    with default_dtype(torch.float64), torch.inference_mode():
        assert_rows(answers(calls, made), wanted)
    with default_dtype(torch.float16), torch.device("meta"):
        assert_rows(answers(calls, made), wanted)
        assert_rows(answers(calls, made_again(way, kind)), wanted)


def order(way: str, kind: str, folder: Path) -> None:
    """What ran before changes nothing."""
    made, calls = made_of(way, kind), calls_of(way, kind)
    forwards = [call(made) for call in calls]
    for each in (made, made_again(way, kind)):
        for call, wanted in zip(calls[::-1], forwards[::-1], strict=True):
            assert_rows(call(each), wanted)


LAWS: dict[str, Callable[[str, str, Path], None]] = {
    "padding": padding,
    "alone = together": alone,
    "copied = itself": copied,
    "saved = loaded": loaded,
    "pruned = gated": gated,
    "threads": threads,
    "shared by threads": shared,
    "forked": forked,
    "defaults of torch": defaults,
    "order of calls": order,
}


# Reasons why a way does not obey a law, or run a kind


def takes_texts(way: str, folder: Path) -> None:
    assert not {"attention_mask", "padding", "left"} & {*inspect.signature(made_of(way, "pruned").encode).parameters}


def packs_nothing(way: str, folder: Path) -> None:
    quick = InferenceModel(copy.deepcopy(made_of(way, "pruned")), way, torch.float64)
    with pytest.raises(RuntimeError, match=f"backend '{way}' has no packed weights, .* save the model itself"):
        quick.save(folder / "new")
    assert not [*folder.iterdir()]


def writes_nothing(way: str, folder: Path) -> None:
    assert not [name for name in dir(made_of(way, "pruned")) if "save" in name]


def holds_a_session(way: str, folder: Path) -> None:
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        pickle.dumps(made_of(way, "pruned"))


def refuses_the_projection(way: str, folder: Path) -> None:
    source = ways.write_checkpoint(model_of("deberta-v2 apart"), folder / "model")
    with pytest.raises(ValueError, match="embeddings that are projected before they are normalised"):
        pack(source, folder / "packed", texts=["w7"])


REASONS: dict[tuple[str, str], tuple[str, Callable[[str, Path], None]]] = {
    **{(way, "padding"): ("it takes texts, which nobody pads", takes_texts) for way in ("runtime", "Embedder")},
    **{(way, "saved = loaded"): ("the model itself is saved", packs_nothing) for way in ("plain", "graphs")},
    **{(way, "saved = loaded"): ("it was loaded", writes_nothing) for way in ("runtime", "Embedder", "ONNX")},
    ("ONNX", "copied = itself"): ("a session of onnxruntime cannot be copied", holds_a_session),
    ("runtime", "deberta-v2 apart"): ("it lacks a projection before the norm", refuses_the_projection),
}


@pytest.mark.parametrize(
    ("way", "what"), [pytest.param(*each, marks=[pytest.mark.slow] * (each[0] == "ONNX")) for each in REASONS]
)
def test_a_reason_is_true(way: str, what: str, tmp_path: Path) -> None:
    REASONS[way, what][1](way, tmp_path)


# Every run has each way and each law with one kind, and these with more; the other cells are slow.
ONE_KIND = dict.fromkeys(LAWS, "pruned") | {"threads": "bert", "defaults of torch": "bert"}
FAMILIES_HERE = [kind for kind in KINDS if "model_type" in KINDS[kind]]
MORE_KINDS: dict[str, tuple[tuple[str, ...], Iterable[str]]] = {
    "eager": (("padding", "pruned = gated"), KINDS),
    "auto": (("saved = loaded",), FAMILIES_HERE),
    "sdpa": (("padding", "pruned = gated"), KINDS),
    "packed": (("padding",), ["roberta"]),
    "graphs": (("pruned = gated",), ["roberta", "modernbert"]),
    **dict.fromkeys(("runtime", "Embedder"), (("alone = together",), ["modernbert"])),
    **dict.fromkeys(("hf", "native float32", "native bfloat16", "native int8"), (("pruned = gated",), FAMILIES_HERE)),
}


def marks(way: str, law: str, kind: str) -> list[Any]:
    laws, kinds = MORE_KINDS.get(way, ((), ()))
    taken = way != "ONNX" and (kind == ONE_KIND[law] or (law in laws and kind in kinds))
    return [] if taken else [pytest.mark.slow]


CELLS = [
    pytest.param(way, law, kind, marks=marks(way, law, kind))
    for way in WAYS
    for kind in KINDS  # together, since what runs is made once
    for law in LAWS
]


@pytest.mark.parametrize(("way", "law", "kind"), CELLS)
def test_law(way: str, law: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_threads: Any) -> None:
    for what in (law, kind):
        if (way, what) in REASONS:
            pytest.skip(REASONS[way, what][0])
    monkeypatch.setattr(graphs, "record_forward", record)
    set_threads(1)
    LAWS[law](way, kind, tmp_path)
    if way == "graphs" and law == "pruned = gated":
        assert made_of(way, kind).graphs.made, "no graph ran"


def test_every_other_family_is_one_of_these_kinds() -> None:
    """But for its pooler, its segments, missing biases, the base of its angles and a norm of embeddings."""
    plain = {
        "type_vocab_size": 2,
        "pooler_act": "tanh",
        "zeros": None,
        "embeddings_norm": True,
        "layer_norm_eps": 1e-12,
    }
    plain |= {"rotary_base": 2.0, "local_rotary_base": 2.0, "hidden_act": "gelu", "pad_token_id": 0}
    plain |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.1)

    def same(**fields: Any) -> Any:
        return replace(ways.config_of(**fields), **plain, extra={})

    kinds = [same(**fields) for fields in KINDS.values()]
    for family in FAMILIES:
        assert same(**{**KINDS.get(family, {}), "model_type": family}) in kinds, family
