"""bertlite/inference/gpu/fused.py: models whose parts Triton's kernels compute, against the modules in float64."""

import copy
import pickle
import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from conftest import assert_same, make, make_batch
from interpreted import FLOATS, HERE, with_triton
from simulated import record
from torch import Tensor, nn

from bertlite import BertModel, prune_heads, prune_neurons
from bertlite.config import POSITIONS, Positions
from bertlite.inference.gpu import fused, graphs, triton_kernels
from bertlite.inference.gpu.fused import FUSED, FusedEmbeddings, FusedIntermediate, FusedOutput, FusedSelfAttention
from bertlite.inference.gpu.graphs import GraphedBertModel
from bertlite.inference.gpu.triton_kernels import INTERPRETED
from bertlite.stack.attention import Requirements
from bertlite.stack.modules import BertIntermediate
from bertlite.stack.positions import DISTANCES, Distances
from bertlite.support import torch_private

REPLACING = {cls for _, cls in FUSED.values() if cls is not None}
CHANGES: dict[str, dict[str, Any]] = {
    "absolute": {},
    "narrow": {"hidden_size": 312, "num_attention_heads": 12},  # TinyBERT's
    "bucketed": {"position_embedding_type": "bucketed"},
    "relative_key": {"position_embedding_type": "relative_key"},
    "relative_key_query": {"position_embedding_type": "relative_key_query"},
    "disentangled": {"position_embedding_type": "disentangled"},
    "RoBERTa": {"positions_skip_padding": True, "pad_token_id": 1, "padding_has_position": True},
    "padding without a position": {"positions_skip_padding": True, "pad_token_id": 1},
    "ELECTRA": {"embedding_size": 24},
    "normalised last": {"embedding_size": 24, "projected_before_norm": True},
    "gelu_new": {"hidden_act": "gelu_new"},
    "mish": {"hidden_act": "mish"},
    "rotary": {"position_embedding_type": "rotary_local", "local_layers": [1], "local_attention": 2},
    "gated": {"gated": True},
    "norm_first": {"norm_first": True},
}
LEFT: dict[str, set[Any]] = {  # parts of torch's that stay
    "normalised last": {FusedEmbeddings},
    "mish": {FusedIntermediate},
    "rotary": {FusedSelfAttention},
    "gated": {FusedIntermediate},
    "norm_first": {FusedIntermediate, FusedOutput},
}


def fused_copy(model: BertModel, dtype: torch.dtype) -> BertModel:
    quick = copy.deepcopy(model).to(HERE, dtype).requires_grad_(False)
    with warnings.catch_warnings(action="ignore"):
        assert fused.fuse_(quick)
    return quick


def assert_as_near(found: Any, plain: Any, true: Any) -> None:
    """Assert that outputs are about as near to float64 as the modules' in the same dtype; sums round in other orders.

    The ratio of errors is up to 1.9 here.  A wrong term makes it thousands.
    """
    for name, x in true.items():
        parts = [y if isinstance(y, tuple) else (y,) for y in (found[name], plain[name], x)]
        for mine, theirs, right in zip(*parts, strict=True):
            assert 0 < (mine - right).norm() <= 3 * (theirs - right).norm(), name


@with_triton
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_fused_model_is_as_near_to_float64_as_its_modules(name, dtype):
    """With a layer that has lost all heads, and one that has lost all neurons."""
    model = make(attn_implementation="auto", **CHANGES[name]).to(HERE)
    heads = model.config.num_attention_heads
    model = prune_neurons(prune_heads(model, {0: range(heads), 1: [2]}), {2: range(37)})
    batch = {key: x.to(HERE) for key, x in make_batch(2, 9, lengths=(9, 1)).items()}
    if "positions_skip_padding" in CHANGES[name]:
        batch["input_ids"] = batch["input_ids"].clamp(min=2).masked_fill(batch["attention_mask"] == 0, 1)
    quick, plain = fused_copy(model, dtype), copy.deepcopy(model).to(dtype)
    changed = {type(part) for part in quick.modules() if type(part) in REPLACING}
    assert changed == REPLACING - LEFT.get(name, set())
    gates = {"output_hidden_states": True, "head_mask": torch.rand(heads).to(HERE)}
    for asked in (gates, {"first_token_only": True}):
        assert_as_near(quick(**batch, **asked), plain(**batch, **asked), model(**batch, **asked))
    embeds = {"inputs_embeds": torch.randn(2, 5, model.embeddings.word_embeddings.weight.shape[1]).to(HERE)}
    in_dtype = {"inputs_embeds": embeds["inputs_embeds"].to(dtype)}
    assert_as_near(quick(**in_dtype), plain(**in_dtype), model(inputs_embeds=in_dtype["inputs_embeds"].double()))


@with_triton
@pytest.mark.skipif(HERE.type != "cpu", reason="tests/test_gpu.py records graphs")
@pytest.mark.parametrize("name", ["bucketed", "padding without a position"])
@torch.no_grad()
def test_a_graph_of_kernels_gives_what_the_model_gives(name, monkeypatch):
    """With a run where a GPU replays: pack, all layers with the kernel for short attention, and unpack."""
    monkeypatch.setattr(graphs, "record_forward", record)
    model = prune_heads(make(attn_implementation="auto", num_hidden_layers=2, **CHANGES[name]), {0: [2], 1: range(4)})
    quick, plain = fused_copy(model, torch.float32), copy.deepcopy(model).float()
    quick.__class__ = GraphedBertModel
    needs = Requirements(dtype=torch.float32, head_dim=12)
    vars(quick).update(graphs=graphs.Graphs(), fused=True, needs=needs, packed_backend=None)
    for lengths in ((9, 1), (2, 9)):
        batch = make_batch(2, 9, sum(lengths), lengths)
        if "positions_skip_padding" in CHANGES[name]:
            batch["input_ids"] = batch["input_ids"].clamp(min=2).masked_fill(batch["attention_mask"] == 0, 1)
        real = batch["attention_mask"].bool()
        found = quick(**batch).last_hidden_state
        states = [each.last_hidden_state[real] for each in (plain(**batch), model(**batch))]
        assert_as_near({"x": found[real]}, {"x": states[0]}, {"x": states[1]})
        assert not found[~real].any()
    assert {bucket.tokens is not None for bucket in quick.graphs.made} == {True}
    kept = {len(layer.attention.self.score_biases) for layer in quick.encoder.layer}
    assert kept == {name == "bucketed"}, "positions in buckets are read once for a length"


@with_triton
@torch.no_grad()
def test_hooks_see_every_module_and_its_outputs():
    model = make().float().to(HERE)
    quick, seen = fused_copy(model, torch.float32), []
    for name in ("embeddings.LayerNorm", "encoder.layer.1.attention.self.key", "encoder.layer.1.intermediate.dense"):
        quick.get_submodule(name).register_forward_hook(lambda module, inputs, out: seen.append(type(module)))
    quick(**{key: x.to(HERE) for key, x in make_batch().items()})
    assert seen == [nn.LayerNorm, nn.Linear, nn.Linear]


@with_triton
@torch.no_grad()
def test_a_fused_model_is_copied_and_pickled():
    quick = fused_copy(make().to(HERE), torch.float32)
    batch = {key: x.to(HERE) for key, x in make_batch().items()}
    for other in (copy.deepcopy(quick), pickle.loads(pickle.dumps(quick))):
        assert_same(dict(other(**batch)), dict(quick(**batch)))
    own = quick.encoder.layer[0].attention.self
    assert own.key.weight.untyped_storage().data_ptr() == own.weight.untyped_storage().data_ptr(), "no second copy"


def test_a_module_that_kernels_do_not_know_wholly_is_named_and_stays_as_it_is(monkeypatch):
    """Such as a gate, a norm at another place, or rotated queries: kernels would leave them out without a word."""
    monkeypatch.setattr(fused, "missing_for_triton", lambda device, dtype: None)
    monkeypatch.setitem(POSITIONS, "turned", Positions(in_scores=False))
    monkeypatch.setitem(DISTANCES, "turned", type("Turned", (Distances,), {})())
    plain, turned = make(), make(position_embedding_type="turned")
    other = make(hidden_act="mish", embedding_size=24, projected_before_norm=True)
    other.encoder.layer[1].output.LayerNorm = nn.LayerNorm(48, elementwise_affine=False)
    first, second, third = plain.encoder.layer
    first.intermediate.factor = nn.Linear(48, 37)
    second.attention.LayerNorm = nn.LayerNorm(48)
    second.attention.output.LayerNorm = None
    third.intermediate.LayerNorm = None
    third.output.scale = nn.Parameter(torch.ones(48))
    plain.encoder.final_norm = nn.LayerNorm(48)
    plain.embeddings.register_buffer("inv_freq", torch.ones(3))
    for model, texts in (
        (turned, ["encoder.layer.2.attention.self has turned positions, for which there is no kernel"]),
        (
            other,
            [
                "embeddings projects embeddings before",
                "encoder.layer.2.intermediate has an activation, Activation(mish), for which",
                "encoder.layer.1.output has no weight",
            ],
        ),
        (
            plain,
            [
                "encoder.layer.0.intermediate has factor, which no kernel computes",
                "encoder.layer.1.attention has LayerNorm, which",
                "encoder.layer.1.attention.output has no norm",
                "encoder.layer.2.output has scale, which",
                "encoder has final_norm, which",
                "embeddings has inv_freq, which",
            ],
        ),
    ):
        with pytest.warns(UserWarning, match="run some parts") as caught:
            assert fused.fuse_(model)
        assert len(caught) == 1
        for text in texts:
            assert text in str(caught[0].message)
            name = re.split(" has | projects ", text)[0]
            assert type(model.get_submodule(name)) not in REPLACING
    assert type(third.intermediate) is FusedIntermediate, "a part that is None changes nothing"


@pytest.mark.parametrize(
    ("change", "reason"),
    [("triton", "Triton is not installed"), ("dtype", "not torch.float64"), ("device", "runs on CUDA, not on cpu")],
)
def test_a_model_that_kernels_cannot_run_stays_as_it_is(change, reason, monkeypatch):
    if change == "device" and INTERPRETED:
        pytest.skip("here they run on the CPU")
    monkeypatch.setattr(triton_kernels, "triton", None if change == "triton" else pytest)
    monkeypatch.setattr(triton_kernels, "INTERPRETED", change == "dtype")
    model = make()
    with pytest.warns(UserWarning, match=reason) as caught:
        assert not fused.fuse_(model)
    assert len(caught) == 1
    assert not {type(part) for part in model.modules()} & REPLACING


def test_the_fastest_way_that_is_right_is_taken(monkeypatch):
    def modules(x: Tensor) -> Tensor:
        return 2 * x

    def slow(x: Tensor) -> Tensor:
        return 2.01 * x

    def fast(x: Tensor) -> Tensor:
        return 1.99 * x

    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("out of resources")

    times = {modules: 4.0, slow: 6.0, fast: 1.0}
    monkeypatch.setattr(fused, "seconds_of_run", lambda run, device: times.get(run.func, 0.5))
    ways = {"modules": modules, "slow": slow}
    assert fused.fastest(ways, torch.empty(3, 5)) == "modules"
    ways |= {"fast": fast, "wrong": torch.zeros_like, "nan": lambda x: x * torch.nan, "failing": fail}
    with pytest.warns(RuntimeWarning) as caught:
        assert fused.fastest(ways, torch.full((3, 5), torch.nan)) == "fast"
    texts = [str(each.message) for each in caught]
    assert [text.partition(" is not used here: ")[0] for text in texts] == [
        *("the matmul wrong", "the matmul nan", "the matmul failing"),
    ]
    assert "out of resources" in texts[-1]


def test_launching_is_not_timed_on_a_gpu(monkeypatch):
    """On a stand-in for CUDA: the GPU is busy until all runs are launched, and the least time counts.

    CUDA waits for no device of which a stream is being recorded, as another thread's may be.
    """
    seen: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(seen)
            seen.append("event")

        def synchronize(self) -> None:
            assert self.at == len(seen) - 1
            seen.append("wait")

        def elapsed_time(self, end: "Event") -> float:
            return 1000.0 * end.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("wait for the device"))
    monkeypatch.setattr(torch_private, "keep_busy", lambda cycles: seen.append("busy"))
    assert fused.seconds_of_run(lambda: seen.append("run"), torch.device("cuda")) == 4
    assert seen == ["run", "busy", *["event", "run", "event"] * fused.RUNS, "wait"]
    assert fused.seconds_of_run(lambda: None, torch.device("cpu")) > 0


@torch.no_grad()
def test_a_way_is_chosen_once_for_sizes_that_are_rounded_up(monkeypatch):
    """Also without Triton."""
    part = BertIntermediate(make().config).double()
    plain, asked = copy.deepcopy(part), []

    def choose(ways: Any, x: Tensor) -> str:
        asked.append(x.shape)
        return "other"

    part.__class__ = FusedIntermediate
    monkeypatch.setattr(fused, "FASTEST", {})
    monkeypatch.setattr(fused, "fastest", choose)
    modules = partial(BertIntermediate.forward, part)
    monkeypatch.setattr(fused, "ways_of", lambda *args: {"modules": modules, "other": lambda x: 2 * modules(x)})
    for rows in (17, 20, 32, 33):
        x = torch.randn(rows, 48, dtype=torch.float64)
        assert_same(part(x[None]), 2 * plain(x[None]))
    assert asked == [(32, 48), (48, 48)]
