"""Without padding the model computes what it computed with it.

Shapes:  B 5 sequences · S 11 positions · T tokens, of all sequences together
"""

import importlib
import inspect
import math
import re
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import F64, SIZES, OnCuda, assert_same, distance, gradients, make, make_batch
from simulated import by_ends
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from bertlite import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)
from bertlite.stack import body as body_module
from bertlite.stack import layouts as layouts_module
from bertlite.stack.attention import BACKENDS, Backend, Requirements, grouped, missing_for_varlen, select, varlen
from bertlite.stack.cache import KeyValueCache
from bertlite.stack.layouts import Packed, Slots, group_lengths
from bertlite.stack.positions import DISTANCES
from bertlite.support import torch_private

B, S, D, N, L = 5, 11, 48, 4, 3
LENGTHS = (11, 3, 7, 1, 10)
OF_DISTANCES = r"distance|pos_|^rel_|^LayerNorm"  # parameters that no token without another reads
PRUNED = {"pruned_heads": {0: [1, 3], 1: [0, 1, 2, 3]}, "pruned_neurons": {0: range(37), 2: [1, 5]}}


def right() -> Tensor:
    return (torch.arange(S) < torch.tensor(LENGTHS)[:, None]).long()


def scattered() -> Tensor:
    return (torch.rand(B, S, generator=torch.Generator().manual_seed(2)) < 0.6).long()


MASKS = {  # (B, S)
    "none": None,
    "full": torch.ones(B, S, dtype=torch.long),
    "right": right(),
    "left": right().flip(1),
    "scattered": scattered(),
    "a row of padding": right() * torch.tensor([1, 0, 1, 1, 1])[:, None],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "pruned": PRUNED,
    "relative_key": {"position_embedding_type": "relative_key"},
    "relative_key_query": {"position_embedding_type": "relative_key_query"},
    "relative, disentangled": {"position_embedding_type": "disentangled"},
}


def real_of(mask: Tensor | None) -> Tensor:
    return torch.ones(B, S, dtype=torch.bool) if mask is None else mask.bool()


def inputs_of(name: str) -> dict[str, Any]:
    mask = MASKS[name]
    batch: dict[str, Any] = {**make_batch(B, S, lengths=LENGTHS), "attention_mask": mask}
    if name == "left":
        batch["position_ids"] = (right().flip(1).cumsum(-1) - 1).clamp(min=0)
    return batch


def on(model: Any, backend: str) -> Any:
    model.set_attn_implementation(backend)
    return model


def packed(lengths: tuple[int, ...]) -> Packed:
    return Packed(lengths, torch.tensor(lengths), (sum(lengths),))


def packed_inputs(batch: dict[str, Any]) -> tuple[Packed, dict[str, Any]]:
    """The tokens of a batch, one sequence after another."""
    packing = Packed.of_mask(real_of(batch["attention_mask"]))
    inputs = {k: packing.pack(x) for k, x in batch.items() if k != "attention_mask"}
    return packing, {"position_ids": packing.positions(), **inputs, "cu_seqlens": packing.cu_seqlens}


# Forward


@pytest.mark.parametrize("call", [0, 30, 10**9], ids=["each alone", "some groups", "one group"])
@pytest.mark.parametrize(
    ("mask", "variant"), [(m, v) for v in VARIANTS for m in MASKS if m != "scattered" or not v.startswith("relative")]
)
def test_packed_computes_and_learns_what_padded_does(mask, variant, call, monkeypatch):
    monkeypatch.setattr(layouts_module, "CALL_COST", call)
    model, inputs, real = make(**VARIANTS[variant]), inputs_of(mask), real_of(MASKS[mask])
    wanted, got = outs = [on(model, name)(**inputs, output_hidden_states=True) for name in ("sdpa", "packed")]
    assert_same([x[real] for x in got.hidden_states], [x[real] for x in wanted.hidden_states])
    assert all((x[~real] == 0).all() for x in got.hidden_states)
    assert got.last_hidden_state.shape == (B, S, D)
    begins = real[:, 0]  # with padding there the padded pooler reads padding
    assert_same(got.pooler_output[begins], wanted.pooler_output[begins])
    draw = torch.randn(B, S, D, dtype=F64, generator=torch.Generator().manual_seed(8))
    losses = [(out[0] * draw)[real].sum() + out.pooler_output[begins].square().sum() for out in outs]
    wanted, got = (gradients(model, loss) for loss in losses)
    largest = max(1.0, *(grad.abs().max().item() for grad in wanted.values() if grad.numel()))
    assert_same(got, wanted, atol=1e-12 * largest)  # sums over a whole batch


@pytest.mark.parametrize("mask", MASKS)
def test_the_pooler_reads_the_first_token_that_is_not_padding_and_tokens_may_come_packed(mask, model):
    inputs, real = inputs_of(mask), real_of(MASKS[mask])
    packing, tokens = packed_inputs(inputs)
    wanted = on(model, "packed")(**inputs, output_hidden_states=True)
    firsts = torch.stack([x[m][0] if m.any() else x.new_zeros(D) for x, m in zip(wanted[0], real, strict=True)])
    assert_same(wanted.pooler_output, model.pooler(firsts[:, None]))
    for backend in ("packed", "auto"):
        got = on(model, backend)(**tokens, output_hidden_states=True)
        assert got.last_hidden_state.shape == (packing.tokens, D)
        assert_same([packing.unpack(x) for x in got.hidden_states], wanted.hidden_states)
        assert_same(got.pooler_output, wanted.pooler_output)
        if mask == "right":  # where each sequence begins at 0
            assert_same(model(**{**tokens, "position_ids": None}, output_hidden_states=True), got, atol=0)
    embeds = model.get_input_embeddings()(tokens.pop("input_ids"))
    assert_same(model(**tokens, inputs_embeds=embeds, output_hidden_states=True), got, atol=0)


NO_TOKENS = {**make_batch(), "attention_mask": torch.zeros(2, S).long()}
NO_ROWS = {k: x[:0] for k, x in make_batch().items()}


@pytest.mark.parametrize(
    ("backend", "batch"),
    [("packed", NO_TOKENS), *((backend, NO_ROWS) for backend in ("packed", "eager", "sdpa"))],
    ids=["packed, no tokens", "packed", "eager", "sdpa"],
)
def test_nothing_gives_nothing(backend, batch):
    models = [make(position_embedding_type=kind) for kind in DISTANCES]
    rows, packs = len(batch["input_ids"]), backend == "packed"
    for model in (*models, make(pruned_heads={1: [0, 1, 2, 3]}), models[-1].train()):
        asks = not packs and not model.training  # dropped attentions are those of eager alone
        out = on(model, backend)(**batch, output_hidden_states=True, output_attentions=asks)
        assert [x.shape for x in out.hidden_states] == [(rows, S, D)] * (L + 1)
        assert [len(x) for x in out.attentions or ()] == [0] * L * asks
        assert out.pooler_output.shape == (rows, D)
        assert (out.last_hidden_state == 0).all()
        assert model(**batch, first_token_only=True).last_hidden_state.shape == (rows, 1, D)
        model.zero_grad()
        out.last_hidden_state.sum().backward()
        tokens = {n: p.grad for n, p in model.encoder.named_parameters() if not re.search(OF_DISTANCES, n)}
        assert all(grad is not None and not grad.any() for grad in tokens.values())
        if packs:
            out = model(torch.zeros(0).long(), cu_seqlens=torch.zeros(rows + 1).int())
            assert (out.last_hidden_state.shape, out.pooler_output.shape) == ((0, D), (rows, D))


@pytest.mark.parametrize("shape", [(N,), (L, N), (L, B, N)], ids=str)
@pytest.mark.parametrize("changes", [{}, {"pruned_heads": {0: [1], 2: [0, 1, 2, 3]}}], ids=["dense", "pruned"])
def test_gates_reach_first_tokens_and_tokens_that_come_packed(changes, shape):
    """Gates of all shapes are those of the other backends, in tests/models."""
    model, inputs = on(make(**changes), "packed"), inputs_of("right")
    gate = torch.rand(shape, dtype=F64, generator=torch.Generator().manual_seed(6)) * 2 - 0.5
    wanted = model(**inputs, head_mask=gate)[0]
    assert distance(wanted, model(**inputs)[0]) > 1e-2
    assert_same(model(**inputs, head_mask=gate, first_token_only=True)[0], wanted[:, :1])
    packing, tokens = packed_inputs(inputs)
    assert_same(packing.unpack(model(**tokens, head_mask=gate)[0]), wanted)


def test_dropout_is_live_in_training():
    model, outs = on(make(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5), "packed").train(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(model(**inputs_of("right")).last_hidden_state)
    assert_same(outs[0], outs[1], atol=0)
    assert distance(outs[0], outs[2]) > 1e-2


# [CLS] alone


@pytest.mark.parametrize(("backend", "call"), [("eager", 0), ("sdpa", 0), ("packed", 0), ("packed", 10**9)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pruned_heads": {0: [1], 2: [0, 1, 2, 3]}},
        {"position_embedding_type": "relative_key_query"},
        {"position_embedding_type": "disentangled", "share_att_key": True, "pos_att_type": "p2c"},
        {"chunk_size_feed_forward": 4},
        {"num_hidden_layers": 0},
    ],
    ids=str,
)
def test_the_first_token_alone_is_that_of_all(changes, backend, call, monkeypatch):
    monkeypatch.setattr(layouts_module, "CALL_COST", call)  # each sequence by itself, or all as one group
    model, inputs = on(make(**changes), backend), inputs_of("a row of padding")
    whole, first = model(**inputs), model(**inputs, first_token_only=True)
    assert_same(first.last_hidden_state, whole.last_hidden_state[:, :1])
    assert_same(first.pooler_output, whole.pooler_output)
    draw = torch.randn(B, D, dtype=F64, generator=torch.Generator().manual_seed(8))
    grads = [gradients(model, (out.pooler_output * draw).sum()) for out in (whole, first)]
    assert_same(grads[1], grads[0], atol=1e-11)  # sums over a whole batch


@pytest.mark.parametrize(
    "mask",
    [
        torch.rand(B, S, S, generator=torch.Generator().manual_seed(3)) < 0.6,
        torch.rand(B, N, S, S, generator=torch.Generator().manual_seed(3)) < 0.6,
        torch.randn(B, 1, S, S, dtype=F64, generator=torch.Generator().manual_seed(3)),
        torch.randn(1, 1, 1, S, dtype=F64, generator=torch.Generator().manual_seed(3)),
        (torch.arange(S) > 0).expand(B, S, S) & (torch.arange(S) > 0)[:, None],  # the first query sees nothing
    ],
    ids=["3-D", "4-D", "added", "one for all", "nothing to attend to"],
)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_the_first_token_looks_where_its_row_of_the_mask_says(backend, mask, model):
    inputs = {**inputs_of("full"), "attention_mask": mask}
    whole = on(model, backend)(**inputs)
    assert_same(model(**inputs, first_token_only=True).last_hidden_state, whole.last_hidden_state[:, :1])


@pytest.mark.parametrize(("backend", "tokens"), [("sdpa", B * S), ("packed", sum(LENGTHS))])
def test_the_last_layer_computes_one_row_of_each_sequence(backend, tokens, model):
    rows: dict[str, int] = {}
    layer = on(model, backend).encoder.layer[2]
    wanted = {"attention.self.query": B, "attention.self.key": tokens, "attention.output.dense": B, "output.dense": B}
    for name in wanted:
        (x,) = inputs_of_calls(layer.get_submodule(name), model, inputs_of("right"), first_token_only=True)
        rows[name] = x.shape[:-1].numel()
    assert rows == wanted


# Heads

POOLED = [BertForSequenceClassification, BertForNextSentencePrediction]
PER_TOKEN = [BertForMaskedLM, BertForTokenClassification, BertForPreTraining]


def labels_of(cls: Any) -> dict[str, Tensor]:
    """Labels of sequences, or of real tokens."""
    found = {}
    for name, (*shape, classes) in make(cls).label_shapes((B, S)).items():
        labels = torch.arange(math.prod(shape)).view(shape) % classes
        found[name] = labels.masked_fill(right() == 0, -100) if shape == [B, S] else labels
    return found


@pytest.mark.parametrize("cls", [*POOLED, *PER_TOKEN])
def test_heads_compute_the_same(cls):
    """Their gradients are compared with transformers' in tests/hf."""
    model, real = make(cls), right().bool()
    inputs = {**inputs_of("right"), **labels_of(cls)}
    outs = [on(model, name)(**inputs) for name in ("sdpa", "packed")]
    assert list(outs[0]) == list(outs[1])
    for name, wanted in outs[0].items():
        got = outs[1][name]
        per_token = wanted.shape[:2] == (B, S)
        assert_same(got[real] if per_token else got, wanted[real] if per_token else wanted)
        assert not per_token or (got[~real] == 0).all()
    packing, tokens = packed_inputs(inputs_of("right"))  # the same, as they come packed
    labels = {name: packing.pack(x) if x.shape == (B, S) else x for name, x in labels_of(cls).items()}
    got = model(**tokens, **labels)
    for name, value in outs[1].items():
        assert_same(packing.unpack(got[name]) if value.shape[:2] == (B, S) else got[name], value)


@pytest.mark.parametrize("cls", PER_TOKEN)
def test_labels_at_padded_positions_do_not_count(cls):
    model, given = on(make(cls), "packed"), {**inputs_of("right"), **labels_of(cls)}
    labels = given["labels"].where(right().bool(), 10**6)
    for each in (labels, labels.flatten()):
        assert_same(model(**{**given, "labels": each}).loss, model(**given).loss, atol=0)
    with pytest.raises(ValueError, match=r"of shape \(5, 10\); expected class indices of shape \(5, 11\)"):
        model(**{**given, "labels": labels[:, 1:]})


def test_no_answer_lies_in_padding():
    model, inputs, real = make(BertForQuestionAnswering), inputs_of("right"), right().bool()
    starts, ends = torch.tensor([2, 0, 5, 0, 9]), torch.tensor([10, 2, 6, 0, 9])
    plain = on(model, "sdpa")(**inputs)
    packed = on(model, "packed")(**inputs, start_positions=starts, end_positions=ends)
    losses = []
    for name, at in (("start_logits", starts), ("end_logits", ends)):
        assert_same(packed[name][real], plain[name][real])
        assert (packed[name][~real] == torch.finfo(F64).min).all()
        scores = plain[name].masked_fill(~real, -torch.inf).log_softmax(-1)
        losses.append(-scores.gather(1, at[:, None]).mean())
    assert_same(packed.loss, torch.stack(losses).mean())
    beyond = model(**inputs, start_positions=torch.tensor([2, 9, 5, 0, 9]), end_positions=ends)  # 9 is padding there
    scores = plain.start_logits.masked_fill(~real, -torch.inf).log_softmax(-1)
    others = torch.tensor([0, 2, 3, 4])
    assert_same(beyond.loss, (losses[1] - scores[others, starts[others]].mean()) / 2)
    _, tokens = packed_inputs(inputs)
    assert model(**tokens).start_logits.shape == (sum(LENGTHS),)
    with pytest.raises(ValueError, match="start_positions and end_positions are indices in rows"):
        model(**tokens, start_positions=starts, end_positions=ends)


def inputs_of_calls(module: nn.Module, model: Any, inputs: dict[str, Any], **options: Any) -> list[Tensor]:
    """Return the first input of each call of a module, without a hook."""
    with mock.patch.object(module, "forward", wraps=module.forward) as called:
        model(**inputs, **options)
    return [each.args[0] for each in called.call_args_list]


@pytest.mark.parametrize(("backend", "rows"), [("auto", B), ("packed", B), ("sdpa", B * S), ("eager", B * S)])
@pytest.mark.parametrize("name", ["bert", "bert.encoder", "bert.encoder.layer.2.intermediate.dense"])
def test_a_head_of_the_pooler_asks_for_the_first_token_unless_more_is_wanted_or_a_hook_looks(name, backend, rows):
    model, inputs = on(make(BertForSequenceClassification), backend), inputs_of("right")
    whole = sum(LENGTHS) if backend == "packed" else B * S
    calls = partial(inputs_of_calls, model.bert.encoder.layer[-1].output, model, inputs)
    found = [*calls(), *calls(output_hidden_states=True)]
    assert_same(model(**inputs).logits, model(**inputs, output_hidden_states=True).logits)
    with model.get_submodule(name).register_forward_hook(lambda *args: None):
        found += calls()
    assert [x.shape[:-1].numel() for x in [*found, *calls()]] == [rows, whole, whole, rows]


# What "auto" does


def ran_packed(model: Any, inputs: dict[str, Any], **options: Any) -> bool:
    return [x.dim() for x in inputs_of_calls(model.base_model.encoder, model, inputs, **options)] == [2]


@pytest.fixture
def sparse() -> dict[str, Tensor]:
    """A batch that is large and empty enough, 8 x 11 and 45 % filled."""
    return make_batch(8, S, lengths=(11, 3, 7, 1, 4, 2, 3, 9))


@pytest.mark.parametrize("cls", [*POOLED, BertForMultipleChoice])
def test_auto_leaves_padding_out_where_it_pays_and_nobody_sees_it(cls, sparse):
    model = make(cls)
    if cls is BertForMultipleChoice:
        sparse = {k: x.unflatten(0, (2, 4)) for k, x in sparse.items()}
    mask = sparse["attention_mask"]
    assert ran_packed(model, sparse)
    assert_same(model(**sparse), on(model, "sdpa")(**sparse))
    assert not ran_packed(model, sparse)
    on(model, "auto")
    for changes in (
        *({"attention_mask": other} for other in (torch.ones_like(mask), None, mask.flip(-1))),
        {k: x[..., :5] for k, x in sparse.items()},  # too small
        *({asked: True} for asked in ("output_attentions", "output_hidden_states")),
    ):
        assert not ran_packed(model, {**sparse, **changes}), changes
    assert not ran_packed(model.train(), sparse)


def test_options_say_whether_auto_leaves_padding_out(sparse):
    model, mask = make(BertModel), sparse["attention_mask"]
    for options, packs in (
        ({"first_token_only": True}, True),
        ({"skip_padding": True}, True),
        ({"first_token_only": True, "skip_padding": False}, False),
        ({"output_attentions": True, "skip_padding": True}, False),
        ({"attention_mask": mask[:, None].expand(-1, S, -1), "skip_padding": True}, False),
        ({"attention_mask": torch.ones_like(mask), "first_token_only": True}, False),
    ):
        assert ran_packed(model, {**sparse, **options}) == packs
    assert not ran_packed(on(model, "sdpa"), sparse, first_token_only=True)


@pytest.mark.parametrize("cls", [BertModel, BertForMaskedLM, BertForTokenClassification, BertForPreTraining])
def test_auto_keeps_what_stands_at_padded_positions(cls, sparse):
    model = make(cls)
    assert not ran_packed(model, sparse)
    assert_same(model(**sparse), on(model, "sdpa")(**sparse), atol=0)


@pytest.mark.parametrize("name", ["", "bert", "bert.embeddings.LayerNorm", "bert.encoder.layer.0.attention.self"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_where_a_hook_looks_auto_computes_all(kind, name, sparse):
    model = make(BertForSequenceClassification).requires_grad_(False)
    handle = getattr(model.get_submodule(name), f"register_{kind}_hook")(lambda *args: None)
    assert ran_packed(model, sparse) == (name == "")  # the head's own inputs are the user's
    handle.remove()
    assert ran_packed(model, sparse)


def test_where_a_graph_is_made_auto_does_not_look_at_the_mask(sparse):
    """Another mask may go through the graph."""
    model = make(BertForSequenceClassification).requires_grad_(False)
    ids, mask = sparse["input_ids"], sparse["attention_mask"]
    given = {"input_ids": ids, "attention_mask": mask}
    other = {"input_ids": ids, "attention_mask": torch.ones_like(mask)}
    traced = torch.jit.trace(lambda ids, mask: model(ids, mask).logits, (ids, mask))
    exported = torch.export.export(model, (), given).module()
    graph = make_fx(lambda ids, mask: model(ids, mask).logits)(ids, mask)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for batch in (given, other):
        wanted = on(model, "sdpa")(**batch).logits
        on(model, "auto")
        outs = traced(*batch.values()), graph(*batch.values()), exported(**batch).logits, compiled(**batch).logits
        assert_same(outs, [wanted] * 4)
    masks = torch.stack([mask, torch.ones_like(mask)])
    mapped = torch.func.vmap(lambda mask: model(ids, mask).logits)(masks)
    assert_same(mapped, torch.stack([model(ids, mask).logits for mask in masks]))


@pytest.mark.parametrize(("rows", "tokens", "pays"), [(10, 80, True), (10, 81, False), (7, 56, True), (6, 48, False)])
def test_auto_pays_up_to_80_percent_of_64_places_or_more(rows, tokens, pays, model):
    lengths = tuple(tokens // rows + (i < tokens % rows) for i in range(rows))
    assert ran_packed(model, make_batch(rows, 10, lengths=lengths), first_token_only=True) == pays


@pytest.mark.parametrize("told", [None, True, False])
def test_auto_trains_packed_where_varlen_attention_runs(told, monkeypatch):
    """On a GPU in 16 bits; computed here by the groups.  A head that reads padding, or a hook, gets it."""
    batch = {**make_batch(8, 10, lengths=(10, 1, 7, 3, 10, 2, 5, 4))}
    model = make(attn_implementation="auto", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    options = {"first_token_only": True, **({} if told is None else {"skip_padding": told})}
    assert not ran_packed(model, batch, **options)
    wanted = model(**batch, first_token_only=True)
    monkeypatch.setattr(body_module, "missing_for_varlen", lambda needs: None)
    assert ran_packed(model, batch, **options) == (told is not False)
    assert not ran_packed(model, batch)  # all tokens are returned
    assert_same(dict(model(**batch, **options)), dict(wanted))
    model.encoder.register_forward_hook(lambda *args: None)
    assert not ran_packed(model, batch, **options)


# CUDA


HALF = Requirements(device=torch.device("cuda", 1), dtype=torch.float16)


def test_what_keeps_varlen_attention_from_running_is_said(monkeypatch):
    cases: list[tuple[dict[str, Any], str]] = [
        *((runs, "None") for runs in ({}, {"dtype": torch.bfloat16, "head_dim": 32}, {"head_dim": 256})),
        *(({"head_dim": size}, f"up to 256, not {size}") for size in (12, 257, 264)),
        ({"dropout": True}, "None"),
        ({"dtype": torch.float32}, "not float32"),
        ({"device": torch.device("cpu")}, "runs on CUDA, not on cpu"),
        ({"relative": True}, "relative positions"),
    ]
    for changes, says in cases:
        assert says in str(missing_for_varlen(replace(HALF, **changes)))
    with monkeypatch.context() as turing:
        turing.setattr(torch.cuda, "is_available", lambda: True)
        turing.setattr(torch.cuda, "get_device_capability", {torch.device("cuda", 1): (7, 5)}.get)
        assert "compute capability 8.0 or more" in str(missing_for_varlen(HALF))
    monkeypatch.setattr(torch_private, "flash_attention", None)
    assert "which gives gradients and dropout" in str(missing_for_varlen(HALF))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("learns", [False, True])
def test_varlen_attention_is_told_where_sequences_end(first, dropout, learns, monkeypatch):
    """The calls as torch declares them, computed here by the groups: the kernels need CUDA.

    `varlen_attn` may take cuDNN and has no dropout, so gradients and dropout are the other operator's.
    """
    module = importlib.import_module("torch.nn.attention.varlen")
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = {False: [*inspect.signature(module.varlen_attn).parameters], True: [x.name for x in schema.arguments]}
    called = []
    packing = packed((3, 0, 5, 1))
    k, v = torch.randn(2, 9, N, 8, dtype=F64, generator=torch.Generator().manual_seed(1))
    q = torch.randn(3 if first else 9, N, 8, dtype=F64, generator=torch.Generator().manual_seed(2))

    def recorded(by_flash: bool, *args: Any) -> Tensor:
        given = dict(zip(names[by_flash], args, strict=False))
        called.append(by_flash)
        cu_q, cu_k = (given[f"{'cum' if by_flash else 'cu'}_seq_{each}"] for each in "qk")
        assert (given["max_q"], given["max_k"]) == (1 if first else 5, 5)
        assert cu_q.dtype == cu_k.dtype == torch.int32
        if by_flash:
            assert (given["dropout_p"], given["is_causal"], given["return_debug_mask"]) == (dropout, False, False)
        assert cu_q.tolist() == (list(range(len(cu_k))) if first else cu_k.tolist())
        return by_ends(q, k, v, SimpleNamespace(nonempty_ends=cu_k, keys=given["max_k"]), None, 0.0, first)

    monkeypatch.setattr(module, "varlen_attn", partial(recorded, False))
    monkeypatch.setattr(torch_private, "flash_attention", lambda *args: (recorded(True, *args),))
    with torch.set_grad_enabled(learns):
        found = varlen(q, k, v, packing, None, dropout, first)
    assert_same(found, grouped(q, k, v, packing, None, 0.0, first))
    assert called == [learns or dropout > 0]
    if not first:  # under graphs always by flash attention: cuDNN may not know empty sequences
        slots = Slots.of_rows(torch.arange(5) < torch.tensor([3, 0, 5, 1])[:, None], 9, 5, rest=False)
        with torch.set_grad_enabled(learns):
            assert_same(varlen(q, k, v, slots, None, dropout, first), found)
        assert called[1:] == [True]


def test_on_cuda_packed_is_varlen_attention_or_why_not_is_said():
    with warnings.catch_warnings(action="error"):
        assert select("packed", Requirements()).name == "packed"
        assert select("packed", HALF).name == select("varlen", HALF).name == "varlen"
    with pytest.warns(UserWarning, match="runs as groups of padded sequences: .* not float32") as said:
        assert select("packed", replace(HALF, dtype=torch.float32)).name == "packed"
    assert [each.filename for each in said] == [__file__]
    with pytest.raises(ValueError, match="'varlen' cannot give attentions"):
        select("varlen", replace(HALF, weights=True))
    for needs, reason in ((Requirements(), "not on cpu"), (replace(HALF, relative=True), "relative positions")):
        with pytest.raises(ValueError, match=f"backend 'varlen' cannot run here: .*{reason}.*; use 'packed'"):
            select("varlen", needs)


EVERY_HEAD = {"pruned_heads": {0: [1, 3], 1: range(N), 2: range(N)}}  # also of the last layer


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("changes", [{}, EVERY_HEAD], ids=["heads", "no heads"])
@pytest.mark.parametrize("ends", [[0, 3, 3, 8], [0, 0, 0], [0]], ids=["some tokens", "no tokens", "no sequences"])
def test_varlen_attention_is_given_heads_and_tokens(ends, changes, first, monkeypatch):
    """It divides by the number of heads: without this the process would end.  Computed here by torch's operators."""
    ran = []

    def attends(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, *longest: int) -> list[Tensor]:
        ran.append(all((*q.shape, *k.shape, *v.shape, *longest[:2])))
        assert min(q_ends.diff().min(), k_ends.diff().min()) > 0
        layout = SimpleNamespace(nonempty_ends=k_ends, keys=longest[1])
        return [by_ends(q, k, v, layout, None, 0.0, len(q) < len(k))]  # the last layer may be asked for first tokens

    monkeypatch.setattr(torch_private, "flash_attention", attends)
    monkeypatch.setitem(BACKENDS, "varlen", replace(BACKENDS["varlen"], missing=lambda needs: None))
    model, found = make(**changes), []
    for backend in ("packed", "varlen"):
        ids, cu_seqlens = torch.arange(1, ends[-1] + 1), torch.tensor(ends, dtype=torch.int32)
        out = on(model, backend)(ids, cu_seqlens=cu_seqlens, first_token_only=first)
        found.append((dict(out), gradients(model, out.last_hidden_state.square().sum() + out.pooler_output.sum())))
    assert_same(found[1], found[0])
    assert all(ran)
    assert len(ran) == (ends[-1] > 0) * (L if changes == {} else 1)


def backend_for(model: BertModel, x: Tensor) -> Backend:
    """Return the backend that computes packed attention on embeddings x."""
    args: Any = SimpleNamespace(attention="packed", attention_mask=None, output_attentions=False)
    return model.select_backend_and_mask(args, packed(LENGTHS), x, None)[0]


def test_under_autocast_the_kernel_is_that_of_the_lower_dtype(model, monkeypatch):
    asked: list[Requirements] = []
    monkeypatch.setattr(body_module, "select", lambda name, needs: asked.append(needs) or select(name, Requirements()))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: {"cuda": torch.bfloat16}[device])
    backend_for(model, torch.zeros(1).as_subclass(OnCuda))
    backend_for(model, torch.zeros(1))
    assert [needs.dtype for needs in asked] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "varlen"), (torch.float32, "packed")])
def test_a_packed_model_on_a_gpu_takes_varlen_attention_in_16_bits(dtype, name):
    with FakeTensorMode():
        x = torch.empty(5, 64, dtype=dtype, device="cuda")
    with warnings.catch_warnings(action="ignore"):  # that float32 runs as groups
        assert backend_for(make(hidden_size=64), x).name == name


@pytest.mark.slow
def test_it_compiles():
    torch._dynamo.reset()
    model, inputs = on(make(), "packed"), inputs_of("right")
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        assert_same(compiled(**inputs), model(**inputs))
        other = inputs_of("a row of padding")
        assert_same(compiled(**other), model(**other))


# What cannot be packed is refused


def test_what_packed_cannot_do_is_refused(model):
    decoder, relative, gaps = make(is_decoder=True), make(**VARIANTS["relative_key"]), inputs_of("scattered")
    for each, changes, says in (
        (model, {"output_attentions": True}, "'packed' cannot give attentions; use 'eager' or 'auto'"),
        (model, {"attention_mask": torch.ones(B, S, S)}, "'packed' takes a 2-D attention_mask, not 3-D"),
        (model, {"attention_mask": torch.ones(B, 1, S, S).bool()}, "'packed' takes a 2-D attention_mask, not 4-D"),
        (model, {"attention_mask": torch.ones(B, S - 1)}, r"attention_mask has shape \(5, 10\); expected \(5, 11\)"),
        (model, {"attention_mask": torch.full((B, S), 0.5)}, r"holds 0\.5"),
        (decoder, {"use_cache": False}, "'packed' does not support decoders"),
        (relative, gaps, "cannot use relative positions when padding lies between tokens"),
    ):
        with pytest.raises(ValueError, match=says):
            on(each, "packed")(**{**inputs_of("right"), **changes})
    for each, asked, says in (
        (model, "output_attentions", "first_token_only=True leaves no hidden states or attentions"),
        (model, "output_hidden_states", "first_token_only=True leaves no hidden states or attentions"),
        (decoder, "first_token_only", "first_token_only=True is for encoders"),
    ):
        with pytest.raises(ValueError, match=says):
            on(each, "sdpa")(**{**inputs_of("right"), "first_token_only": True, asked: True})


def test_bad_packed_inputs_are_refused_by_name(model):
    ids, ends = torch.ones(7, dtype=torch.long), torch.tensor([0, 3, 7], dtype=torch.int32)
    for inputs, says in (
        ({"input_ids": ids[None]}, r"input_ids has shape \(1, 7\); expected \(tokens\), beside cu_seqlens"),
        ({"inputs_embeds": torch.ones(7, D - 1)}, r"inputs_embeds has shape \(7, 47\)"),
        ({}, "give one of input_ids or inputs_embeds, not neither"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 4)}, "attention_mask or cu_seqlens, not both"),
        ({"input_ids": ids, "cu_seqlens": ends.long()}, "cu_seqlens is torch.int64"),
        ({"input_ids": ids, "cu_seqlens": ends.to("meta")}, "cu_seqlens is on meta and input_ids on cpu"),
        ({"input_ids": ids, "past_key_values": KeyValueCache()}, "past_key_values or cu_seqlens, not both"),
        ({"input_ids": ids, "cu_seqlens": ends[None]}, r"cu_seqlens is torch.int32 of shape \(1, 3\)"),
        ({"input_ids": ids, "cu_seqlens": ends[:2]}, "goes from 0 to 3; it must rise from 0 to the 7 tokens"),
        ({"input_ids": ids, "cu_seqlens": ends[1:]}, "goes from 3 to 7"),
        ({"input_ids": ids, "cu_seqlens": ends[[0, 2, 1, 2]]}, "must rise"),
        ({"input_ids": ids, "token_type_ids": ids[:6]}, r"token_type_ids has shape \(6,\); expected \(7,\)"),
        ({"input_ids": ids, "position_ids": ids * 40}, "position_ids holds 40"),
        ({"input_ids": ids * 97}, "input_ids holds 97"),
        ({"input_ids": torch.ones(41).long(), "cu_seqlens": torch.tensor([0, 41]).int()}, "longest sequence is 41"),
    ):
        with pytest.raises(ValueError, match=says):
            model(**{"cu_seqlens": ends, **inputs})
    with pytest.raises(ValueError, match="'packed' does not support decoders"):
        make(is_decoder=True)(input_ids=ids, cu_seqlens=ends)
    with pytest.raises(ValueError, match="backend 'sdpa' cannot take cu_seqlens; use 'packed' or 'auto'"):
        on(model, "sdpa")(input_ids=ids, cu_seqlens=ends)


# Groups


def test_a_new_group_begins_where_padding_costs_more_than_a_call(monkeypatch):
    monkeypatch.setattr(layouts_module, "CALL_COST", 100)
    # the empty one is left out; 20² - 19² = 39 is less than a call, 20² - 5² is not
    assert group_lengths((3, 20, 0, 19, 5, 20, 4)) == [[1, 5, 3], [4, 6, 0]]
    assert group_lengths(()) == group_lengths((0, 0)) == []
    groups = packed((4, 4, 4)).groups  # of one length: they are not moved
    assert [groups.token_at, groups.slot_of, groups.rank, *(group.real for group in groups.groups)] == [None] * 4


def test_padding_is_not_computed_by_the_head_either():
    model, rows = on(make(BertForPreTraining), "packed"), set[int]()
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.LayerNorm | nn.Embedding):
            part.register_forward_hook(lambda m, args, out: rows.add(out.shape[0]))
    assert model(**inputs_of("right")).prediction_logits.shape == (B, S, SIZES["vocab_size"])
    assert rows == {sum(LENGTHS), B}  # the pooler has B
