"""bertlite/inference/clients/readers.py: readers of padding get it as in the original, and other parts get none."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import F64, assert_same, randomise_
from natively import kernels_or_skip
from test_bodies import DISTIL, HEADS, OWN, SIZE  # type: ignore[import-not-found]
from torch import nn

import bertlite
from bertlite import optimize_for_inference
from bertlite.inference import InferenceModel
from bertlite.inference.clients.bodies import OptimizedBody
from bertlite.inference.clients.readers import HEADS as ROLES
from bertlite.inference.clients.readers import KNOWN

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("bertlite.hf")

MASK = (torch.arange(11) < torch.tensor([[11], [7], [4]])).long()
IDS = torch.randint(5, 97, (3, 11), generator=torch.Generator().manual_seed(0)) * MASK
BATCH = {"input_ids": IDS, "attention_mask": MASK}


def stock(name: str = "BertModel", library: Any = transformers, **changes: Any) -> Any:
    """Return a random model of transformers or of bertlite.hf, in float64."""
    family = next(each for each in sorted(HEADS, key=len, reverse=True) if name.startswith(each))
    sizes = DISTIL if family == "DistilBert" else {**SIZE, **OWN.get(family, {})}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    return randomise_(getattr(library, name)(config)).eval().to(F64)


class Reader(nn.Module):
    """A head of one's own on the states of all positions."""

    def __init__(
        self, body: nn.Module, part: nn.Module, read: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.body, self.part, self.read = body, part, read

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.read(self.part, self.body(**batch)[0])


class States(nn.Module):
    """A module around a whole classifier, which takes its encoder's states."""

    def __init__(self) -> None:
        super().__init__()
        self.model = stock("BertForSequenceClassification")

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model.bert(**batch)[0].mean(1)


class Holder:
    """No module: its class says nothing, and it takes the states of a classifier's encoder."""

    def __init__(self) -> None:
        self.model = stock("BertForSequenceClassification")

    def __call__(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model.bert(**batch)[0].mean(1)


READERS = {
    "convolution": lambda: Reader(stock(), nn.Conv1d(48, 5, 3, padding=1), lambda part, x: part(x.mT).amax(-1)),
    "LSTM": lambda: Reader(stock(), nn.LSTM(48, 5, bidirectional=True), lambda part, x: part(x.transpose(0, 1))[0][0]),
    "mean": lambda: Reader(stock("DebertaV2Model"), nn.Linear(48, 5), lambda part, x: part(x.mean(1))),
    "head of tokens": lambda: Reader(stock("RobertaForTokenClassification"), nn.Tanh(), lambda _, x: x.amax(1)),
    "a classifier replaced": lambda: replaced(stock("RobertaForSequenceClassification")),
    "around a classifier": States,
    "a hook": lambda: hooked(stock("BertForTokenClassification")),
}  # fmt: skip


def replaced(model: Any, read: Callable[[torch.Tensor], torch.Tensor] = lambda x: x.mean(1)) -> Any:
    model.classifier = Reader(nn.Identity(), nn.Linear(48, 2), lambda part, x: part(read(x))).eval()
    model.classifier.forward = lambda x: model.classifier.part(read(x))
    return model


def hooked(model: Any) -> Any:
    model.register_forward_hook(lambda _, __, out: (out[0].mean(1),))
    return model


def test_an_object_around_a_classifier_gets_padding_as_it_is() -> None:
    holder = Holder()
    with pytest.warns(RuntimeWarning, match=r"since a test_readers\.Holder may read it") as found:
        quick = optimize_for_inference(holder, backend="plain")
    assert found[0].filename == __file__, "it names the caller's line"
    assert_same(quick(**BATCH), holder(**BATCH))
    alone = optimize_for_inference(holder.model, backend="plain")
    assert not alone(**BATCH, output_hidden_states=True).hidden_states[-1][MASK == 0].any()


def first(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out[0]


@pytest.mark.parametrize("name", READERS)
def test_what_is_not_known_gets_padding_as_it_is(name: str) -> None:
    model = READERS[name]().to(F64).eval()
    wanted = first(model(**BATCH))
    with pytest.warns(RuntimeWarning, match=r"computes padding, since a .* may read it.*skip_padding=True"):
        quick = optimize_for_inference(model, backend="plain")
    assert_same(first(quick(**BATCH)), wanted)
    with warnings.catch_warnings(action="error"):
        told = {each: optimize_for_inference(model, backend="plain", skip_padding=each) for each in (True, False)}
    assert_same(first(told[False](**BATCH)), wanted)
    assert not torch.allclose(first(told[True](**BATCH)), wanted)


@pytest.mark.filterwarnings("ignore:.*may read it")
@pytest.mark.parametrize("family", ["Bert", "DebertaV2"])
def test_the_kernels_compute_padding_too(family: str) -> None:
    kernels_or_skip()
    model = stock(f"{family}Model").float()
    quick = optimize_for_inference(nn.Sequential(model, nn.Identity()), backend="native")
    assert type(quick[0]) is OptimizedBody
    ours, wanted = (part(**BATCH, output_hidden_states=True).hidden_states for part in (quick[0], model))
    for mine, theirs in zip(ours, wanted, strict=True):
        assert (mine - theirs).abs().max() < 1e-5
    short = optimize_for_inference(model, backend="native")  # by itself
    assert not short(**BATCH)[0][MASK == 0].any()
    named = stock(f"{family}Model", attn_implementation="eager").float()  # as DeBERTa always is, so it says nothing
    named.load_state_dict(model.state_dict())
    whole = optimize_for_inference(named, backend="native")
    assert bool((whole(**BATCH)[0] - wanted[-1]).abs().max() < 1e-5) is (family == "Bert")


LABELS = {
    "ForQuestionAnswering": {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([9, 2, 3])},
    "ForTokenClassification": {"labels": IDS % 2},
    "ForMaskedLM": {"labels": IDS},
}


@pytest.mark.filterwarnings("ignore:.*may read it")
@pytest.mark.parametrize("library", [transformers, hf])
@pytest.mark.parametrize("head", LABELS)
def test_losses_of_padding_are_as_they_were(head: str, library: Any) -> None:
    model, labels = stock(f"Bert{head}", library), LABELS[head]
    quick = optimize_for_inference(model, backend="plain")
    ours, theirs = quick(**BATCH, **labels), model(**BATCH, **labels)
    assert_same(ours.loss, theirs.loss)
    assert_same(ours[1], theirs[1])
    assert not hasattr(MASK, "padding_counts")
    if "labels" in labels:
        ignored = {"labels": labels["labels"].masked_fill(MASK == 0, -100)}
        ours, theirs = quick(**BATCH, **ignored), model(**BATCH, **ignored)
        assert_same(ours.loss, theirs.loss)
        assert not torch.allclose(ours.logits, theirs.logits)  # padding was left out


@pytest.mark.parametrize("head", LABELS)
def test_losses_of_the_core_on_the_kernels(head: str, tmp_path: Any) -> None:
    kernels_or_skip()
    config = bertlite.BertConfig(**SIZE, type_vocab_size=2)
    model: Any = randomise_(getattr(bertlite, f"Bert{head}")(config)).eval()
    wanted = model(**BATCH, **LABELS[head]).loss
    for told, near in ((None, True), (False, True), (True, False)):
        quick = optimize_for_inference(model, backend="native", skip_padding=told)
        quick.save(tmp_path / "saved")
        for each in (quick, InferenceModel.load(tmp_path / "saved")):
            loss = each(**BATCH, **LABELS[head]).loss  # type: ignore[union-attr]
            assert bool((loss - wanted).abs() < 1e-5) is near, (told, loss, wanted)
    base = optimize_for_inference(model.bert, backend="native", skip_padding=False)
    assert (base(**BATCH).last_hidden_state - model.bert(**BATCH).last_hidden_state).abs().max() < 1e-5  # type: ignore[union-attr]


class Mean(bertlite.BertForTokenClassification):
    """A head of one's own, made from one of bertlite's."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.bert(input_ids, attention_mask).last_hidden_state
        return self.classifier(states.mean(1))


@pytest.mark.parametrize("change", ["class", "part", "hook"])
def test_a_head_of_ones_own_on_the_core_gets_padding_as_it_is(change: str) -> None:
    kernels_or_skip()
    kind = Mean if change == "class" else bertlite.BertForTokenClassification
    model: Any = randomise_(kind(bertlite.BertConfig(**SIZE, type_vocab_size=2))).eval()
    if change != "class":
        model = hooked(model) if change == "hook" else replaced(model, lambda x: x.cumsum(1).flip(1))
    with pytest.warns(RuntimeWarning, match=r"computes padding, since a .* may read it"):
        quick = optimize_for_inference(model, backend="native")
    assert (first(quick(**BATCH)) - first(model(**BATCH))).abs().max() < 1e-5
    with warnings.catch_warnings(action="error"):
        for name in ("BertForTokenClassification", "BertForQuestionAnswering", "BertForSequenceClassification"):
            optimize_for_inference(getattr(bertlite, name)(model.config).eval(), backend="native")


class Pooled(nn.Module):
    def __init__(self, pooling: nn.Module) -> None:
        super().__init__()
        self.body, self.pooling = stock().eval(), pooling

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.body(input_ids, attention_mask)[0]
        features = {"token_embeddings": states, "attention_mask": attention_mask}
        return self.pooling(features)["sentence_embedding"]  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*may read it")
@pytest.mark.parametrize("way", ["hook", "method"])
def test_a_pooling_with_code_of_ones_own_gets_rows(way: str) -> None:
    models = pytest.importorskip("sentence_transformers.models")
    pooling = models.Pooling(48, "mean").eval()

    def pool(features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**features, "sentence_embedding": features["token_embeddings"].mean(1)}

    if way == "hook":
        pooling.register_forward_hook(lambda _, __, features: pool(features))
    else:
        pooling.forward = pool
    model = Pooled(pooling)
    assert_same(optimize_for_inference(model, backend="plain")(**BATCH), model(**BATCH))


def noise(body: Any, args: tuple[Any, ...], given: dict[str, Any], out: Any) -> Any:
    """Put noise where there is padding."""
    mask = given.get("attention_mask", args[1] if len(args) > 1 else None)
    if mask is not None and mask.dim() == 2:
        out.last_hidden_state[mask == 0] = 100.0
    return out


@pytest.mark.parametrize("family", HEADS)
def test_known_heads_read_no_padding(family: str) -> None:
    for head, role in ROLES.items():
        name = family + head
        if not hasattr(transformers, name) or ("transformers", name) not in KNOWN:
            continue
        model, batch = stock(name), dict(BATCH)
        if head == "ForMultipleChoice":
            batch = {key: x[:, None] for key, x in batch.items()}
        with warnings.catch_warnings(action="error"):
            quick = optimize_for_inference(model, backend="plain", verify=False)
        assert all(part.leaves_padding_out for part in quick.modules() if isinstance(part, OptimizedBody)), name
        before = model(**batch)[0]
        model.base_model.register_forward_hook(noise, with_kwargs=True)
        after, real = model(**batch)[0], (MASK == 1) if role == "each" else slice(None)
        assert_same(after[real], before[real], atol=0)


def test_pipelines_of_tokens_read_no_padding_and_that_of_features_does() -> None:
    model = SimpleNamespace(model=stock("BertForTokenClassification"))
    for name, reads in (("TokenClassificationPipeline", False), ("FeatureExtractionPipeline", True)):
        pipe = object.__new__(getattr(transformers, name))
        vars(pipe).update(vars(model))
        with warnings.catch_warnings(record=True, action="always") as caught:
            quick: Any = optimize_for_inference(pipe, backend="plain", verify=False)
        assert quick.model.bert.leaves_padding_out is not reads
        assert [name in str(each.message) for each in caught] == [True] * reads
