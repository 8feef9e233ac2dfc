"""bertlite/inference/gpu/graphs.py: buckets and their results; a CPU runs a forward where a GPU would replay it."""

import copy
import random
import re
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from conftest import DISENTANGLED, assert_same, make, make_batch
from simulated import Noted, Pools, by_ends, graphed, record, use_
from torch import Tensor

import bertlite
from bertlite import BertForSequenceClassification, BertForTokenClassification, BertModel, optimize_for_inference
from bertlite.config import POSITIONS, Positions
from bertlite.inference.gpu import graphs
from bertlite.inference.gpu.graphs import Bucket, BucketGraph, GraphedBertModel, bucket_of, use_graphs_
from bertlite.parity.command import demo_checkpoint
from bertlite.stack.attention import Backend
from bertlite.stack.positions import DISTANCES, Distances


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """Let graphs be forwards that run again into the same memory; return the buckets that are recorded."""
    found: list[Bucket] = []

    def noted(run: Any, pool: Any) -> Any:
        found.append(run.__self__.bucket)
        return record(run, pool)

    monkeypatch.setattr(graphs, "record_forward", noted)
    return found


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 32, 33])
@pytest.mark.parametrize("length", [1, 16, 17, 128, 441])
def test_a_bucket_holds_its_inputs_and_wastes_little(rows, length):
    for tokens in {rows, rows * length // 2 + 1, rows * length}:
        found = bucket_of(rows, length, tokens, length, 512)
        assert found.rows >= rows
        assert found.length >= length
        assert found.longest >= length
        assert tokens <= found.tokens <= max(1.126 * tokens, tokens + 15)
    padded = bucket_of(rows, length, None, length, 512)
    assert rows <= padded.rows <= max(1.126 * rows, 1)
    assert length <= padded.length < length + 16
    assert bucket_of(1, 500, 500, 500, 500) == (1, 500, 512, 500)


@pytest.mark.parametrize("cls", [BertModel, BertForSequenceClassification, BertForTokenClassification])
@pytest.mark.parametrize("packs", [True, False])
@torch.no_grad()
def test_a_graph_gives_what_the_model_gives(cls, packs, recorded):
    """Sizes of one bucket share it; outputs share no memory."""
    model = bertlite.prune_heads(make(cls), {0: range(4), 1: [2]})
    quick, leaves_out = graphed(model, packs), packs and cls is not BertForTokenClassification
    left, similar = make_batch(6, 11), (make_batch(3, 11, seed, (11, 7 - seed, 1)) for seed in range(3))
    left["attention_mask"] = left["attention_mask"].flip(1)
    rows_of_one = {"input_ids": torch.randint(97, (33, 1))}
    batches = [*similar, make_batch(1, 5), make_batch(2, 11, 3, (4, 11)), rows_of_one, left]
    outputs = [quick(**batch) for batch in batches]
    for batch, found in zip(batches, outputs, strict=True):
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        for name, x in model(**batch).items():
            of_tokens = x.shape[:2] == real.shape
            assert_same(found[name][real] if of_tokens else found[name], x[real] if of_tokens else x)
            assert batch is left or not (leaves_out and of_tokens and found[name][~real].any())
    assert [bucket.tokens is not None for bucket in recorded] == [leaves_out] * 4 + [False], "it computes left padding"
    assert not leaves_out or recorded[3][::2] == (64, 48), "a bucket may have more rows than tokens"


@torch.no_grad()
def test_a_padded_bucket_keeps_no_ids_of_an_earlier_batch(recorded):
    """A wrong one would be nan there, which attention spreads, as its weight of 0 does not undo it."""
    quick = graphed(make(), packs=False)
    quick(**make_batch(2, 15)), quick(**make_batch(2, 9))
    (graph,) = quick.graphs.made.values()
    assert not torch.stack([graph.ids, graph.segments])[..., 9:].any()


@pytest.mark.parametrize("name", ["packed", "auto"])
@torch.no_grad()
def test_a_backend_that_reads_the_mask_is_not_recorded(name, recorded):
    model, batch = make(BertForTokenClassification, attn_implementation=name), make_batch()
    quick = graphed(model)
    with pytest.warns(RuntimeWarning, match="'packed' reads its mask") if name == "packed" else nullcontext():
        assert_same(quick(**batch).logits, model(**batch).logits, atol=1e-9)
    assert len(recorded) == (name == "auto")


@torch.no_grad()
def test_a_model_that_goes_takes_its_graphs_along(monkeypatch):
    pools, quick = Pools(monkeypatch), graphed(make())
    quick(**make_batch())
    memory = weakref.ref(next(iter(quick.graphs.made.values())))
    del quick
    assert memory() is None, "a circle would keep it until Python looks for one"
    assert not pools.reserved()


@pytest.mark.parametrize(
    "change",
    [
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"position_ids": torch.arange(11).flip(0)},
        {"head_mask": torch.tensor([1.0, 0, 1, 0], dtype=torch.float64)},
        {"attention_mask": torch.ones(2, 1, 11, 11, dtype=torch.bool)},
    ],
    ids=lambda change: next(iter(change)),
)
@torch.no_grad()
def test_rare_inputs_run_without_a_graph(change, recorded):
    model, batch = make(attn_implementation="auto"), {**make_batch(), **change}
    assert_same(dict(graphed(model, False)(**batch)), dict(model(**batch)))
    assert not recorded


@torch.no_grad()
def test_hooks_are_seen_whenever_they_come_and_looked_for_in_no_time(recorded, monkeypatch):
    model, seen, batch = make(), [], make_batch()
    quick = graphed(model)
    quick(**batch)
    with monkeypatch.context() as changed:
        changed.setattr(type(quick), "modules", None)  # 230 of them take longer to visit than a forward of 16 tokens
        quick(**batch)
    copied = copy.deepcopy(quick)
    for each in (quick, copied):
        handle = each.encoder.layer[1].output.dense.register_forward_hook(lambda *of: seen.append(of[0]))
        each(**batch)
        handle.remove()
        each(**batch)
    assert seen == [each.encoder.layer[1].output.dense for each in (quick, copied)]


@torch.no_grad()
def test_the_graph_unused_for_longest_goes(recorded, monkeypatch):
    monkeypatch.setattr(graphs, "BUCKETS", 2)
    quick = graphed(make(max_position_embeddings=128))
    for length in (5, 40, 5, 70, 5, 40):
        quick(**make_batch(1, length))
    assert [each.length for each in recorded] == [32, 64, 96, 64]


def pools_of(quick: Any) -> dict[Bucket, Any]:
    return {bucket: graph.pool for bucket, graph in quick.graphs.made.items()}


@pytest.mark.parametrize("limit", [1, 60])
@torch.no_grad()
def test_beyond_the_bytes_only_the_pools_unused_for_longest_go(limit, monkeypatch):
    """By the rules of torch's allocator, for inputs whose outputs have 1 to 12 units."""
    model, pools = make(max_position_embeddings=384, num_hidden_layers=1), Pools(monkeypatch)
    draw = random.Random(0)
    monkeypatch.setattr(graphs, "BYTES", limit * 32 * 48 * 8)
    monkeypatch.setattr(graphs, "GROWTH", limit * 32 * 12 * 8)
    quick, used, survivors = graphed(model), dict[Any, int](), []
    for i in range(80):
        batch, before = make_batch(1, draw.choice([5, 40, 70, 130, 200, 384]), i), pools_of(quick)
        assert_same(quick(**batch).last_hidden_state, model(**batch).last_hidden_state)
        made = pools_of(quick)
        used[next(reversed(made))] = i

        # A pool's memory comes back when its last graph is gone, so all of a pool go, and the one used last stays.
        kept, gone = {*made.values()}, {before[bucket] for bucket in before.keys() - made.keys()}
        assert pools.reserved() == sum(pool.bytes for pool in kept)
        assert len(kept) == 1 or pools.reserved() <= graphs.BYTES
        if gone:
            survivors.append(len(made))
            assert not kept & gone
            # The latest use of each pool, in this order.
            latest = [{pool: used[bucket] for bucket, pool in each.items()} for each in (made, before)]
            assert max(latest[1][pool] for pool in gone) < min(latest[0].values())
    assert (max(survivors) > 1) == (limit > 1)


@torch.no_grad()
def test_a_recording_that_fails_spoils_its_pool_and_no_other_graph(monkeypatch):
    model, pools = make(), Pools(monkeypatch)
    quick = graphed(model)
    quick(**make_batch(1, 5))

    fail = Mock(side_effect=RuntimeError("not permitted when the stream is capturing"))
    with mock.patch.object(BucketGraph, "run", fail), pytest.raises(RuntimeError, match="not permitted"):
        quick(torch.randint(97, (3, 11)))
    for batch in ({"input_ids": torch.randint(97, (3, 11))}, make_batch(1, 5)):
        assert_same(quick(**batch).last_hidden_state, model(**batch).last_hidden_state)
    assert [*pools.graphs.values()] == [1, 1]


@torch.no_grad()
def test_a_model_runs_on_its_own_gpu_with_and_without_a_graph(monkeypatch):
    """Its kernels are launched on the current one, which may be another."""
    model, batch, order = make(), make_batch(), list[str]()

    def assert_current(*of: Any) -> None:
        assert order[-1] == "cuda:1"

    quick = graphed(model, packs=False)
    quick.embeddings.register_forward_hook(assert_current)
    monkeypatch.setattr(torch.cuda, "device", partial(Noted, order))
    monkeypatch.setattr(GraphedBertModel, "device", torch.device("cuda", 1))
    monkeypatch.setattr(GraphedBertModel, "run_at_once", assert_current)
    for plain in (True, False):
        monkeypatch.setattr(GraphedBertModel, "is_plain", lambda *of, plain=plain: plain)
        assert_same(dict(quick(**batch)), dict(model(**batch)))
    stand_ins: Any = {"plain_copy": lambda *of: quick, "use_graphs_": assert_current, "InferenceModel": Mock()}
    with mock.patch.multiple("bertlite.inference.optimize", **stand_ins):
        optimize_for_inference(model.float(), backend="graphs", verify=False)
    assert order == ["cuda:1", "end of cuda:1"] * 3


@dataclass(frozen=True)
class FakeStream:
    device: Any
    number: int


def test_recordings_of_a_pool_have_a_stream_of_their_own_and_only_their_own_memory_counts(monkeypatch):
    """On a stand-in for torch.cuda, whose cache `torch.cuda.graph` empties when a recording begins."""
    held, streams, now, turns, fails = {"cached": 100, "graph": 0}, [], ["the caller's"], count(), False

    @contextmanager
    def recording(graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads may allocate"
        assert stream.device == torch.device("cuda", 3), "the current one"
        streams.append(stream.number)
        held["cached"] = 0
        now.append(stream)
        yield
        if fails:
            raise RuntimeError("the end of the recording fails")  # before torch has the caller's stream back
        now.pop()

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        before = [*now]
        now.append(stream)
        try:
            yield
        finally:
            now[:] = before

    def run() -> Tensor:
        held["graph"] += 30
        return torch.empty(0)

    for name, stand_in in {
        "synchronize": lambda: None,
        "empty_cache": lambda: held.update(cached=0),
        "memory_reserved": lambda: sum(held.values()),
        "current_device": lambda: 3,
        "graph_pool_handle": lambda: None,
        "Stream": lambda device: FakeStream(device, next(turns) % 32),  # torch has 32
        "stream": on,
        "CUDAGraph": Mock,
        "graph": recording,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(graphs, "STREAMS", weakref.WeakSet())
    pool = graphs.Pool(torch.device("cuda", 3))
    assert [graphs.record_run(run, pool)[2] for _ in range(2)] == [30, 30]
    for _ in range(70):  # pools that go
        graphs.record_run(run)
    assert streams[:2] == [0, 0]
    assert {*streams[2:]} == {*range(1, 32)}, "cuBLAS's workspace lies in the pool of its graphs"

    pool, fails = graphs.Pool(torch.device("cuda", 3)), True
    with pytest.raises(RuntimeError, match="the end of the recording fails"):
        graphs.record_run(run, pool)
    assert now == ["the caller's"]


@torch.no_grad()
def test_nobody_waits_to_record_while_holding_a_models_lock(recorded, monkeypatch):
    """A step that records takes them in the other order when it runs a teacher: both would wait for ever."""
    quick, record, order = graphed(make()), graphs.record_forward, list[str]()

    def waits(run: Any, pool: Any) -> Any:  # as `record_run` does
        with graphs.RECORDING:
            return record(run, pool)

    monkeypatch.setattr(graphs, "RECORDING", Noted(order, "recording"))
    monkeypatch.setattr(graphs, "record_forward", waits)
    monkeypatch.setattr(quick.graphs, "lock", Noted(order, "lock"))
    quick(**make_batch())
    assert order[:2] == ["recording", "lock"]
    order.clear()
    quick(**make_batch())
    assert order == ["lock", "end of lock"]


@torch.no_grad()
def test_a_graph_that_another_thread_drops_meanwhile_is_not_recorded_under_the_lock(recorded):
    model, batch = make(), make_batch()
    quick = graphed(model, packs=False)
    quick(**batch)

    quick.graphs.made = type("Dropping", (OrderedDict,), {"get": lambda *of: None})(quick.graphs.made)
    assert_same(dict(quick(**batch)), dict(model(**batch)))
    assert len(recorded) == 1


@torch.no_grad()
def test_without_memory_a_batch_runs_without_a_graph(monkeypatch):
    monkeypatch.setattr(graphs, "record_forward", Mock(side_effect=torch.OutOfMemoryError("none")))
    model, batch = make(), make_batch()
    with pytest.warns(RuntimeWarning, match="no memory for a CUDA graph"):
        found = graphed(model, packs=False)(**batch)
    assert_same(dict(found), dict(model(**batch)))


@pytest.mark.parametrize("packs", [True, False])
def test_an_encoder_inside_sentence_transformers(packs, recorded, monkeypatch):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = demo_checkpoint() or pytest.skip("the MiniLM checkpoint is not installed")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    monkeypatch.setattr("bertlite.inference.optimize.use_graphs_", partial(use_, packs=packs))
    quick = optimize_for_inference(model, backend="graphs")
    texts = ["a", "Time flies like an arrow.", "a book of the weather " * 9]
    assert_same(torch.tensor(quick.encode(texts)), torch.tensor(model.encode(texts)), atol=1e-6)
    assert recorded


def test_what_graphs_cannot_run_is_refused():
    with pytest.raises(ValueError, match="for a GPU and the model is on cpu: use backend='auto'"):
        optimize_for_inference(make().float(), backend="graphs")
    there = make().to("meta")
    there.base_model.__class__ = type("OnGpu", (BertModel,), {"device": torch.device("cuda")})
    with pytest.raises(ValueError, match="run encoders, not OnGpu: use backend='plain'"):
        use_graphs_(there)
    quick, batch = graphed(make(), packs=False), make_batch()
    for name, given, says in (
        *((name, [1] * 4, "a list; make it a tensor") for name in ("attention_mask", "token_type_ids")),
        ("input_ids", torch.ones(2, 11), "torch.float32; indices are torch.long or torch.int"),
        ("token_type_ids", torch.ones(2, 11), "torch.float32; indices are torch.long or torch.int"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"{name} is {says}"):
            quick(**{**batch, name: given})


@pytest.mark.parametrize(
    ("changes", "dtype", "kernel", "said"),
    [
        ({}, torch.bfloat16, True, None),
        ({}, torch.bfloat16, False, None),
        ({}, torch.float32, True, "here if a text has more than 128 tokens: varlen_attn takes float16"),
        ({}, torch.float32, False, "padding here: varlen_attn takes float16"),
        ({"position_embedding_type": "bucketed"}, torch.bfloat16, True, "than 128 tokens: .* relative positions"),
        ({"position_embedding_type": "relative_key"}, torch.bfloat16, True, "padding here: .* relative positions"),
        ({"position_embedding_type": "turned"}, torch.bfloat16, True, "a graph .* cannot compute turned positions"),
    ],
)
def test_where_padding_is_computed_it_is_said_once(changes, dtype, kernel, said, monkeypatch):
    """By what torch and Triton can run on a GPU; the model says that it is there.

    Turned positions are unknown, and come from places that the rows of a bucket do not have.
    """
    monkeypatch.setitem(POSITIONS, "turned", Positions(in_scores=False))
    monkeypatch.setitem(DISTANCES, "turned", type("Turned", (Distances,), {})())
    monkeypatch.setattr(graphs, "missing_for_short", lambda needs, n: None if kernel and n <= 128 else "no kernel")
    monkeypatch.setattr(graphs, "fuse_", lambda body: False)
    monkeypatch.setattr(BertModel, "device", torch.device("cuda"))
    model = make(hidden_size=64, **changes).to(dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use_graphs_(model)
    found = [str(each.message) for each in caught]
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])
    body = model.base_model
    absolute = changes.get("position_embedding_type") not in ("relative_key", "turned")
    short, long = (each and each.name for each in (body.backend_for(16), body.backend_for(256)))
    long_runs = dtype == torch.bfloat16 and not changes
    assert short == ("short" if kernel and absolute else "varlen" if long_runs else None)
    assert long == ("varlen" if long_runs else None)


@pytest.mark.parametrize("positions", ["absolute", "bucketed", "relative_key", "disentangled", "rotary_local"])
@torch.no_grad()
def test_every_kind_of_positions_runs(positions, recorded, monkeypatch):
    """With the kernel for short attention, computed by torch's operators, where its bias depends on places alone."""
    monkeypatch.setattr(graphs, "missing_for_short", lambda needs, longest: None)
    monkeypatch.setattr(graphs, "SHORT", Backend("short", by_ends, packs=True))
    own = {"disentangled": DISENTANGLED, "rotary_local": {"local_layers": [1], "local_attention": 2, "gated": True}}
    model = make(position_embedding_type=positions, **own.get(positions, {}))
    batch = make_batch(3, 11, lengths=(11, 7, 1))
    gaps = {**batch, "attention_mask": batch["attention_mask"].clone()}
    gaps["attention_mask"][0, 3:6] = 0  # padding between tokens: their distances count it
    quick = graphed(model, packs=False)
    for each in (batch, gaps):
        found, real = quick(**each).last_hidden_state, each["attention_mask"].bool()
        assert_same(found[real], model(**each).last_hidden_state[real])
    packed = {"absolute": [True, True], "bucketed": [True, False]}.get(positions, [False])
    assert [bucket.tokens is not None for bucket in recorded] == packed
