"""Removing heads and neurons for good: what the pruned model computes, what it keeps, and what is refused."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import F64, HEADS, SIZES, assert_same, distance, full_outputs, gradients, make, make_batch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from bertlite import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    drop_layers,
    kept_heads,
    kept_neurons,
    prune_heads,
    prune_neurons,
)
from bertlite.pruning import (
    compact,
    densify,
    drop_layers_,
    prune_heads_,
    prune_neurons_,
    repair,
    scatter_heads,
    with_pruned,
)

B, S, D, N, H, L, WIDTH = 2, 11, 48, 4, 12, 3, 37
ALL, EVERY = [0, 1, 2, 3], range(37)
NEURONS: dict[str, dict[int, Any]] = {
    "some": {0: [36, 3, 5], 2: range(20)},
    "a whole layer": {1: EVERY},
    "every neuron": {0: EVERY, 1: EVERY, 2: EVERY},
    "none, by name": {0: []},
}
UNITS = {"heads": (prune_heads, prune_heads_, HEADS), "neurons": (prune_neurons, prune_neurons_, NEURONS)}
CASES = {f"{unit}-{name}": (prune, x) for unit, (prune, _, cases) in UNITS.items() for name, x in cases.items()}
EACH = pytest.mark.parametrize(("prune", "gone"), CASES.values(), ids=list(CASES))
POSITIONS = ["absolute", "relative_key", "bucketed", "disentangled"]


def assert_unchanged(model: Any, before: dict[str, Tensor], config: BertConfig) -> None:
    assert_same(model.state_dict(), before, atol=0)
    assert model.config == config


# Laws


def silenced(model: Any, neurons: dict[int, Any]) -> Any:
    """Return a copy whose neurons are multiplied by 0."""
    model = copy.deepcopy(model)
    for layer, gone in neurons.items():
        gate = torch.ones(WIDTH, dtype=F64)
        gate[list(gone)] = 0
        block = model.base_model.encoder.layer[layer]
        block.intermediate.register_forward_hook(lambda module, args, out, gate=gate: out * gate)
    return model


@pytest.mark.parametrize("act", ["gelu", "sigmoid"])  # of 0, the second is not 0
@pytest.mark.parametrize("neurons", NEURONS.values(), ids=list(NEURONS))
def test_pruning_a_neuron_is_gating_it_to_zero(neurons, act, batch):
    model = make(hidden_act=act)
    pruned = prune_neurons(model, neurons)
    assert_same(full_outputs(pruned, batch), full_outputs(silenced(model, neurons), batch))
    for layer, block in enumerate(pruned.encoder.layer):
        kept = kept_neurons(pruned.config, layer)
        assert kept == tuple(neuron for neuron in EVERY if neuron not in neurons.get(layer, []))
        assert block.intermediate.dense.weight.shape == (len(kept), D)
        assert block.output.dense.weight.shape == (D, len(kept))
    if any(neurons.values()):
        assert distance(pruned(**batch).last_hidden_state, model(**batch).last_hidden_state) > 1e-2


@pytest.mark.parametrize("positions", POSITIONS)
@EACH
def test_densified_computes_as_pruned_and_is_whole(prune, gone, positions, batch):
    model = make(position_embedding_type=positions)
    pruned = prune(model, gone)
    before, config = copy.deepcopy(pruned.state_dict()), pruned.config
    dense = densify(pruned)
    assert dense.config == model.config
    assert {k: x.shape for k, x in dense.state_dict().items()} == {k: x.shape for k, x in model.state_dict().items()}
    got, wanted = full_outputs(dense, batch), full_outputs(pruned, batch)
    assert_same(got.hidden_states, wanted.hidden_states)
    assert_same(got.pooler_output, wanted.pooler_output)
    for layer in range(L):
        kept = list(kept_heads(pruned.config, layer))
        assert_same(got.attentions[layer][:, kept], wanted.attentions[layer])
    again = prune(dense, gone)
    assert_same(again.state_dict(), pruned.state_dict(), atol=0)
    assert again.config == pruned.config
    for parameter in dense.parameters():
        parameter.data.zero_()
    assert_unchanged(pruned, before, config)


@EACH
def test_a_pruned_model_is_one_built_from_the_pruned_config(prune, gone, model, batch, recwarn):
    pruned = prune(model, gone)
    config = with_pruned(model.config, gone) if prune is prune_heads else with_pruned(model.config, {}, gone)
    built = BertModel(config).double().eval()
    assert built.config == pruned.config
    assert str(built) == str(pruned)
    built.load_state_dict(pruned.state_dict())
    assert_same(full_outputs(built, batch), full_outputs(pruned, batch), atol=0)
    sizes = (
        "attention.self.num_attention_heads",
        "attention.self.all_head_size",
        "attention.self.attention_head_size",
    )
    said = attrgetter(*sizes, "attention.pruned_heads")
    assert [*map(said, built.encoder.layer)] == [*map(said, pruned.encoder.layer)]
    assert not [str(w.message) for w in recwarn]


# Pure and in place


@pytest.mark.parametrize("unit", UNITS)
def test_a_function_leaves_its_argument_alone_and_that_with_an_underscore_returns_it(unit, model):
    before, config, (prune, prune_, cases) = copy.deepcopy(model.state_dict()), model.config, UNITS[unit]
    pruned = prune(model, cases["some"])
    for parameter in pruned.parameters():
        parameter.data.zero_()
    assert_unchanged(model, before, config)
    assert prune_(model, cases["some"]) is model
    assert model.config == pruned.config
    other = make()
    method = {"heads": other.prune_heads, "neurons": other.prune_neurons}[unit]
    assert method(cases["some"]) is None
    kept, second = other.encoder.layer[1], make()
    other.drop_layers([0, 2])
    assert drop_layers_(second, [0, 2]) is second
    assert other.config == second.config == drop_layers(model, [0, 2]).config
    assert other.encoder.layer[0] is kept


READ_BY_HEADS = [f"attention.self.{part}" for part in ("query", "key", "value")]


@pytest.mark.parametrize(
    ("prune_", "gone", "rows", "columns"),
    [
        (prune_heads_, {1: [2]}, READ_BY_HEADS, "attention.output.dense"),
        (prune_neurons_, NEURONS["some"], ["intermediate.dense"], "output.dense"),
    ],
    ids=UNITS,
)
def test_what_does_not_shrink_is_the_same_parameter(prune_, gone, rows, columns, model):
    before = dict(model.named_parameters())
    prune_(model, gone)
    names = [*(f"{part}.{kind}" for part in rows for kind in ("weight", "bias")), f"{columns}.weight"]
    replaced = {f"encoder.layer.{layer}.{name}" for layer in gone for name in names}
    assert {name for name, p in model.named_parameters() if p is not before[name]} == replaced
    for name in replaced:
        parameter = model.get_parameter(name)
        assert parameter.is_leaf
        assert parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == parameter.nbytes  # the old matrix is not kept alive


def test_a_config_of_another_class_is_changed_in_a_copy_too():
    """Such as transformers' own, whose fields can be set."""
    config = SimpleNamespace(**SIZES, pruned_heads={"2": [3], "0": [], "1": []})  # as JSON writes them
    before = copy.deepcopy(config)
    pruned = with_pruned(config, {0: [1], 1: []}, {1: [36, 5]})
    assert type(pruned) is SimpleNamespace
    assert (pruned.pruned_heads, pruned.pruned_neurons) == ({0: [1], 2: [3]}, {1: [5, 36]})  # no layer that lost none
    assert config == before


# What survives


@pytest.mark.parametrize("whole", [False, True], ids=["pruned", "densified"])
@pytest.mark.parametrize(
    ("prune", "gone"), [(prune_heads, {0: [1], 1: ALL}), (prune_neurons, {0: [1], 1: EVERY})], ids=UNITS
)
def test_dtype_requires_grad_and_modes_survive_part_by_part(prune, gone, whole, batch):
    def change(model: Any) -> Any:
        pruned = prune(model, gone)
        return densify(pruned) if whole else pruned

    def kinds(model: Any) -> Any:
        parameters = {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()}
        return parameters, {name: module.training for name, module in model.named_modules()}

    model = make(position_embedding_type="bucketed").bfloat16()  # with a column of an embedding for each head
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 3 == 0)
    model.encoder.layer[0].attention.self.query.train()
    model.encoder.layer[1].train()
    before, model = kinds(model), change(model)
    assert {on for name, (_, on) in before[0].items() if "layer.0.attention" in name} == {True, False}
    assert kinds(model) == before
    assert full_outputs(model, batch).last_hidden_state.isfinite().all()
    assert {p.device.type for p in change(make().to("meta")).parameters()} == {"meta"}


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_the_gradients_of_a_pruned_model_are_those_of_the_gated_one(backend, batch):
    model, gate = make(attn_implementation=backend), torch.ones(L, N, dtype=F64)
    pruned = prune_heads(model, heads := HEADS["the first layer and more"])
    for layer, gone in heads.items():
        gate[layer, gone] = 0
    got = gradients(pruned, pruned(**batch).last_hidden_state.square().mean())
    wanted = gradients(model, model(**batch, head_mask=gate).last_hidden_state.square().mean())
    for layer in range(L):
        rows = [head * H + i for head in kept_heads(pruned.config, layer) for i in range(H)]
        for name in ("query", "key", "value"):
            for kind in ("weight", "bias"):
                place = f"encoder.layer.{layer}.attention.self.{name}.{kind}"
                wanted[place] = wanted[place][rows]
        place = f"encoder.layer.{layer}.attention.output.dense.weight"
        wanted[place] = wanted[place][:, rows]
    assert_same(got, wanted)


def test_hooks_survive_and_see_the_pruned_widths_and_gradients_of_what_is_replaced_go(model, batch):
    attention = model.encoder.layer[0].attention
    model(**batch).last_hidden_state.square().mean().backward()
    names = ["self.query", "self.key", "self.value", "output.dense", "self", "output"]
    ran: dict[str, list[Any]] = {name: [] for name in names}
    for name, calls in ran.items():
        module = attention.get_submodule(name)
        module.register_forward_pre_hook(lambda m, args, calls=calls: calls.append(args[0].shape[-1]))
        module.register_forward_hook(lambda m, args, out, calls=calls: calls.append("after"))
        module.register_full_backward_hook(lambda m, grads, out, calls=calls: calls.append("backward"))
    prune_heads_(model, {0: [1]})
    assert attention.self.query.weight.grad is None
    assert attention.output.dense.bias.grad is not None
    model(**batch).last_hidden_state.square().mean().backward()  # and the rest accumulates
    widths = {"output.dense": 36, "output": 36}
    assert ran == {name: [widths.get(name, D), "after", "backward"] for name in names}
    assert (attention.self.query.out_features, attention.output.dense.in_features) == (36, 36)
    assert attention.self.query.weight.grad.shape == (36, D)  # type: ignore[attr-defined]  # it was None above


# Refusals

BAD_HEADS: list[tuple[Any, str]] = [
    ({3: [0]}, "there is no layer 3: the model has 3 layers, 0 to 2"),
    ({-4: [0]}, "there is no layer -4"),
    ({0: [4]}, "layer 0 has no head 4: it was built with 4 heads, 0 to 3"),
    ({0: [-1]}, "layer 0 has no head -1"),
    ({0: [1], 1: [7]}, "layer 1 has no head 7"),
    ({0: 1}, "all integers .*; not as {0: 1}"),
    ({0: [0.5]}, "all integers"),
    ({0: [True]}, "all integers"),
    ({0: torch.tensor([True, False, True, False])}, "all integers"),  # a mask of heads, not heads 1 and 0
    ({0: "13"}, "all integers"),
    ({None: [1]}, "all integers"),
    ([0, 1], "not as \\[0, 1\\]"),
    (torch.ones(3, 4), r"of a mask, mask\[layer\].nonzero\(\).flatten\(\)\); not as tensor\(\[\[1."),
    ({0: torch.ones(90)}, r"of a mask, mask\[layer\].nonzero\(\).flatten\(\)\); not as \{0: tensor\(\[(1., ?)+\n\}$"),
]


BAD_NEURONS: list[tuple[Any, str]] = [
    ({0: [37]}, "layer 0 has no neuron 37: it was built with 37 neurons, 0 to 36"),
    ({3: [0]}, "there is no layer 3: the model has 3 layers, 0 to 2"),
    ({0: "12"}, r"neurons are given as \{layer: \[neurons\]\}, all integers .*; not as \{0: '12'\}"),
]


def test_units_that_are_not_there_are_refused_and_nothing_changes():
    model = make(pruned_heads={0: [2]})
    before, config = copy.deepcopy(model.state_dict()), model.config
    for prune in (prune_heads, prune_heads_, lambda m, h: m.prune_heads(h)):
        for heads, says in BAD_HEADS:
            with pytest.raises(ValueError, match=says):
                prune(model, heads)
    for neurons, says in BAD_NEURONS:
        with pytest.raises(ValueError, match=says):
            prune_neurons_(model, neurons)
    assert_unchanged(model, before, config)


def test_models_of_other_libraries_and_wrappers_are_refused_by_name():
    changes: list[Any] = [densify, compact]
    changes += [partial(prune, heads={0: [1]}) for prune in (prune_heads, prune_heads_)]
    changes += [partial(prune, neurons={0: [1]}) for prune in (prune_neurons, prune_neurons_)]
    changes += [partial(drop, layers=[0]) for drop in (drop_layers, drop_layers_)]
    for model in (nn.Linear(3, 4), nn.DataParallel(make()), nn.Sequential(make()), None):
        says = f"^{type(model).__name__} is not a model of bertlite or bertlite.hf: load .* or pass the model inside$"
        for change in changes:
            with pytest.raises(TypeError, match=says):
                change(model)


def test_layers_that_share_a_module_are_refused():
    model = make()
    model.encoder.layer[2].attention = model.encoder.layer[0].attention
    for heads in ({0: [1]}, {0: [1], 2: [1]}):
        with pytest.raises(ValueError, match="layers share a matrix, and would all lose its heads"):
            prune_heads_(model, heads)
    model.encoder.layer[2].attention = copy.deepcopy(model.encoder.layer[0].attention)
    assert kept_heads(prune_heads(model, {0: [1]}).config, 0) == (0, 2, 3)


class LoraLinear(nn.Linear):
    """As adapters do it: a Linear that is more than its matrix."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, dtype=like.weight.dtype)
        self.more = copy.deepcopy(like)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.more(x)


class WrappedLinear(nn.Module):
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.weight = base_layer, base_layer.weight


def quantised(part: nn.Linear) -> nn.Module:
    dynamic = pytest.importorskip("torch.ao.nn.quantized.dynamic")
    if not torch.backends.quantized.supported_engines[1:]:
        pytest.skip("this torch has no quantised kernels")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated, and still what people have
        part = copy.deepcopy(part).float()
        part.qconfig = torch.ao.quantization.default_dynamic_qconfig
        return dynamic.Linear.from_float(part)


WRAPPED: dict[str, tuple[Callable[[nn.Linear], nn.Module], str]] = {
    "subclass": (LoraLinear, "test_pruning.LoraLinear"),
    "wrapper": (WrappedLinear, "test_pruning.WrappedLinear"),
    "quantised": (quantised, "torch.ao.nn.quantized.dynamic.modules.linear.Linear"),
    "parametrised": (nn.utils.parametrizations.weight_norm, "torch.nn.utils.parametrize.ParametrizedLinear"),
    "masked": (lambda part: torch_prune.random_unstructured(part, "weight", 0.5), "torch.Tensor"),
}
PROJECTIONS = [
    *(f"attention.{name}" for name in ("self.query", "self.key", "self.value", "output.dense")),
    *("intermediate.dense", "output.dense"),
]


def wrap_(model: Any, name: str, wrap: Callable[[nn.Linear], nn.Module]) -> Any:
    """Wrap a projection of layer 1, and return the model."""
    parent, child = f"encoder.layer.1.{name}".rsplit(".", 1)
    module = model.base_model.get_submodule(parent)
    setattr(module, child, wrap(getattr(module, child)))
    return model


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("subclass", name) for name in PROJECTIONS),
        *((kind, PROJECTIONS[3 + i % 3]) for i, kind in enumerate(WRAPPED)),
    ],
)
def test_a_projection_that_is_not_a_plain_Linear_is_refused_by_name(kind, name):
    wrap, called = WRAPPED[kind]
    model = wrap_(make(BertForSequenceClassification), name, wrap)
    prune, prune_, _ = UNITS["heads" if name.startswith("attention") else "neurons"]
    config, parts = model.config, dict(model.named_parameters())
    before = {k: x.clone() for k, x in parts.items()}
    says = f"encoder.layer.1.{name} is a {called}, not a plain nn.Linear: merge adapters before pruning"
    if kind == "masked":
        says += ", and quantise after it; make masks of torch.nn.utils.prune permanent with its remove, or bertlite"
    for each in (prune_, prune):
        with pytest.raises(TypeError, match=says.replace(".", "\\.")):
            each(model, {0: [1], 1: [2]})  # layer 0 would do
    assert model.config is config
    assert all(p is parts[k] and p.equal(before[k]) for k, p in model.named_parameters())
    prune_(model, {0: [1]})  # and does, alone
    assert model.config != config


@pytest.mark.parametrize("name", PROJECTIONS[2:])
def test_densify_and_repair_refuse_wrapped_projections_too(name):
    pruned = wrap_((prune_heads if "attention" in name else prune_neurons)(make(), {1: [2]}), name, LoraLinear)
    refused = pytest.raises(TypeError, match=rf"layer\.1\.{name} is a test_pruning\.LoraLinear")
    with refused:
        densify(pruned)
    whole = wrap_(make(), name, LoraLinear)
    assert densify(whole).config == whole.config  # nothing to fill in
    if "output" in name:
        with refused:
            repair(pruned, make(), [make_batch()])


# scatter_heads


def test_scattered_attentions_stack_are_filled_as_asked_and_carry_gradients(batch):
    """That heads keep their numbers is a law of tests/laws."""
    model = prune_heads(make(), {0: ALL, 1: [0, 1, 2]})
    attentions = model(**batch, output_attentions=True).attentions
    full = scatter_heads(attentions, model.config)
    assert torch.stack(full).shape == (L, B, N, S, S)
    assert_same(full[2], attentions[2], atol=0)
    filled = scatter_heads(attentions, model.config, fill=float("nan"))
    gone = [x.isnan().flatten(2).all(-1).all(0).tolist() for x in filled]
    assert gone == [[True] * N, [True, True, True, False], [False] * N]
    assert not filled[2].isnan().any()
    grads = gradients(model, full[1].square().sum())
    assert grads["encoder.layer.1.attention.self.query.weight"].abs().max() > 1e-6


def test_attentions_of_another_model_are_refused(model, batch):
    attentions = full_outputs(model, batch).attentions
    for given, config, says in (
        (attentions[:2], model.config, "2 layers of attentions for a model of 3"),
        (attentions, with_pruned(model.config, {1: [0]}), r"layer 1 has .* of shape \(2, 4, 11, 11\), but 3 heads"),
        ([x[0] for x in attentions], model.config, "layer 0 has attentions of shape"),
    ):
        with pytest.raises(ValueError, match=says):
            scatter_heads(given, config)
