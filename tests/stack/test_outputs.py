"""What a model returns reads as attributes, as keys and as a tuple, and travels wherever tensors do."""

import copy
import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import F64, assert_same, full_outputs, gradients, make, make_batch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils import _pytree as pytree

from bertlite.models.outputs import LogitsOutput, PreTrainingOutput, QuestionAnsweringOutput
from bertlite.stack.attention import BACKENDS, without_cudnn
from bertlite.stack.outputs import BertModelOutput, ModelOutput
from bertlite.support.torch_private import enabled_kernels

KINDS = {
    BertModelOutput: ("last_hidden_state", "pooler_output", "hidden_states", "attentions"),
    LogitsOutput: ("loss", "logits", "hidden_states", "attentions"),
    PreTrainingOutput: ("loss", "prediction_logits", "seq_relationship_logits", "hidden_states", "attentions"),
    QuestionAnsweringOutput: ("loss", "start_logits", "end_logits", "hidden_states", "attentions"),
}


def parts_of(kind: type[ModelOutput]) -> dict[str, Any]:
    """One value per field, no two alike."""
    return {
        name: (torch.tensor([i, 0]), torch.tensor([i, 1]))
        if name in ("hidden_states", "attentions")
        else torch.tensor(i)
        for i, name in enumerate(KINDS[kind])
    }


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_reads_three_ways_and_what_is_None_is_absent(kind: type[ModelOutput]) -> None:
    for missing in ("", *KINDS[kind]):
        parts = {name: part for name, part in parts_of(kind).items() if name != missing}
        out = kind(**parts)
        for i, (name, part) in enumerate(parts.items()):
            assert getattr(out, name) is out[name] is out[i] is out[i - len(parts)] is out.get(name) is part
            assert name in out
        assert list(out) == list(out.keys()) == list(parts)
        assert list(out.items()) == list(parts.items())
        assert tuple(out.values()) == out.to_tuple() == tuple(parts.values())
        assert (out[:2], out[-2:]) == (out.to_tuple()[:2], out.to_tuple()[-2:])
        assert len(out) == len(parts)
        assert isinstance(out, Mapping)
        assert dict(out) == {**out} == parts
        with pytest.raises(IndexError):
            out[len(parts)]
        if missing:
            assert list(kind({**parts, missing: None})) == list(parts)
            assert missing not in out
            assert getattr(out, missing) is None
            assert out.get(missing, "nothing") == "nothing"
            with pytest.raises(KeyError, match=missing):
                out[missing]


def test_a_field_that_is_empty_is_not_absent() -> None:
    out = BertModelOutput(last_hidden_state=torch.zeros(0, 11, 48), attentions=())
    assert list(out) == ["last_hidden_state", "attentions"]
    assert out.attentions == ()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match="LogitsOutput has no field logit; have: loss, logits, hidden_states, attent"):
        LogitsOutput(logit=torch.zeros(1))
    with pytest.raises(TypeError, match="no field logit"):
        LogitsOutput({"logit": torch.zeros(1)})
    with pytest.raises(KeyError, match="logit"):
        LogitsOutput()["logit"]
    with pytest.raises(AttributeError, match="logit"):
        LogitsOutput().logit  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(KeyError, match="to_tuple"):
        LogitsOutput()["to_tuple"]  # a method is no field


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "again",
    [
        lambda out: pickle.loads(pickle.dumps(out)),
        copy.deepcopy,
        lambda out: type(out)(out),  # as accelerate and DataParallel build it
        lambda out: type(out)(dict(out.items())),
    ],
    ids=["pickle", "deepcopy", "an output", "a dict"],
)
def test_an_output_can_be_made_of_another(again: Any, kind: type[ModelOutput]) -> None:
    full, part = kind(**parts_of(kind)), kind({KINDS[kind][1]: torch.tensor(3)})
    for out in (full, part):
        other = again(out)
        assert type(other) is kind
        assert_same(other, out, atol=0)
        assert all(getattr(other, name) is None for name in KINDS[kind] if name not in out)


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_is_a_pytree(kind: type[ModelOutput]) -> None:
    full, part = kind(**parts_of(kind)), kind({KINDS[kind][1]: torch.tensor(3)})
    for out in (full, part):
        leaves, spec = pytree.tree_flatten(out)
        flat = [x for value in out.values() for x in (value if isinstance(value, tuple) else (value,))]
        assert [id(x) for x in leaves] == [id(x) for x in flat]
        again = pytree.tree_unflatten(leaves, spec)
        assert type(again) is kind
        assert_same(again, out, atol=0)
        doubled = pytree.tree_map(lambda x: x * 2, out)
        assert type(doubled) is kind
        assert all(x.equal(y * 2) for x, y in zip(pytree.tree_leaves(doubled), flat, strict=True))
        keyed: Any = pytree.tree_flatten_with_path(out)[0]
        assert [path[0].key for path, _ in keyed if len(path) == 1 or path[1].idx == 0] == list(out)
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
        json.loads(pytree.treespec_dumps(spec))


def test_two_outputs_are_equal_only_if_they_are_one() -> None:
    out = LogitsOutput(logits=torch.zeros(2))
    assert out == out
    assert out != LogitsOutput(logits=out.logits)
    assert len({out, out, LogitsOutput(logits=out.logits)}) == 2


# Under torch.compile and torch.export

RICH = {"position_embedding_type": "relative_key", "pruned_heads": {0: [1]}}
ASKED = {"output_hidden_states": True, "output_attentions": True}


def test_a_model_compiles_without_a_break_and_without_cudnn(
    batch: dict[str, Tensor], kernels_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """aot_eager traces forward and backward as every compiler does, and then runs torch's own kernels.

    On a GPU each call of torch's attention has its switch beside it.
    """
    kernel = BACKENDS["sdpa"].kernel

    def switched(*args: Any) -> Any:
        with without_cudnn():
            return kernel(*args)

    monkeypatch.setitem(BACKENDS, "sdpa", replace(BACKENDS["sdpa"], kernel=switched))
    torch._dynamo.reset()
    model = make(attn_implementation="sdpa", num_hidden_layers=2, **RICH)  # the time to compile is that of layers
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gate = torch.linspace(-0.5, 1.5, 8, dtype=F64).view(2, 4)
    got, wanted = compiled(**batch, head_mask=gate, **ASKED), model(**batch, head_mask=gate, **ASKED)
    assert type(got) is BertModelOutput
    assert_same(got, wanted)
    losses = [out.last_hidden_state.square().mean() + out.pooler_output.mean() for out in (got, wanted)]
    assert_same(*(gradients(model, loss) for loss in losses))
    empty = {**batch, "attention_mask": torch.tensor([[1] * 11, [0] * 11])}
    assert_same(compiled(**empty, **ASKED), model(**empty, **ASKED))
    assert set(kernels_run) == {"sdpa"}
    assert SDPBackend.CUDNN_ATTENTION in enabled_kernels()


def test_a_model_exports_with_dynamic_batch_and_length() -> None:
    model = make(output_hidden_states=True, output_attentions=True, num_hidden_layers=2)
    batch = make_batch(batch=3, length=9)
    rows, length = torch.export.Dim("rows", max=64), torch.export.Dim("length", min=2, max=40)
    shapes = {name: {0: rows, 1: length} for name in batch}
    program = torch.export.export(model, (), kwargs=batch, dynamic_shapes=shapes)
    exported = program.module()
    for shape in ((3, 9), (2, 11), (5, 40), (4, 2)):
        inputs = make_batch(*shape, lengths=tuple(range(shape[0])))  # the first has nothing to attend to
        out = exported(**inputs)
        assert type(out) is BertModelOutput
        assert_same(out, full_outputs(model, inputs))
