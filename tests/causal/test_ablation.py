"""Ablation: equal to hooks written here, and to pruning."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from by_hooks import PRUNED, H, L, N, S, classifier, contexts, replaced, row, run_with  # type: ignore[import-not-found]
from conftest import F64, assert_same, make, make_batch
from left_as_found import left_as_found, worn
from torch import Tensor

from bertlite import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertModel,
    prune_heads,
)
from bertlite.causal import ablate, ablated, mean_contexts

METHODS = ("zero", "mean")


def data(count: int = 5, size: int = 2) -> list[dict[str, Tensor]]:
    """`count` labelled examples of lengths 11 down to 7, in batches of `size`."""
    whole = make_batch(count, S, lengths=tuple(range(S, S - count, -1)))
    whole["labels"] = torch.randint(6, (count,), generator=torch.Generator().manual_seed(5))
    return [{name: x[i : i + size] for name, x in whole.items()} for i in range(0, count, size)]


def others() -> list[dict[str, Tensor]]:
    """A reference: unlabelled, in batches of two widths."""
    return [make_batch(3, S, 8, (11, 9, 6)), make_batch(2, 10, 9, (10, 8))]


def rows(batches: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Each example alone and without its padding."""
    singles = [row(batch, i) for batch in batches for i in range(len(batch["input_ids"]))]
    return [
        {name: x[:, : int(single["attention_mask"].sum())] if x.dim() > 1 else x for name, x in single.items()}
        for single in singles
    ]


def loss_with(model: Any, single: dict[str, Tensor], values: dict[int, dict[int, Tensor]]) -> Tensor:
    """The loss of one example with {layer: {index of the head among those kept: its context, (S or 1, H)}}."""

    def change(x: Tensor, heads: dict[int, Tensor]) -> Tensor:
        for j, value in heads.items():
            x = replaced(x, j, value)
        return x

    return run_with(model, single, {layer: partial(change, heads=heads) for layer, heads in values.items()}).loss


def means(model: Any, reference: list[dict[str, Tensor]]) -> list[Tensor]:
    return [
        torch.cat(parts, 1)[0].mean(0)
        for parts in zip(*(contexts(model, single) for single in rows(reference)), strict=True)
    ]


def table(model: Any, gone: dict[int, list[int]], batches: Any, value: Any) -> Tensor:
    """The increase of every example's loss, (E, L, N), with `value`(example, layer, index) for each head's context."""
    found = torch.full((len(rows(batches)), L, N), torch.nan, dtype=F64)
    for e, single in enumerate(rows(batches)):
        with torch.no_grad():
            whole = model(**single).loss
        for layer in range(L):
            for j, head in enumerate(h for h in range(N) if h not in gone.get(layer, ())):
                found[e, layer, head] = loss_with(model, single, {layer: {j: value(e, layer, j)}}) - whole
    return found


def same(found: Tensor, wanted: Tensor, atol: float = 1e-12) -> None:
    assert_same(found.nan_to_num(nan=-9), wanted.nan_to_num(nan=-9), atol=atol)


# Zeros and means


@pytest.mark.parametrize("gone", [{}, PRUNED], ids=["dense", "pruned"])
def test_means_are_of_the_tokens_of_the_reference(gone: Any) -> None:
    model, batches = prune_heads(classifier(), gone), data()
    own = means(model, others())
    found = ablate(model, batches, "mean", reference=others())
    same(found.increases, table(model, gone, batches, lambda e, layer, j: own[layer][None, j * H : (j + 1) * H]))
    own = means(model, batches)
    same(
        ablate(model, batches).increases,
        table(model, gone, batches, lambda e, layer, j: own[layer][None, j * H : (j + 1) * H]),
    )


@pytest.mark.parametrize(("method", "target"), [("mean", "loss"), ("zero", "kl")])
def test_backends_batches_and_padding_do_not_matter(method: str, target: str) -> None:
    model, options = prune_heads(classifier(), PRUNED), {"target": target}
    wanted = ablate(model, data(), method, **options)
    for backend in ("eager", "sdpa", "packed"):
        model.set_attn_implementation(backend)
        for size in (1, 5):
            found = ablate(model, data(size=size), method, **options)
            same(found.increases, wanted.increases)


def test_padding_on_the_left_stays_apart() -> None:
    model, batches = classifier(), data()
    flipped = [{name: x.flip(1) if x.dim() > 1 else x for name, x in batch.items()} for batch in batches]
    right = [{**batch, "position_ids": torch.arange(S).expand(len(batch["input_ids"]), S)} for batch in batches]
    left = [{**batch, "position_ids": torch.arange(S).flip(0).expand(len(batch["input_ids"]), S)} for batch in flipped]
    metric = {"target": "loss", "loss": lambda out, batch: out.hidden_states[-1].mul(
        batch["attention_mask"][..., None]).sum((1, 2))}  # fmt: skip
    same(ablate(model, left, "mean", **metric).increases, ablate(model, right, "mean", **metric).increases, 1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_examples_without_a_label_do_not_count(method: str) -> None:
    model = make(BertForMaskedLM)
    batch = make_batch(3, S, lengths=(11, 9, 8))
    labels = torch.full((3, S), -100)
    labels[0, 2], labels[2, 4] = 17, 5
    batch["labels"] = labels
    found = ablate(model, [batch], method)
    assert found.losses.isnan().tolist() == [False, True, False]
    assert found.increases[1].isnan().all()
    assert_same(found.increase, found.increases[[0, 2]].mean(0))
    assert_same(found.standard_error, found.increases[[0, 2]].std(0) / 2**0.5)


def test_choices_are_rows_of_one_example() -> None:
    model = make(BertForMultipleChoice)
    batch = {
        name: x.unflatten(0, (2, 7)) for name, x in make_batch(14, S, 1, tuple(S - i % 5 for i in range(14))).items()
    }
    batch["labels"] = torch.tensor([6, 2])
    found = ablate(model, [batch], "zero").increases
    assert found.shape == (2, L, N)

    def change(x: Tensor) -> Tensor:
        return replaced(x, 2, torch.zeros(1, H, dtype=F64))

    before, after = (run_with(model, batch, changes).logits for changes in ({}, {1: change}))
    nll = [-x.log_softmax(-1)[[0, 1], batch["labels"]] for x in (before, after)]
    assert_same(found[:, 1, 2], nll[1] - nll[0])


# For as long as a block lasts


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto", "packed"])
def test_heads_are_ablated_within_a_block(backend: str) -> None:
    model = prune_heads(classifier(), {0: [1]})
    (batch, *_), heads, own = data(), {0: [0, 1], 2: [3]}, means(model, others())
    model.set_attn_implementation(backend)
    with torch.no_grad():
        before = model(**batch).logits
        with ablated(model, heads):
            found = model(**batch).logits
        assert_same(found, prune_heads(model, heads)(**batch).logits)
        assert_same(model(**batch).logits, before, atol=0)
        with ablated(model, heads, mean_contexts(model, others())):
            found = torch.stack([model(**single).loss for single in rows([batch])])
        model.set_attn_implementation("eager")
        values = {0: {0: own[0][None, :H]}, 2: {3: own[2][None, 3 * H : 4 * H]}}
        assert_same(found, torch.stack([loss_with(model, single, values) for single in rows([batch])]))


def test_packed_sequences_are_ablated_by_one_value_for_all() -> None:
    model, (batch, *_) = make(), data()
    del batch["labels"]
    real = batch["attention_mask"].bool()
    packed = {
        "input_ids": batch["input_ids"][real],
        "token_type_ids": batch["token_type_ids"][real],
        "cu_seqlens": torch.tensor([0, 11, 21], dtype=torch.int32),
    }
    contexts_of_all = mean_contexts(model, others())
    with torch.no_grad(), ablated(model, {1: [2]}, contexts_of_all):
        assert_same(model(**packed).last_hidden_state, model(**batch).last_hidden_state[real])


def test_a_block_refuses_what_does_not_fit() -> None:
    model = classifier()
    with pytest.raises(ValueError, match="layer 1 has no head 4"), ablated(model, {1: [4]}):
        pass
    wrong = torch.zeros(L, N, 5)
    with (
        pytest.raises(ValueError, match=r"contexts are \(3, 4, 5\); expected \(3, 4, 12\)"),
        ablated(model, {}, wrong),
    ):
        pass
    pruned = mean_contexts(prune_heads(model, {1: [0]}), others())
    with pytest.raises(ValueError, match="the contexts lack head 0 of layer 1"), ablated(model, {1: [3, 0]}, pruned):
        pass


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"method": "noise"}, "ablation 'noise' is unknown; have: zero, mean"),
        ({"target": "hidden"}, "target 'hidden' is unknown"),
        ({"batches": []}, "there are no batches"),
        ({"reference": []}, "there are no batches"),
        ({"reference": [{**data()[0], "attention_mask": torch.zeros(2, S)}]}, "the reference holds only padding"),
        ({"batches": others()}, "there are no labels"),
        ({"model": BertModel}, "has no loss of its own"),
    ],
)
def test_what_cannot_be_ablated_is_refused(options: dict[str, Any], text: str) -> None:
    model = make(BertModel) if options.pop("model", None) else classifier()
    with pytest.raises(ValueError, match=text):
        ablate(model, options.pop("batches", data()), **options)


def test_means_are_the_same_inside_inference_mode() -> None:
    model = classifier()
    wanted = mean_contexts(model, others())
    with torch.inference_mode():
        found = mean_contexts(model, others())
    assert_same(found.clone(), wanted, atol=0)


def test_the_model_is_left_as_found() -> None:
    model = worn(prune_heads(classifier(), PRUNED))
    with left_as_found(model):
        for method in METHODS:
            ablate(model, data(3, size=3), method)
