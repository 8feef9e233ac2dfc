"""Patching and ablation: equal to hooks written here on other modules, and to pruning, on every backend and padding.

Shapes:  L 3 layers · S 11 positions · N 4 heads · H 12 head dim
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from conftest import EXACT, F64, HEADED, assert_same, distance, make, make_batch
from left_as_found import left_as_found, worn
from torch import Tensor
from torch.nn import functional as F

from bertlite import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    kept_heads,
    prune_heads,
)
from bertlite.causal import SITES, ablate, ablated, mean_contexts, patch, read_values

L, N, H, S = 3, 4, 12, 11
PRUNED = {0: [1, 3], 1: [0, 1, 2, 3]}


def classifier(**changes: Any) -> Any:
    return make(BertForSequenceClassification, num_labels=6, **changes)


def row(batch: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
    return {name: x[i : i + 1] for name, x in batch.items()}


@torch.no_grad()
def run_with(
    model: Any, batch: Mapping[str, Tensor], changes: Mapping[int, Callable[[Tensor], Any]], **options: Any
) -> Any:
    """Run a model whose attention gives other contexts, (B, S, kept·H), in some layers; None changes nothing."""
    with ExitStack() as stack:
        for layer, change in changes.items():
            block = model.base_model.encoder.layer[layer].attention.self

            def hook(module: Any, args: Any, out: Any, change: Any = change) -> Any:
                new = change(out[0].clone())
                return None if new is None else (new, *out[1:])

            stack.enter_context(block.register_forward_hook(hook))
        return model(**batch, **options)


def contexts(model: Any, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the context of every layer, (B, S, kept·H)."""
    found: list[Tensor] = []
    run_with(model, batch, dict.fromkeys(range(L), found.append))
    return found


def replaced(x: Tensor, j: int, value: Tensor, column: Any = slice(None)) -> Tensor:
    """Return a context in which head j, among those kept, has this value (S or 1, H) at some positions."""
    new = x.clone()
    new[:, column, j * H : (j + 1) * H] = value
    return new


def pair(rows: int = 2, lengths: tuple[int, ...] = (11, 7)) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two batches of the same lengths and other words."""
    return make_batch(rows, S, 1, lengths), make_batch(rows, S, 2, lengths)


def every_number(out: Any, batch: Any) -> Tensor:
    """A metric of one's own: it weighs every number that the model gives."""
    parts = [x for x in out.values() if isinstance(x, Tensor) and x.is_floating_point()]
    examples = len(batch["input_ids"])
    weights = [torch.linspace(-1, 1, x[0].numel(), dtype=x.dtype) for x in parts]
    return sum((x.reshape(len(x), -1) * w).reshape(examples, -1).sum(1) for x, w in zip(parts, weights, strict=True))


def same(found: Tensor, wanted: Tensor, atol: float = EXACT) -> None:
    assert_same(found.nan_to_num(nan=-9), wanted.nan_to_num(nan=-9), atol)


def brute_force(
    model: Any, clean: Any, corrupted: Any, direction: str, metric: Any, positions: Any = (slice(None),)
) -> Tensor:
    """The metric of every patched run: (B, L, N, P), nan where a head is pruned."""
    rows = []
    for i in range(len(clean["input_ids"])):
        one, other = row(clean, i), row(corrupted, i)
        source, base = (one, other) if direction == "denoise" else (other, one)
        given = contexts(model, source)
        table = torch.full((L, N, len(positions)), torch.nan, dtype=F64)
        for layer in range(L):
            for j, head in enumerate(kept_heads(model.config, layer)):
                for c, column in enumerate(positions):
                    value = given[layer][:, column, j * H : (j + 1) * H]
                    change = partial(replaced, j=j, value=value, column=column)
                    table[layer, head, c] = metric(run_with(model, base, {layer: change}), base, i)
        rows.append(table)
    return torch.stack(rows)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("gone", [{}, PRUNED], ids=["dense", "pruned"])
def test_heads_are_patched_as_by_hooks_on_the_attention_modules(direction: str, gone: Any) -> None:
    model = prune_heads(classifier(), gone)
    clean, corrupted = pair()
    clean["labels"], corrupted["labels"] = torch.tensor([1, 4]), torch.tensor([2, 0])

    def difference(out: Any, batch: Any, i: int) -> Tensor:
        return out.logits[0, clean["labels"][i]] - out.logits[0, corrupted["labels"][i]]

    found, positions = patch(model, clean, corrupted, direction=direction), [0, 3, 8, 6]
    wanted = brute_force(model, clean, corrupted, direction, difference)[..., 0]
    assert found.metric == "logit_difference"
    same(found.values, wanted)
    assert found.values[:, 2].isfinite().all()
    for end, batch in (("clean", clean), ("corrupted", corrupted)):
        out, rows = run_with(model, batch, {}), range(2)
        whole = out.logits[rows, clean["labels"]] - out.logits[rows, corrupted["labels"]]
        assert_same(getattr(found, end), whole)
    base, other = (found.corrupted, found.clean) if direction == "denoise" else (found.clean, found.corrupted)
    share = (wanted.mean(0) - base.mean()) / (other.mean() - base.mean())
    same(found.effect, share, 1e-10)
    assert distance(found.values[:, 2, 0], base) > 1e-4
    apart = patch(model, clean, corrupted, direction=direction, positions=positions)
    same(apart.values, brute_force(model, clean, corrupted, direction, difference, positions))
    assert_same(apart.values[1, 2, :, 2], base[1].expand(N))  # position 8 is padding there
    assert apart.effect.shape == (L, N, 4)


@pytest.mark.parametrize("cls", [BertModel, *HEADED], ids=lambda cls: cls.__name__)
def test_every_model_is_patched(cls: Any) -> None:
    """Each head's effect is that of a hook on the module that reads it; metrics of every kind of model."""
    model = prune_heads(make(cls), {1: [2]})
    clean, corrupted = pair()
    if cls is BertForMultipleChoice:
        lengths = tuple(S - i % 5 for i in range(14))
        clean, corrupted = (
            {name: x.unflatten(0, (2, 7)) for name, x in make_batch(14, S, seed, lengths).items()} for seed in (1, 2)
        )
    found = patch(model, clean, corrupted, metric=every_number)
    assert found.metric == "every_number"
    wanted = brute_force(model, clean, corrupted, "denoise", lambda out, batch, i: every_number(out, batch)[0])
    same(found.values, wanted[..., 0], 1e-11)  # of sums over the vocabulary
    by_default = patch(model, clean, corrupted, metric=None if cls is BertModel else "kl")
    assert by_default.metric == ("cosine" if cls is BertModel else "kl")
    assert by_default.effect[0].isfinite().all()


def test_cosine_is_of_mean_token_vectors_and_kl_from_the_clean_prediction() -> None:
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
    found = patch(classifier(), clean, corrupted, metric="kl")
    with torch.no_grad():
        p, q = (classifier()(**batch).logits.log_softmax(-1) for batch in (clean, corrupted))
    assert_same(found.corrupted, (p.exp() * (p - q)).sum(-1))
    assert_same(found.clean, torch.zeros(2, dtype=F64))


# Sites


MODULES = {"attention": "attention.output.dense", "feed_forward": "output.dense", "residual": "output.LayerNorm"}


@pytest.mark.parametrize("site", MODULES)
@pytest.mark.parametrize("chunk", [0, 4])
def test_sublayers_are_patched_as_by_hooks_on_modules(site: str, chunk: int) -> None:
    model = prune_heads(classifier(chunk_size_feed_forward=chunk), PRUNED)
    clean, corrupted = pair()
    found = patch(model, clean, corrupted, site, metric=every_number)
    with torch.no_grad():
        given = [x[:, :, 0] for x in read_values(model, clean, site)[1]]
    assert [x.shape for x in given] == [(2, S, N * H)] * (L + (site == "residual"))
    if site == "residual" and not chunk:  # else they round otherwise
        assert_same(given, run_with(model, clean, {}, output_hidden_states=True).hidden_states, atol=0)
    for level, value in enumerate(given[-L:]):
        changed = copy.deepcopy(model)
        block = changed.bert.encoder.layer[level]
        block.chunk_size_feed_forward = 0
        block.get_submodule(MODULES[site]).register_forward_hook(lambda *_, value=value: value)
        with torch.no_grad():
            wanted = every_number(changed(**corrupted), corrupted)
        assert_same(found.values[:, level + (site == "residual")], wanted)


# Layouts


@pytest.mark.parametrize("backend", ["eager", "sdpa", "packed"])
@pytest.mark.parametrize("site", SITES)
def test_every_backend_gives_the_same(backend: str, site: str) -> None:
    """As auto does."""
    model, other = (prune_heads(classifier(attn_implementation=name), PRUNED) for name in ("auto", backend))
    for positions in (None, [0, 5, 9]):
        options = {"metric": "kl", "positions": positions}
        wanted, found = (patch(each, *pair(), site, **options).values for each in (model, other))
        same(found, wanted)


def test_padding_batches_and_the_other_examples_do_not_matter() -> None:
    model, (clean, corrupted) = classifier(), pair()
    whole = patch(model, clean, corrupted, metric="kl").values
    cut = [{name: x[1:, :7] for name, x in batch.items()} for batch in (clean, corrupted)]
    assert_same(patch(model, *cut, metric="kl").values, whole[1:])
    apart = [[row(batch, i) for i in range(2)] for batch in (clean, corrupted)]
    assert_same(patch(model, *apart, metric="kl").values, whole)


def test_the_model_is_left_as_found() -> None:
    model, (clean, corrupted) = worn(classifier()), pair()
    with left_as_found(model):
        patch(model, clean, corrupted, metric="kl")
        with pytest.raises(ZeroDivisionError):
            patch(model, clean, corrupted, metric=lambda out, batch: 1 / 0)
        for method in METHODS:
            ablate(model, data(3, size=3), method)
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]  # its values of two levels differ, and none is changed
    assert_same(read_values(model.eval(), clean, "feed_forward")[0].logits, model(**clean).logits)


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
    refused(r"the model is compiled.* pass the model from before torch", model=torch.compile(model))
    same = {**clean, "labels": torch.tensor([1, 4])}
    refused("example 1 has label 4 clean and corrupted", same, {**corrupted, "labels": torch.tensor([2, 4])})
    answering = make(BertForQuestionAnswering)
    refused("does not give each example the logits of classes", model=answering, metric="logit_difference")
    with pytest.raises(ValueError, match="the same mean metric"):
        _ = patch(model, clean, clean, metric="kl").effect
    output = model.bert.encoder.layer[1].attention.output  # that computes without its module: no hook sees it
    output.forward = lambda x, residual: output.LayerNorm(F.linear(x, output.dense.weight) + residual)
    refused("the head of level 1 was not computed by its module", error=RuntimeError, metric="kl")


# Ablation

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
    lengths = [int(single["attention_mask"].sum()) for single in singles]
    return [
        {name: x[:, :n] if x.dim() > 1 else x for name, x in each.items()}
        for each, n in zip(singles, lengths, strict=True)
    ]


def means(model: Any, reference: list[dict[str, Tensor]]) -> list[Tensor]:
    found = [contexts(model, single) for single in rows(reference)]
    return [torch.cat(parts, 1)[0].mean(0) for parts in zip(*found, strict=True)]


# Zeros and means


@pytest.mark.parametrize("gone", [{}, PRUNED], ids=["dense", "pruned"])
def test_means_are_of_the_tokens_of_the_reference(gone: Any) -> None:
    model, batches = prune_heads(classifier(), gone), data()
    for reference, options in ((others(), {"reference": others()}), (batches, {})):
        own, wanted = means(model, reference), torch.full((5, L, N), torch.nan, dtype=F64)
        for (e, single), layer in product(enumerate(rows(batches)), range(L)):
            for j, head in enumerate(kept_heads(model.config, layer)):
                mean = partial(replaced, j=j, value=own[layer][None, j * H : (j + 1) * H])
                losses = [run_with(model, single, change).loss for change in ({layer: mean}, {})]
                wanted[e, layer, head] = losses[0] - losses[1]
        same(ablate(model, batches, **options).increases, wanted)


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
    model, found, at = classifier(), [], torch.arange(S)
    metric = lambda out, batch: out.hidden_states[-1].mul(batch["attention_mask"][..., None]).sum((1, 2))  # noqa: E731
    for flip in (False, True):
        batches = [{name: x.flip(1) if flip and x.dim() > 1 else x for name, x in batch.items()} for batch in data()]
        positions = at.flip(0) if flip else at
        given = [{**batch, "position_ids": positions.expand(len(batch["input_ids"]), S)} for batch in batches]
        found.append(ablate(model, given, "mean", target="loss", loss=metric).increases)
    same(found[0], found[1], 1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_examples_without_a_label_do_not_count(method: str) -> None:
    model = make(BertForMaskedLM)
    labels = torch.full((3, S), -100)
    labels[0, 2], labels[2, 4] = 17, 5
    found = ablate(model, [{**make_batch(3, S, lengths=(11, 9, 8)), "labels": labels}], method)
    assert found.losses.isnan().tolist() == [False, True, False]
    assert found.increases[1].isnan().all()
    assert_same(found.increase, found.increases[[0, 2]].mean(0))
    assert_same(found.standard_error, found.increases[[0, 2]].std(0) / 2**0.5)


def test_choices_are_rows_of_one_example() -> None:
    model, lengths = make(BertForMultipleChoice), tuple(S - i % 5 for i in range(14))
    batch = {name: x.unflatten(0, (2, 7)) for name, x in make_batch(14, S, 1, lengths).items()}
    batch["labels"] = torch.tensor([6, 2])
    found = ablate(model, [batch], "zero").increases
    assert found.shape == (2, L, N)
    change = partial(replaced, j=2, value=torch.zeros(1, H, dtype=F64))
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
        means_of = {
            layer: partial(replaced, j=j, value=own[layer][None, j * H :][:, :H]) for layer, j in ((0, 0), (2, 3))
        }
        assert_same(found, torch.stack([run_with(model, single, means_of).loss for single in rows([batch])]))


def test_packed_sequences_are_ablated_by_one_value_for_all() -> None:
    model, (batch, *_) = make(), data()
    del batch["labels"]
    real, ends = batch["attention_mask"].bool(), torch.tensor([0, 11, 21], dtype=torch.int32)
    packed = {name: batch[name][real] for name in ("input_ids", "token_type_ids")}
    with torch.no_grad(), ablated(model, {1: [2]}, mean_contexts(model, others())):
        assert_same(model(**packed, cu_seqlens=ends).last_hidden_state, model(**batch).last_hidden_state[real])


def test_a_block_refuses_what_does_not_fit() -> None:
    model = classifier()
    pruned = mean_contexts(prune_heads(model, {1: [0]}), others())
    for text, *given in (
        ("layer 1 has no head 4", {1: [4]}),
        (r"contexts are \(3, 4, 5\); expected \(3, 4, 12\)", {}, torch.zeros(L, N, 5)),
        ("the contexts lack head 0 of layer 1", {1: [3, 0]}, pruned),
    ):
        with pytest.raises(ValueError, match=text), ablated(model, *given):
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
    with torch.inference_mode():
        found = mean_contexts(model, others()).clone()
    assert_same(found, mean_contexts(model, others()), atol=0)
