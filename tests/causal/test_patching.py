"""Patching: equal to hooks written here on other modules, on every head, model, backend and kind of padding."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from by_hooks import PRUNED, H, L, N, S, classifier, contexts, replaced, row, run_with  # type: ignore[import-not-found]
from conftest import F64, HEADED, assert_same, distance, make, make_batch
from left_as_found import left_as_found, worn
from torch import Tensor
from torch.nn import functional as F

from bertlite import (
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertModel,
    prune_heads,
)
from bertlite.causal import SITES, patch, read_values


def pair(rows: int = 2, lengths: tuple[int, ...] = (11, 7)) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two batches of the same lengths and other words."""
    return make_batch(rows, S, 1, lengths), make_batch(rows, S, 2, lengths)


def answers(clean: Any, corrupted: Any) -> tuple[Any, Any]:
    """The batches with labels that differ in every example."""
    return {**clean, "labels": torch.tensor([1, 4])}, {**corrupted, "labels": torch.tensor([2, 0])}


def first_logit(out: Any, batch: Any) -> Tensor:
    """A metric of one's own: it weighs every number that the model gives."""
    parts = [x for x in out.values() if isinstance(x, Tensor) and x.is_floating_point()]
    examples = len(batch["input_ids"])
    weights = [torch.linspace(-1, 1, x[0].numel(), dtype=x.dtype) for x in parts]
    return sum((x.reshape(len(x), -1) * w).reshape(examples, -1).sum(1) for x, w in zip(parts, weights, strict=True))


def logits_alone(out: Any, batch: Any) -> Tensor:
    return out.logits.flatten(1) @ torch.linspace(-1, 1, out.logits[0].numel(), dtype=out.logits.dtype)


def brute_force(
    model: Any, clean: Any, corrupted: Any, direction: str, metric: Any, positions: Any = None, gone: Any = ()
) -> Tensor:
    """The metric of every patched run: (B, L, N), nan where a head is pruned, or with positions (B, L, N, P)."""
    rows = []
    columns = [slice(None)] if positions is None else positions
    for i in range(len(clean["input_ids"])):
        one, other = row(clean, i), row(corrupted, i)
        source, base = (one, other) if direction == "denoise" else (other, one)
        given = contexts(model, source)
        table = torch.full((L, N, len(columns)), torch.nan, dtype=F64)
        for layer in range(L):
            kept = [head for head in range(N) if head not in dict(gone).get(layer, ())]
            for j, head in enumerate(kept):
                for c, column in enumerate(columns):
                    value = given[layer][:, column, j * H : (j + 1) * H]
                    change = partial(replaced, j=j, value=value, column=column)
                    table[layer, head, c] = metric(run_with(model, base, {layer: change}), base, i)
        rows.append(table)
    found = torch.stack(rows)
    return found[..., 0] if positions is None else found


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("gone", [{}, PRUNED], ids=["dense", "pruned"])
def test_heads_are_patched_as_by_hooks_on_the_attention_modules(direction: str, gone: Any) -> None:
    model = prune_heads(classifier(), gone)
    clean, corrupted = answers(*pair())

    def difference(out: Any, batch: Any, i: int) -> Tensor:
        return out.logits[0, clean["labels"][i]] - out.logits[0, corrupted["labels"][i]]

    found = patch(model, clean, corrupted, direction=direction)
    wanted = brute_force(model, clean, corrupted, direction, difference, gone=gone)
    assert found.metric == "logit_difference"
    assert_same(found.values.nan_to_num(nan=-9), wanted.nan_to_num(nan=-9))
    assert found.values[:, 2].isfinite().all()
    for end, batch in (("clean", clean), ("corrupted", corrupted)):
        out, rows = run_with(model, batch, {}), range(2)
        whole = out.logits[rows, clean["labels"]] - out.logits[rows, corrupted["labels"]]
        assert_same(getattr(found, end), whole)
    base, other = (found.corrupted, found.clean) if direction == "denoise" else (found.clean, found.corrupted)
    share = (wanted.mean(0) - base.mean()) / (other.mean() - base.mean())
    assert_same(found.effect.nan_to_num(nan=-9), share.nan_to_num(nan=-9), atol=1e-10)
    assert distance(found.values[:, 2, 0], base) > 1e-4


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_positions_are_patched_alone(direction: str) -> None:
    model = prune_heads(classifier(), {2: [0]})
    clean, corrupted = pair()
    positions = [0, 3, 8, 6]
    wanted = brute_force(
        model, clean, corrupted, direction, lambda out, batch, i: out.logits[0, 2], positions, {2: [0]}
    )
    found = patch(
        model, clean, corrupted, direction=direction, positions=positions, metric=lambda out, batch: out.logits[:, 2]
    )
    assert found.values.shape == (2, L, N, 4)
    assert_same(found.values.nan_to_num(nan=-9), wanted.nan_to_num(nan=-9))
    assert_same(found.values[1, :, 1:, 2], found.base[1].expand(L, 3))  # position 8 is padding there
    assert found.effect.shape == (L, N, 4)


@pytest.mark.parametrize("cls", [BertModel, *HEADED], ids=lambda cls: cls.__name__)
def test_every_model_is_patched(cls: Any) -> None:
    """Each head's effect is that of a hook on the module that reads it; metrics of every kind of model."""
    gone = {1: [2]}
    model = prune_heads(make(cls), gone)
    clean, corrupted = pair()
    if cls is BertForMultipleChoice:
        lengths = tuple(S - i % 5 for i in range(14))
        clean, corrupted = (
            {name: x.unflatten(0, (2, 7)) for name, x in make_batch(14, S, seed, lengths).items()} for seed in (1, 2)
        )
    name = patch(model, clean, corrupted, metric=first_logit).metric
    assert name == "first_logit"

    def alone(out: Any, batch: Any, i: int) -> Tensor:
        out = {name: x for name, x in out.items() if name not in ("hidden_states", "attentions")}
        return first_logit(out, batch)[0]

    wanted = brute_force(model, clean, corrupted, "denoise", alone, gone=gone)
    found = patch(model, clean, corrupted, metric=lambda out, batch: first_logit(out, batch))
    assert_same(found.values.nan_to_num(nan=-9), wanted.nan_to_num(nan=-9), atol=1e-11)  # of sums over the vocabulary
    by_default = patch(model, clean, corrupted, metric=None if cls is BertModel else "kl")
    assert by_default.metric == ("cosine" if cls is BertModel else "kl")
    assert by_default.effect[0].isfinite().all()


def test_cosine_is_of_mean_token_vectors() -> None:
    model, (clean, corrupted) = make(), pair()
    found = patch(model, clean, corrupted)

    def vector(out: Any, batch: Any) -> Tensor:
        real = batch["attention_mask"][..., None]
        return (out.last_hidden_state * real).sum(1) / real.sum(1)

    with torch.no_grad():
        ends = [vector(model(**batch), batch) for batch in (clean, corrupted)]
        assert_same(found.corrupted, F.cosine_similarity(ends[1], ends[0]))
        assert_same(found.clean, torch.ones(2, dtype=F64))
    one = row(corrupted, 0)
    given = contexts(model, row(clean, 0))[1][..., 2 * H : 3 * H]
    patched = vector(run_with(model, one, {1: partial(replaced, j=2, value=given)}), one)
    assert_same(found.values[0, 1, 2], F.cosine_similarity(patched, ends[0][:1])[0])


def test_kl_is_from_the_clean_prediction() -> None:
    model, (clean, corrupted) = classifier(), pair()
    found = patch(model, clean, corrupted, metric="kl")
    with torch.no_grad():
        p, q = (model(**batch).logits.log_softmax(-1) for batch in (clean, corrupted))
    assert_same(found.corrupted, (p.exp() * (p - q)).sum(-1))
    assert_same(found.clean, torch.zeros(2, dtype=F64))


# Sites


@pytest.mark.parametrize("site", ["attention", "feed_forward", "residual"])
@pytest.mark.parametrize("chunk", [0, 4])
def test_sublayers_are_patched_as_by_changed_modules(site: str, chunk: int) -> None:
    """The independent way: a module that returns what it is told to."""
    model = prune_heads(classifier(chunk_size_feed_forward=chunk), PRUNED)
    clean, corrupted = pair()
    found = patch(model, clean, corrupted, site, metric=logits_alone)
    with torch.no_grad():
        given = [x[:, :, 0] for x in read_values(model, clean, site)[1]]
    assert [x.shape for x in given] == [(2, S, N * H)] * (L + (site == "residual"))

    class Told(torch.nn.Module):
        def __init__(self, value: Tensor) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: Tensor) -> Tensor:
            return self.value

    for level in range(L):
        changed = copy.deepcopy(model)
        block = changed.bert.encoder.layer[level]
        block.chunk_size_feed_forward = 0
        if site == "attention":
            block.attention.output.dense = Told(given[level])
        elif site == "feed_forward":
            block.output.dense = Told(given[level])
        else:
            block.output.LayerNorm = Told(given[level + 1])
        with torch.no_grad():
            wanted = logits_alone(changed(**corrupted), corrupted)
        assert_same(found.values[:, level + (site == "residual")], wanted)


def test_values_are_those_that_the_model_computes() -> None:
    model, (clean, _) = prune_heads(classifier(), PRUNED), pair()
    with torch.no_grad():
        out = model(**clean, output_hidden_states=True)
        residual, heads = (read_values(model, clean, name)[1] for name in ("residual", "head"))
    assert_same(torch.stack(residual)[..., 0, :], torch.stack(out.hidden_states), atol=0)
    own = contexts(model, clean)
    assert [x.shape[2] for x in heads] == [2, 0, N]
    for layer in (0, 2):
        assert_same(heads[layer].flatten(-2), own[layer], atol=0)


# Layouts


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto", "packed"])
@pytest.mark.parametrize("site", SITES)
def test_every_backend_gives_the_same(backend: str, site: str) -> None:
    model = prune_heads(classifier(), PRUNED)
    clean, corrupted = pair()
    wanted = patch(model, clean, corrupted, site, metric="kl").values
    by_position = patch(model, clean, corrupted, site, metric="kl", positions=[0, 5, 9]).values
    model.set_attn_implementation(backend)
    assert_same(patch(model, clean, corrupted, site, metric="kl").values.nan_to_num(), wanted.nan_to_num())
    again = patch(model, clean, corrupted, site, metric="kl", positions=[0, 5, 9]).values
    assert_same(again.nan_to_num(), by_position.nan_to_num())


def test_padding_and_the_other_examples_do_not_matter() -> None:
    model, (clean, corrupted) = classifier(), pair()
    whole = patch(model, clean, corrupted, metric="kl")
    cut = [{name: x[1:, :7] for name, x in batch.items()} for batch in (clean, corrupted)]
    assert_same(patch(model, *cut, metric="kl").values, whole.values[1:])


def test_several_batches_are_one() -> None:
    model, (clean, corrupted) = classifier(), pair()
    apart = [[{name: x[i : i + 1] for name, x in batch.items()} for i in range(2)] for batch in (clean, corrupted)]
    whole, parts = patch(model, clean, corrupted, metric="kl"), patch(model, *apart, metric="kl")
    assert_same(parts.values, whole.values)


def test_the_model_is_left_as_found() -> None:
    model, (clean, corrupted) = worn(classifier()), pair()
    with left_as_found(model):
        patch(model, clean, corrupted, metric="kl")
        with pytest.raises(ZeroDivisionError):
            patch(model, clean, corrupted, metric=lambda out, batch: 1 / 0)


# Refusals


def test_what_cannot_be_patched_is_refused(config: Any) -> None:
    model, (clean, corrupted) = classifier(), pair()

    def refused(text: str, *batches: Any, error: Any = ValueError, **options: Any) -> None:
        with pytest.raises(error, match=text):
            patch(options.pop("model", model), *(batches or (clean, corrupted)), **options)

    refused(r"site 'mlp' is unknown; have: head, attention, feed_forward, residual", site="mlp")
    refused("direction 'up' is unknown; have: denoise, noise", direction="up")
    refused("metric 'loss' is unknown; have: logit_difference, kl, cosine, or give a function", metric="loss")
    refused("gives no token vectors; use metric='kl'", metric="cosine")
    refused("there is no position 11: the inputs have 11, 0 to 10", positions=[0, 11])
    refused("there are 1 clean batches and 2 corrupted ones", [clean], [corrupted, corrupted])
    refused(r"clean inputs are \(2, 11\), corrupted ones \(1, 11\)", clean, {k: x[:1] for k, x in corrupted.items()})
    shorter = make_batch(2, S, 3, (11, 6))
    refused(r"row 1 has 7 tokens clean and 6 corrupted.* such as positions=\[0\]", clean, shorter)
    assert patch(model, clean, shorter, positions=[0, 10], metric="kl").values.isfinite().all()
    packed = {"input_ids": torch.arange(1, 12), "cu_seqlens": torch.tensor([0, 7, 11], dtype=torch.int32)}
    refused("batch 0 has cu_seqlens, whose tokens have no rows; give rows", packed, packed)
    refused(r"the metric returned \(2, 6\); expected one number for each of 2", metric=lambda out, batch: out.logits)
    refused("is not a model of bertlite", model=torch.nn.Linear(2, 3), error=TypeError)
    same = {**clean, "labels": torch.tensor([1, 4])}
    refused("example 1 has label 4 clean and corrupted", same, {**corrupted, "labels": torch.tensor([2, 4])})
    answering = make(BertForQuestionAnswering)
    refused("does not give each example the logits of classes", model=answering, metric="logit_difference")
    with pytest.raises(ValueError, match="the same mean metric"):
        _ = patch(model, clean, clean, metric="kl").effect


def test_a_compiled_model_is_refused() -> None:
    model, (clean, corrupted) = classifier(), pair()
    with pytest.raises(ValueError, match=r"the model is compiled.* pass the model from before torch"):
        patch(torch.compile(model), clean, corrupted)


def test_a_module_that_does_not_run_is_an_error() -> None:
    """A layer that computes its projection without calling the module: no hook sees it."""
    model, (clean, corrupted) = classifier(), pair()
    output = model.bert.encoder.layer[1].attention.output
    output.forward = lambda x, residual: output.LayerNorm(F.linear(x, output.dense.weight) + residual)
    with pytest.raises(RuntimeError, match="the head of level 1 was not computed by its module"):
        patch(model, clean, corrupted, metric="kl")
