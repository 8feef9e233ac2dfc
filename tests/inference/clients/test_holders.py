"""bertlite/inference/clients/holders.py: what holds encoders is searched, copied, and cannot be saved."""

import collections
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import SIZES, assert_same, randomise_
from test_readers import BATCH, stock  # type: ignore[import-not-found]
from torch import Tensor, nn

import bertlite
from bertlite import optimize_for_inference
from bertlite.inference.clients.bodies import OptimizedBody

pytest.importorskip("transformers")


def bert() -> Any:
    return stock("BertForSequenceClassification")


def test_what_holds_a_model_is_copied_and_holds_another() -> None:
    model = bert()
    outer = SimpleNamespace(model=model, tokenizer=object())
    quick = optimize_for_inference(outer, backend="plain")
    assert (outer.model, quick.tokenizer) == (model, outer.tokenizer)
    two = optimize_for_inference(nn.ModuleDict({"a": model.bert, "b": nn.Sequential(model.bert)}), backend="plain")
    assert two["a"] is two["b"][0]
    assert type(two["a"]) is type(quick.model.bert) is OptimizedBody
    assert type(model.bert).__name__ == "BertModel"
    outer.backend = SimpleNamespace(model=model, owner=outer)  # as a component of Haystack, and its socket
    quick = optimize_for_inference(outer, backend="plain")
    assert quick.backend.model is quick.model is not model is outer.backend.model
    assert quick.backend.owner is quick


def test_a_module_that_says_how_it_is_saved_is_copied_as_it_is() -> None:
    model = bert()
    outer = Saved(model)
    quick = optimize_for_inference(nn.Sequential(outer, outer), backend="plain")
    assert quick[0] is quick[1] is not outer
    assert type(quick[0].model.bert) is OptimizedBody
    assert_same(quick[0].model(**BATCH).logits, model(**BATCH).logits)


class Slotted:
    __slots__ = ("model",)

    def __init__(self, model: Any) -> None:
        self.model = model


Named = collections.namedtuple("Named", ["model", "text"])


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (lambda model: [model, model], lambda it: it[1]),
        (lambda model: {"a": [{"b": (model, 2)}]}, lambda it: it["a"][0]["b"][0]),
        (lambda model: Named(model, "text"), lambda it: it.model),
        (Slotted, lambda it: it.model),
        (lambda model: SimpleNamespace(models=[model], config=model.config), lambda it: it.models[0]),
        (lambda model: privately(model), lambda it: it._model),
        (lambda model: Hidden(model), lambda it: it.models[0]),
    ],
    ids=["list", "dict", "namedtuple", "slots", "object", "pydantic", "list of a module"],
)
def test_a_model_is_found_and_replaced_wherever_it_is_held(make: Any, get: Any) -> None:
    model = bert()
    outer = make(model)
    quick = optimize_for_inference(outer, backend="plain")
    assert type(quick) is type(outer)
    assert (type(get(quick).bert), get(outer)) == (OptimizedBody, model)
    assert_same(get(quick)(**BATCH).logits, model(**BATCH).logits)
    assert getattr(quick, "config", get(quick).config) is get(quick).config
    with pytest.raises(TypeError, match="optimised already: optimise the original again"):
        optimize_for_inference(quick)


def privately(model: Any) -> Any:
    pydantic: Any = pytest.importorskip("pydantic")
    fields = {"__annotations__": {"_model": Any}, "_model": pydantic.PrivateAttr(default=None), "__module__": __name__}
    outer = type("Private", (pydantic.BaseModel,), fields)()
    outer._model = model
    return outer


class Hidden(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.models = [model]  # no child
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.models[0](input_ids, attention_mask).logits


class Own(nn.Module):
    """A module of one's own around a model of bertlite, with a module named as one of sentence-transformers."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.pooling = inner, Pooling()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        out = self.inner(ids, mask)
        return self.pooling(out.last_hidden_state) if "last_hidden_state" in out else out.logits


class Pooling(nn.Module):
    def _forward_flattened(self) -> None:
        raise AssertionError("not that of sentence-transformers")

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


@pytest.mark.parametrize("cls", [bertlite.BertModel, bertlite.BertForSequenceClassification])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_holds_a_model_of_bertlite_is_optimised(cls: Any, dtype: str) -> None:
    model = Own(randomise_(cls(bertlite.BertConfig(**SIZES)))).float().eval()
    model.inner.gradient_checkpointing_enable()
    model.inner.base_model.encoder.layer = model.inner.base_model.encoder.layer[:2]
    quick, batch = optimize_for_inference(model, dtype=dtype), [*BATCH.values()]
    theirs = model(*batch)
    assert (quick(*batch) - theirs).abs().max() <= (1e-5 if dtype == "float32" else 0.05) * theirs.abs().max()
    for again in (quick, quick.inner, optimize_for_inference(model.inner, dtype=dtype)):
        with pytest.raises(TypeError, match="optimised already: optimise the original again"):
            optimize_for_inference(again, dtype=dtype)


@pytest.mark.parametrize("name", ["save_pretrained", "push_to_hub"])
def test_saving_raises_before_it_writes(name: str, tmp_path: Path) -> None:
    for quick in (optimize_for_inference(outer, backend="plain") for outer in (bert(), Saving(bert()))):
        with pytest.raises(RuntimeError, match="no save_pretrained: save the original"):
            getattr(quick, name)(str(tmp_path / "new"))
    assert not [*tmp_path.iterdir()]


class Saving:
    def __init__(self, model: Any) -> None:
        self.model = model

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir()
        self.model.save_pretrained(folder)

    push_to_hub = save_pretrained


class Saved(nn.Module):
    """A module that is saved by name and loaded from files, as flair's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("loaded from files")
