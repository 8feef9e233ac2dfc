"""BertModel's inputs: what they mean, what is refused, the gate on each head, and that it computes the same twice."""

import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import F64, HEADED, SIZES, assert_same, distance, full_outputs, inputs_of, labels_of, make, make_batch
from torch import Tensor

from bertlite import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    head_importance,
    prune_heads,
)
from bertlite.models.base import BertPreTrainedModel
from bertlite.tokenizer import BatchEncoding

B, S, D, N, L = 2, 11, 48, 4, 3
BACKENDS = ["eager", "sdpa"]


# Inputs


def test_indices_may_be_int32(model, batch):
    short = {k: x.int() for k, x in batch.items()}
    position_ids = torch.arange(S, dtype=torch.int32)
    assert_same(full_outputs(model, short, position_ids=position_ids), full_outputs(model, batch), atol=0)


def test_inputs_embeds_stand_in_for_input_ids(model, batch):
    ids = batch.pop("input_ids")
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    assert_same(full_outputs(model, batch, inputs_embeds=embeds), full_outputs(model, batch, input_ids=ids), atol=0)
    model(**batch, inputs_embeds=embeds).last_hidden_state[1, 0].square().sum().backward()
    assert embeds.grad is not None
    assert (embeds.grad != 0).any(-1).equal(torch.tensor([[False] * S, [True] * 7 + [False] * 4]))  # not the padding


@pytest.mark.parametrize("asked", [False, True])
def test_hidden_states_are_kept_only_if_asked_for(asked, model, batch):
    """Or inference would need the memory of every layer at once."""
    states: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    for layer in model.encoder.layer:
        layer.register_forward_pre_hook(lambda module, args: states.append(weakref.ref(args[0])))
    model.encoder.register_forward_hook(
        lambda module, args, out: alive.append(sum(state() is not None for state in states[1:]))  # [0] is in args
    )
    with torch.no_grad():
        out = model(**batch, output_hidden_states=asked)
    assert len(states) == L
    assert alive == [L - 1 if asked else 0]
    assert ("hidden_states" in out) == asked


def test_return_dict_false_gives_what_there_is_as_a_tuple(model, batch):
    asked = {"output_hidden_states": True, "output_attentions": True}
    out, plain = model(**batch, **asked), model(**batch, **asked, return_dict=False)
    assert type(plain) is tuple
    assert_same(plain, out.to_tuple(), atol=0)
    assert [type(part) for part in plain] == [Tensor, Tensor, tuple, tuple]
    assert len(model(**batch, return_dict=False)) == 2
    assert type(make(return_dict=False)(**batch)) is tuple


def test_the_first_four_inputs_may_be_positional(model, batch):
    positions = torch.arange(S) + 1
    got = model(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"], positions)
    assert_same(got, model(**batch, position_ids=positions), atol=0)
    with pytest.raises(TypeError, match="positional"):
        model(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"], positions, None)


@pytest.mark.parametrize("cls", [BertModel, *HEADED])
def test_what_is_no_tensor_or_misspelt_is_refused_with_the_way_out(cls):
    model, batch = make(cls), inputs_of(cls.__name__)
    ids = batch["input_ids"]
    whole = r"a {}, a whole batch: .* model\(\*\*batch"
    for given, message in (
        *((x(batch), whole.format(x.__name__)) for x in (dict, BatchEncoding, UserDict)),
        (ids.tolist(), r"a list; make it a tensor, as in torch\.tensor\(input_ids\)"),
        (ids.numpy(), "a ndarray; make it a tensor"),
        ("hello", r"the text 'hello': encode it, as in model\(\*\*tokenizer\("),
    ):
        with pytest.raises(TypeError, match=f"input_ids is {message}"):
            model(given)
    names = () if ids.dim() > 2 else ("attention_mask", "token_type_ids", "position_ids", "head_mask")
    labels = {name: x.tolist() for name, x in labels_of(cls.__name__).items()}
    for each in filter(None, [*({name: [1] * 4} for name in names), labels]):
        with pytest.raises(TypeError, match=rf"({'|'.join(each)}|^positions) is a list; make it a tensor"):
            model(ids, **each)

    class Mine(cls):  # type: ignore[misc, valid-type]
        pass

    for called, name in ((cls, f"^{cls.__name__}"), (Mine, "BertModel" if cls is BertModel else "Mine")):
        with pytest.raises(TypeError, match=rf"{name}\.forward\(\) got an unexpected keyword argument 'mask'"):
            make(called)(ids, mask=None)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("decoder", [False, True])
def test_a_traced_graph_has_no_operator_that_coremltools_lacks(decoder, batch):
    model = make(is_decoder=decoder, use_cache=False, return_dict=False)
    mask = batch["attention_mask"].clone()
    mask[0] = 0  # its queries may look at nothing
    traced = torch.jit.trace(model, (batch["input_ids"], mask), strict=False, check_trace=False)
    graph = str(traced.inlined_graph)
    assert [name in graph for name in ("aten::logical_or", "aten::__or__", "aten::__ior__")] == [True, False, False]
    assert_same(traced(batch["input_ids"], mask), model(batch["input_ids"], mask))


def ids(*shape: int, fill: int = 1) -> Tensor:
    return torch.full(shape, fill)


BAD_INPUTS: list[tuple[dict[str, Any], str]] = [
    ({}, "give one of input_ids or inputs_embeds, not neither"),
    ({"input_ids": ids(B, S), "inputs_embeds": torch.zeros(B, S, D)}, "give either .* not both"),
    ({"input_ids": ids(S)}, "input_ids has shape \\(11,\\); expected \\(batch, length\\)"),
    ({"input_ids": ids(B, S, 1)}, "input_ids has shape \\(2, 11, 1\\)"),
    ({"input_ids": ids(B, S).float()}, "input_ids is torch.float32; indices are torch.long or torch.int"),
    ({"input_ids": ids(B, S).bool()}, "input_ids is torch.bool"),
    ({"input_ids": ids(B, S).short()}, "input_ids is torch.int16"),
    ({"input_ids": ids(B, S, fill=97)}, "input_ids holds 97; this model has 0 to 96 \\(vocab_size 97\\)"),
    ({"input_ids": ids(B, S, fill=-1)}, "input_ids holds -1"),
    ({"input_ids": ids(B, 41)}, "41 tokens long; this model takes 1 to 40 \\(max_position_embeddings\\): truncate"),
    ({"input_ids": ids(B, 0)}, "0 tokens long; .*: leave texts without tokens out"),
    ({"inputs_embeds": torch.zeros(B, S)}, "inputs_embeds has shape \\(2, 11\\); expected \\(batch, length, 48\\)"),
    ({"inputs_embeds": torch.zeros(B, S, D - 1)}, "inputs_embeds has shape \\(2, 11, 47\\)"),
    ({"inputs_embeds": torch.zeros(B, 41, D)}, "41 tokens long"),
    ({"inputs_embeds": torch.ones(B, S, D).long()}, "inputs_embeds is torch.int64; embeddings are floats"),
    ({"input_ids": ids(B, S).to("meta")}, "the input is on meta, the model on cpu: move one of them"),
    ({"input_ids": ids(B, S), "token_type_ids": ids(B, S).to("meta")}, "token_type_ids is on meta, the input on cpu"),
    ({"input_ids": ids(B, S), "token_type_ids": ids(B)}, "token_type_ids has shape \\(2,\\); expected \\(2, 11\\)"),
    ({"input_ids": ids(B, S), "token_type_ids": ids(1, B, S)}, "token_type_ids has shape \\(1, 2, 11\\)"),
    ({"input_ids": ids(B, S), "token_type_ids": ids(B, S, fill=5)}, "token_type_ids holds 5; .* 0 to 4"),
    ({"input_ids": ids(B, S), "token_type_ids": ids(B, S).half()}, "token_type_ids is torch.float16"),
    ({"input_ids": ids(B, S), "position_ids": ids(S - 1)}, "position_ids has shape \\(10,\\);.* \\(2, 11\\), or"),
    ({"input_ids": ids(B, S), "position_ids": ids(3, S)}, "position_ids has shape \\(3, 11\\)"),
    ({"input_ids": ids(B, S), "position_ids": ids(B, S, fill=40)}, "position_ids holds 40; .* 0 to 39"),
    ({"input_ids": ids(B, S), "position_ids": ids(S, fill=-1)}, "position_ids holds -1"),
    ({"input_ids": ids(B, S), "position_ids": torch.zeros(S)}, "position_ids is torch.float32"),
]


@pytest.mark.parametrize(("inputs", "says"), BAD_INPUTS, ids=[says[:40] for _, says in BAD_INPUTS])
def test_a_bad_input_is_refused_by_name(inputs, says, model):
    with pytest.raises(ValueError, match=says):
        model.float()(**inputs)


# Gates: head_mask multiplies the context of each head

GENERATOR = torch.Generator().manual_seed(7)
BINARY = (torch.rand(L, N, generator=GENERATOR) > 0.4).double()
FRACTIONAL = torch.rand(L, N, dtype=F64, generator=GENERATOR) * 2 - 0.5


SAME_GATES: dict[str, Callable[[Tensor], Tensor]] = {  # each from (L, N), whose rows are equal
    "(N,)": lambda gate: gate[0],
    "(L,N)-float32": lambda gate: gate.float().double(),
    "(L,1,N)": lambda gate: gate[:, None],
    "(L,B,N)": lambda gate: gate[:, None].expand(L, B, N),
    "(L,1,N,1,1)": lambda gate: gate[:, None, :, None, None],
    "(L,B,N,1,1)": lambda gate: gate[:, None, :, None, None].expand(L, B, N, 1, 1),
    "(L,B,N,S,1)": lambda gate: gate[:, None, :, None, None].expand(L, B, N, S, 1),
}


@pytest.mark.parametrize("backend", [*BACKENDS, "packed"])
@pytest.mark.parametrize("pruned", [{}, {0: [1], 2: [0, 1, 2, 3]}], ids=["whole", "pruned"])
@pytest.mark.parametrize("form", SAME_GATES)
def test_gates_of_every_shape_mean_the_same(form, pruned, backend, batch, kernels_run):
    """What (L, N) means is a law of tests/laws."""
    gate = FRACTIONAL[1].float().double().expand(L, N)
    model = prune_heads(make(attn_implementation=backend), pruned)
    asked = {"output_hidden_states": True, "output_attentions": backend != "packed"}
    wanted = model(**batch, **asked, head_mask=gate)
    assert_same(model(**batch, **asked, head_mask=SAME_GATES[form](gate)), wanted, atol=0)
    assert kernels_run == [backend] * 2 * (L - (backend == "packed" and pruned != {}))  # a layer has no heads


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32, torch.float16], ids=str)
def test_a_binary_gate_may_have_any_dtype(dtype, model, batch):
    wanted, found = (full_outputs(model, batch, head_mask=gate) for gate in (BINARY, BINARY.to(dtype)))
    assert_same(found, wanted, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_slope_of_a_gate_is_right(backend, batch):
    """What every importance criterion rests on; gradcheck compares it with finite differences."""
    model = make(attn_implementation=backend)
    gate = FRACTIONAL.clone().requires_grad_()

    def loss(gate: Tensor) -> Tensor:
        return model(**batch, head_mask=gate).last_hidden_state.square().mean((0, 1))

    assert torch.autograd.gradcheck(loss, (gate,))
    (slope,) = torch.autograd.grad(model(**batch, head_mask=gate).pooler_output.sum(), gate)
    assert (slope != 0).all()


GATE_REFUSED = [(N - 1,), (L,), (N, L), (L, N - 1), (L, 3, N), (B, L, N), (L, B, N, 1), (L, B, N, S, S)]
GATE_REFUSED += [(L, 3, N, 1, 1), (1, B, N, 1, 1), (L, 1, 1, 1, 1), (L, B, N, 2, 1), (1, 1, 1, 1, L, N), ()]


@pytest.mark.parametrize("shape", GATE_REFUSED, ids=str)
@pytest.mark.parametrize("pruned", [{}, {0: [1], 1: [1], 2: [1]}], ids=["whole", "pruned"])
def test_gates_of_another_shape_are_refused(shape, pruned, batch):
    model = make(pruned_heads=pruned)  # the pruned one has 3 heads in each layer, and is asked about 4
    with pytest.raises(ValueError, match=r"head_mask has shape .*; expected \(4,\), \(3, 4\), \(3, 2, 4\)"):
        model(**batch, head_mask=torch.ones(shape))


def test_a_pruned_model_cannot_take_a_mask_for_each_head(batch):
    model, per_head = make(pruned_heads={0: [1]}), torch.ones(B, N, S, S, dtype=torch.bool)
    with pytest.raises(ValueError, match="a pruned model cannot take an attention_mask for each head"):
        model(**{**batch, "attention_mask": per_head})
    assert model(**{**batch, "attention_mask": per_head[:, :1]}).last_hidden_state.isfinite().all()


# What every model can do


def test_a_base_class_is_refused():
    with pytest.raises(NotImplementedError, match="use BertModel or one of the BertFor… classes"):
        BertPreTrainedModel(BertConfig(**SIZES))


def test_shared_parameters_count_once():
    model = make(BertForMaskedLM)
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    model.bert.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == D * D + D + 2 * D + 97  # the decoder's matrix is in the body


@pytest.mark.parametrize("cls", [BertModel, BertForSequenceClassification])
def test_a_model_and_the_one_inside_share_one_config(cls):
    model = make(cls)
    assert model.config is model.base_model.config
    model.set_attn_implementation("eager")
    assert model.config is model.base_model.config
    assert model.config.attn_implementation == "eager"
    model.base_model.set_attn_implementation("sdpa")
    assert model.config is model.base_model.config
    assert model.config.attn_implementation == "sdpa"
    model.base_model.prune_heads({0: [1]})
    assert model.config is model.base_model.config
    assert model.config.pruned_heads == {0: (1,)}
    before = model.config
    with mock.patch.object(model, "config", replace(before, output_attentions=True)) as patched:
        assert model.base_model.config is patched
    assert model.config is model.base_model.config is before


def test_forward_leaves_the_config_and_its_inputs_alone(model, batch):
    before, given = model.config, {**batch, "head_mask": BINARY}
    inputs = {k: x.clone() for k, x in given.items()}
    full_outputs(model, given)
    assert model.config is before
    assert_same(given, inputs, atol=0)


@pytest.mark.parametrize("backend", [*BACKENDS, "packed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_on_the_CPU_is_finite(dtype, backend, model, batch):
    """With a row that is all padding, and queries and keys of which a product is near the largest number."""
    with torch.no_grad():
        for part in ("query", "key"):
            getattr(model.encoder.layer[0].attention.self, part).weight.mul_(30)
    model = model.to(dtype)
    model.set_attn_implementation(backend)
    batch["attention_mask"][1] = 0
    assert model(**batch).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("backend", [*BACKENDS, "packed"])
def test_autocast_runs_and_is_near(backend, batch, kernels_run):
    """bfloat16 rounds values of up to 3 at 8e-3, a few times over; float32 would be within 1e-4."""
    model, seen = make(attn_implementation=backend, position_embedding_type="relative_key").float(), list[Any]()
    model.encoder.layer[0].attention.self.register_forward_hook(lambda m, args, out: seen.append(out[0].dtype))
    mask = torch.zeros(B, 1, 1, S).masked_fill(batch["attention_mask"][:, None, None] == 0, -1e9)
    other = {} if backend == "packed" else {"attention_mask": mask, "output_attentions": True}
    with torch.no_grad():
        wanted = model(**batch, head_mask=FRACTIONAL).last_hidden_state
        with torch.autocast("cpu", torch.bfloat16):
            got = model(**{**batch, **other}, head_mask=FRACTIONAL).last_hidden_state
            model(**batch)
    assert got.dtype == torch.float32
    assert seen[-1] == torch.bfloat16  # contexts, but where a gate of float32 multiplies them
    assert 1e-4 < distance(got, wanted) < 0.1
    assert kernels_run == [backend] * 3 * L


# The same twice, bit for bit


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch raise where an operator is not deterministic, and fill memory with nan: an early read shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("backend", ["eager", "sdpa", "packed", "auto"])
def test_deterministic_algorithms_are_enough_and_repeat(backend):
    """Training and inference, packed too."""
    batch, labels = make_batch(batch=3, length=19, lengths=(19, 3, 7)), torch.tensor([0, 2, 1])
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        model = make(BertForSequenceClassification, num_labels=3, attn_implementation=backend).float().train()
        loss = model(**batch, labels=labels).loss
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        pruned = prune_heads(model.eval(), {0: [1], 2: range(4)})
        scores = head_importance(model, [{**batch, "labels": labels}])
        with torch.no_grad():
            found.append([loss.detach(), *grads, pruned(**batch).logits, scores])
    assert all(x.isfinite().all() for x in found[0])
    assert_same(*found, atol=0)
