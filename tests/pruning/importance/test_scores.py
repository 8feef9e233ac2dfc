"""Scores of heads and neurons: what each criterion is, on every model and backend, and what is left as found."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from conftest import F64, HEADED, assert_same, distance, interrupt, make, make_batch
from left_as_found import left_as_found, worn
from torch import Tensor, nn

from bertlite import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
    head_importance,
    prune_heads,
    prune_neurons,
)
from bertlite.pruning import CRITERIA, NEURON_CRITERIA, neuron_importance, normalise
from bertlite.pruning.importance import measurements
from bertlite.pruning.importance.batches import example_losses, inputs_of
from bertlite.pruning.importance.measurements import ScoringTask, gate_gradients, loss_increases
from bertlite.pruning.importance.structures import HEADS
from bertlite.stack.modules import BertSelfOutput

L, N, H, W, S, V = 3, 4, 12, 37, 11, 97
LANGUAGE = BertForMaskedLM, BertForPreTraining, BertLMHeadModel
ALL = [0, 1, 2, 3]
PRUNED = {0: [1, 3], 1: ALL}
FEW = {0: range(3, W), 1: range(1, W), 2: range(W - 2)}  # neurons that are gone where few are to be scored


def classes(count: int, shape: tuple[int, ...], seed: int = 5) -> Tensor:
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def data(cls: Any = BertForSequenceClassification, count: int = 5, size: int = 2) -> list[dict[str, Tensor]]:
    """`count` examples of lengths 11 down to 7, in batches of `size`, with labels."""
    whole = make_batch(count, S, lengths=tuple(range(S, S - count, -1)))
    if cls is BertForMultipleChoice:
        many = make_batch(count * 7, S, lengths=tuple(S - i % 5 for i in range(count * 7)))
        whole = {name: x.unflatten(0, (count, 7)) for name, x in many.items()}
    with torch.random.fork_rng():  # a new model draws its weights
        given = model_of(cls).label_shapes(tuple(whole["input_ids"].shape)) if cls is not BertModel else {}
    for seed, (name, (*shape, many)) in enumerate(given.items(), start=5):
        labels = classes(7 if "positions" in name else many, tuple(shape), seed)
        if cls in LANGUAGE and name == "labels":  # at two places in three, and none at all for the third example
            labels[2:3] = -100
            labels[classes(3, (count, S), 6) == 0] = -100
        whole[name] = labels.masked_fill(whole["attention_mask"] == 0, -100) if shape == [count, S] else labels
    return [{name: x[i : i + size] for name, x in whole.items()} for i in range(0, count, size)]


def model_of(cls: Any = BertForSequenceClassification, **changes: Any) -> Any:
    labelled = {"num_labels": 6} if cls in (BertForSequenceClassification, BertForTokenClassification) else {}
    return make(cls, **{**labelled, "is_decoder": cls is BertLMHeadModel, **changes})


EVERY = [*HEADED, BertLMHeadModel]


def block_of(model: Any, layer: int) -> Any:
    return model.base_model.encoder.layer[layer]


def gradients_of(model: Any, batches: list[dict[str, Tensor]]) -> Tensor:
    """Return ∂loss/∂gate of every example, (examples, L, N)."""
    return torch.cat([*gate_gradients(ScoringTask(model, HEADS), batches)])


@torch.no_grad()
def numeric_gradient(model: Any, batch: dict[str, Tensor], layer: int, head: int) -> float:
    """∂loss/∂gate by a central difference."""
    step = torch.zeros(L, N, dtype=F64)
    step[layer, head] = 1e-5
    above, below = (model(**batch, head_mask=1 + change).loss for change in (step, -step))
    return float((above - below) / 2e-5)


# What the criteria are


@pytest.mark.parametrize("cls", EVERY)
def test_gradients_are_the_derivatives_of_each_examples_own_loss(cls):
    model, batches = model_of(cls), data(cls)
    gradients = gradients_of(model, batches)
    singles = [single for single in data(cls, size=1) if "labels" not in single or (single["labels"] != -100).any()]
    assert gradients.shape == (len(singles), L, N)
    for i in (0, len(singles) - 1):
        assert gradients[i].abs().max() > 1e-4
        for layer, head in ((0, 1), (1, 3), (2, 0)):
            assert abs(float(gradients[i, layer, head]) - numeric_gradient(model, singles[i], layer, head)) < 1e-8


def test_michel_and_fisher_are_means_of_the_gradients():
    model, batches = model_of(), data()
    gradients = gradients_of(model, batches)
    assert gradients.shape == (5, L, N)
    by_example = head_importance(model, batches)
    assert_same(by_example, gradients.abs().mean(0))
    assert_same(head_importance(model, batches, criterion="fisher"), gradients.square().mean(0))
    of_batches = torch.stack([gradients[:2].mean(0), gradients[2:4].mean(0), gradients[4]])
    assert_same(head_importance(model, batches, reduction="batch"), of_batches.abs().mean(0))
    of_tokens = torch.cat([*gate_gradients(ScoringTask(model, HEADS, "token"), batches)])
    assert len(of_tokens) == sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert_same(of_tokens.sum(0), gradients.sum(0))
    by_token = head_importance(model, batches, reduction="token") * len(of_tokens) / 5
    assert (by_token >= by_example - 1e-12).all(), "no less than by example"
    assert distance(by_token[0], by_example[0]) > 1e-3


@pytest.mark.parametrize("cls", [BertForMaskedLM, BertForPreTraining, BertForTokenClassification, BertLMHeadModel])
def test_labels_of_padding_do_not_count(cls):
    model = model_of(cls)
    labelled = [{**b, "labels": b["labels"].masked_fill(b["attention_mask"] == 0, 3)} for b in data(cls)]
    for name in ("sdpa",) if cls is BertLMHeadModel else ("sdpa", "packed"):
        model.set_attn_implementation(name)
        assert_same(gradients_of(model, labelled), gradients_of(model, data(cls)))


@pytest.mark.parametrize(("target", "reduction"), [("loss", "example"), ("kl", "batch")])
def test_a_gate_is_learned_to_stay_open_only_where_its_unit_matters(target, reduction):
    """Head 2 of layer 1, or neuron 5, has a projection of zeros; without the most important one the loss rises."""
    model, batches = model_of(num_hidden_layers=2, intermediate_size=7), data()
    with torch.no_grad():
        block = model.bert.encoder.layer[1]
        for dense, width, units in ((block.attention.output.dense, H, N), (block.output.dense, 1, 7)):
            dense.weight[:, width:].div_(10)
            dense.weight[:, (units - 2) * width : (units - 1) * width] = 0
            dense.weight[:, :width].mul_(30)
        model.classifier.weight.mul_(10)
    options: dict[str, Any] = {"criterion": "hard_concrete", "target": target, "reduction": reduction}
    if target == "loss":  # which the whole model predicts
        with torch.no_grad():
            batches = [{**b, "labels": model.eval()(**inputs_of(b)).logits.argmax(1)} for b in batches]
    for score, units in ((head_importance, N), (neuron_importance, 7)):
        found = score(model, batches, **options)
        costliest = int(score(model, batches, criterion="leave_one_out", target=target)[1].argmax())
        assert ((found > 0) & (found < 1)).all()
        assert found[1, costliest] > 0.7 > 0.05 > found[1, units - 2]
        assert torch.equal(found, score(model, batches, **options)), "the same seed"
        assert not torch.equal(found, score(model, batches, **options, seed=1))


def test_gates_are_learned_from_the_examples_that_have_labels():
    score, (batch,) = partial(head_importance, model_of(BertForMaskedLM)), data(BertForMaskedLM, size=5)
    without = {**batch, "labels": torch.full((5, S), -100)}
    found = score([batch, without], criterion="hard_concrete")  # half as many steps
    assert found.isfinite().all()
    assert not torch.equal(found, score([batch], criterion="hard_concrete"))
    with pytest.raises(ValueError, match="no example has a label that counts"):
        score([without], criterion="hard_concrete")


def test_a_gate_without_gradient_closes_as_fast_as_the_penalty_says(monkeypatch):
    """Without a penalty and a gradient it stays where it began: P(gate is not 0) at log α = START."""
    silent = model_of()
    for layer in silent.bert.encoder.layer:
        nn.init.zeros_(layer.attention.output.dense.weight)
    monkeypatch.setattr(measurements, "PENALTY", 0.0)
    open_at_first = 1 / (1 + math.exp(-measurements.START) * (0.1 / 1.1) ** (2 / 3))
    found = head_importance(silent, data(), criterion="hard_concrete")
    assert_same(found, torch.full((L, N), open_at_first, dtype=F64))
    # with the penalty's sign alone, each of Adam's steps is of its learning rate
    monkeypatch.setattr(measurements, "PENALTY", 1.0)
    found = head_importance(silent, data(), criterion="hard_concrete")
    assert (found < open_at_first - 0.1).all()
    assert float(found.max() - found.min()) < 1e-9, "what does nothing closes alike"


@pytest.mark.parametrize(
    ("backend", "cls"), [("auto", BertForSequenceClassification), ("packed", BertForTokenClassification)]
)
def test_leave_one_out_computes_once_what_a_head_cannot_change(backend, cls, monkeypatch):
    """It equals one whole forward for each gated head, bit for bit, with fewer runs of the layers below."""
    model, (batch,) = prune_heads(model_of(cls), PRUNED), data(cls, size=5)
    model.set_attn_implementation(backend)
    model.eval()
    runs, forward = [], BertSelfOutput.forward

    def counted(module: BertSelfOutput, *args: Any) -> Tensor:
        runs.extend([1] if args[0].shape[-1] == 2 * H else [])  # of layer 0, which has two heads
        return forward(module, *args)

    monkeypatch.setattr(BertSelfOutput, "forward", counted)
    (increases,) = loss_increases(ScoringTask(model, HEADS), [batch])  # (examples, layers, heads)
    assert len(runs) == 1 + 2, "layer 0 runs for the whole model and for its own two heads"
    neuron_importance(prune_neurons(model, FEW), [batch], criterion="leave_one_out")
    assert len(runs) == 3 + 1 + 3, "and for the whole model and its own three neurons"

    def losses(gate: Tensor) -> Tensor:
        with torch.no_grad():
            return example_losses(model, model(**inputs_of(batch), head_mask=gate), batch)

    whole = losses(torch.ones(L, 5, N))
    for layer, head in ((0, 0), (0, 2), (2, 0), (2, 3)):
        gate = torch.ones(L, 5, N)
        gate[layer, :, head] = 0
        assert torch.equal(increases[:, layer, head], (losses(gate) - whole).double())


def test_confidence_is_a_mean_over_real_tokens():
    model, (batch,) = model_of(), data(size=5)
    with torch.no_grad():
        weights = torch.stack(model.base_model(**inputs_of(batch), output_attentions=True).attentions)
    peaks, lengths = weights.amax(-1), batch["attention_mask"].sum(1).tolist()  # (L, B, N, S)
    rows = [peaks[:, i, :, :length] for i, length in enumerate(lengths)]
    by_example, by_token = torch.stack([x.mean(-1) for x in rows]).mean(0), torch.cat(rows, -1).mean(-1)
    assert_same(head_importance(model, data(), criterion="confidence"), by_example)
    assert_same(head_importance(model, data(), criterion="confidence", reduction="token"), by_token)


def test_magnitude_is_the_norm_of_a_units_columns_and_random_is_random_by_its_seed():
    model = model_of()
    heads, neurons = (score(model, criterion="magnitude") for score in (head_importance, neuron_importance))
    assert_same(heads[2, 1], block_of(model, 2).attention.output.dense.weight[:, H : 2 * H].detach().norm())
    assert_same(neurons[1, 5], block_of(model, 1).output.dense.weight[:, 5].detach().norm())
    one, two, again = (head_importance(model, criterion="random", seed=seed) for seed in (1, 2, 1))
    assert_same(again, one, atol=0)
    assert distance(one, two) > 0.1


# Label-free


def test_fisher_of_kl_is_twice_the_divergence_to_second_order():
    """By every possible label rather than drawn ones: a regression of one number has E g² = (∂y/∂ξ)²."""
    model, (whole,) = make(BertForSequenceClassification, num_labels=1), data(size=5)
    copies = [{name: x.repeat(100, *[1] * (x.dim() - 1)) for name, x in whole.items()}] * 4  # labels are not read
    fisher, gate = head_importance(model, copies, criterion="fisher", target="kl"), torch.ones(L, N, dtype=F64)
    for layer, head in ((0, 1), (1, 2)):
        gate[layer, head] = 1 - 1e-4
        with torch.no_grad():
            moved = model(**inputs_of(whole), head_mask=gate).logits - model(**inputs_of(whole)).logits
        gate[layer, head] = 1
        twice = float((moved / 1e-4).square().mean())
        assert abs(float(fisher[layer, head]) / twice - 1) < 0.15  # 2000 draws of a variable of relative variance 2+


@pytest.mark.parametrize("cls", [BertModel, *EVERY])
def test_without_labels_every_model_is_scored_by_its_own_prediction(cls):
    score = partial(head_importance, model_of(cls), target="kl")
    batches = [{k: x for k, x in b.items() if "label" not in k and "positions" not in k} for b in data(cls)]
    found = michel, fisher, measured = [score(batches, criterion=c) for c in ("michel", "fisher", "leave_one_out")]
    assert torch.stack(found).isfinite().all()
    assert min(michel.abs().max(), fisher.max()) > 1e-6
    assert (measured > 0).all()  # a divergence
    assert measured.max() > 1e-6
    assert_same(fisher, score(data(cls), criterion="fisher"), atol=0)
    assert distance(fisher, score(batches, criterion="fisher", seed=1)) > 1e-9


def test_a_teacher_gives_a_pruned_models_divergence_a_gradient():
    model = model_of()
    score = partial(head_importance, prune_heads(model, {1: [0, 1]}), data(), criterion="leave_one_out", target="kl")
    measured, own = score(teacher=model), score()
    assert measured[1, :2].isnan().all()
    assert (measured < 0).any() or distance(measured[0], own[0]) > 1e-6


def test_a_loss_of_ones_own():
    score = partial(head_importance, model_of(BertModel), data(BertModel))
    assert score(loss=lambda out, batch: out.last_hidden_state[:, 0].sum(-1)).shape == (L, N)
    with pytest.raises(ValueError, match=r"the loss returned \(\); expected one number for each of 2 examples"):
        score(loss=lambda out, batch: out.last_hidden_state.sum())
    with pytest.raises(ValueError, match="it has no gradient"):
        score(loss=lambda out, batch: batch["input_ids"].sum(-1).float())


# Laws


@pytest.mark.parametrize("target", ["loss", "kl"])
@pytest.mark.parametrize("criterion", ["michel", "leave_one_out", "confidence"])  # one of each measurement on data
def test_by_example_the_batch_size_does_not_matter(criterion, target):
    score = partial(head_importance, model_of(), criterion=criterion, target=target)
    trimmed = [
        {k: x[..., : int(b["attention_mask"].sum())] if x.dim() > 1 else x for k, x in b.items()} for b in data(size=1)
    ]
    for batches in (data(), data(size=5), trimmed):
        assert_same(score(batches), score(data(size=1)))


@pytest.mark.parametrize("cls", [BertForSequenceClassification, BertForTokenClassification, BertForMultipleChoice])
@pytest.mark.parametrize("criterion", ["michel", "leave_one_out", "confidence"])  # one of each measurement on data
def test_every_backend_gives_the_same_scores(criterion, cls):
    """Also where the last layer computes [CLS] alone, and where padding is left out."""
    batches, attends = data(cls, size=5), criterion == "confidence"
    model = prune_heads(model_of(cls), PRUNED)
    scores = {}
    for name in ("eager", "sdpa", "auto", "packed"):
        model.set_attn_implementation(name)
        if name == "packed" and attends:
            with pytest.raises(ValueError, match="'packed' cannot give attentions"):
                head_importance(model, batches, criterion=criterion)
            continue
        for reduction in ("example", "token", "batch"):
            if reduction == "token" and criterion == "leave_one_out":
                continue
            found = head_importance(model, batches, criterion=criterion, reduction=reduction).nan_to_num(nan=-1)
            assert_same(found, scores.setdefault(reduction, found))
        if criterion in NEURON_CRITERIA:
            few = prune_neurons(model, FEW)  # criteria that measure every neuron take long
            found = neuron_importance(few, batches, criterion=criterion).nan_to_num(nan=-1)
            assert_same(found, scores.setdefault("neurons", found))


@pytest.mark.parametrize("criterion", CRITERIA)
def test_pruned_units_are_nan_and_the_others_have_their_numbers(criterion, few_steps):
    pruned = prune_neurons(prune_heads(model_of(intermediate_size=7), PRUNED), {0: [3, 6], 2: range(7)})
    scores = head_importance(pruned, data(), criterion=criterion)
    assert scores.isnan().nonzero().tolist() == [[0, 1], [0, 3], *([1, i] for i in ALL)]
    assert (scores.dtype, scores.device.type) == (F64, "cpu")
    if criterion in NEURON_CRITERIA:
        scores = neuron_importance(pruned, data(), criterion=criterion)
        assert scores.isnan().nonzero().tolist() == [[0, 3], [0, 6], *([2, i] for i in range(7))]


def test_a_pruned_model_is_scored_as_the_gated_one():
    """Gradients at heads that stay, with the others gated off."""
    model, batches = model_of(), data()
    scores = head_importance(prune_heads(model, {0: [1, 3]}), batches, criterion="fisher")
    gate, off = torch.ones(L, N, dtype=F64, requires_grad=True), torch.ones(L, N, dtype=F64)
    off[0, [1, 3]] = 0
    losses = [model(**single, head_mask=gate * off).loss for single in data(size=1)]
    wanted = torch.stack([torch.autograd.grad(loss, gate)[0] for loss in losses]).square().mean(0)
    assert_same(scores[0, [0, 2]], wanted[0, [0, 2]])
    assert_same(scores[1:], wanted[1:])


@pytest.mark.parametrize("criterion", ["leave_one_out", "michel"])
def test_a_model_without_any_head_has_only_nan(criterion):
    model = prune_heads(model_of(), dict.fromkeys(range(L), ALL))
    assert head_importance(model, data(), criterion=criterion).isnan().all()


# Left as found


@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_model_is_left_as_found(criterion, few_steps):
    few = {"intermediate_size": 7}  # neurons, since some criteria measure each
    model, teacher = worn(model_of(**few)), worn(model_of(**few))
    options = {} if criterion == "random" else {"target": "kl", "teacher": teacher}
    with left_as_found(model, teacher):
        found = head_importance(model, data(), criterion=criterion)
        if criterion in NEURON_CRITERIA:
            neuron_importance(model, data(size=5), criterion=criterion)
        head_importance(model, data(), criterion=criterion, **options)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, left_as_found(model):
            assert_same(head_importance(model, data(), criterion=criterion), found)


@pytest.mark.parametrize("score", [head_importance, neuron_importance])
@pytest.mark.parametrize("criterion", ["michel", "leave_one_out"])
def test_the_model_is_left_as_found_after_an_error(criterion, score):
    def fails(*args: Any) -> Tensor:
        torch.rand(3)
        return interrupt()

    model = worn(model_of())
    if score is neuron_importance:
        model.classifier.register_forward_hook(fails)
    with left_as_found(model), pytest.raises(KeyboardInterrupt):
        score(model, data(), criterion=criterion, loss=fails)


# Neurons


def test_neurons_by_example_do_not_depend_on_batches_chunks_and_checkpoints():
    alone = neuron_importance(model_of(), data(size=1))
    assert_same(neuron_importance(model_of(), data(size=5)), alone)
    for name in ("sdpa", "packed"):
        other = model_of(chunk_size_feed_forward=4, attn_implementation=name)
        other.gradient_checkpointing_enable()
        assert_same(neuron_importance(other, data(size=2)), alone)
        assert other.is_gradient_checkpointing
        assert block_of(other, 0).chunk_size_feed_forward == 4


NEURON_GONE = {0: [3, 36], 1: [*range(5), *range(7, W)]}  # layer 1 keeps neurons 5 and 6
NEURONS_LEFT = ((0, 0), (0, 35), (1, 5), (1, 6), (2, 36))


@pytest.mark.parametrize(
    ("backend", "cls"),
    [("auto", BertForSequenceClassification), ("sdpa", BertForMultipleChoice), ("packed", BertForTokenClassification)],
)
def test_leave_one_out_is_what_pruning_the_neuron_costs(backend, cls):
    """With a loss by example that the test computes, of models from which the neuron is really removed."""
    model, other = (prune_neurons(model_of(cls, chunk_size_feed_forward=size), NEURON_GONE) for size in (0, 4))
    for each in (model, other):
        each.set_attn_implementation(backend)
    scores, chunked = (
        neuron_importance(each, data(cls, size=5), criterion="leave_one_out") for each in (model, other)
    )
    assert_same(chunked.nan_to_num(-1), scores.nan_to_num(-1))

    @torch.no_grad()
    def loss(model: Any) -> float:
        return float(sum(model(**single).loss for single in data(cls, size=1)) / 5)

    for layer, neuron in NEURONS_LEFT:
        rise = loss(prune_neurons(model, {layer: [neuron]})) - loss(model)
        assert abs(rise) > 1e-9
        assert abs(float(scores[layer, neuron]) - rise) < 1e-12


@pytest.mark.parametrize("criterion", NEURON_CRITERIA)
def test_neurons_of_a_model_in_bfloat16_have_scores(criterion, few_steps):
    model = model_of(intermediate_size=7)
    wanted = neuron_importance(model, data(), criterion=criterion)
    found = neuron_importance(model.bfloat16(), data(), criterion=criterion)
    assert found.isfinite().all()
    if criterion in ("michel", "magnitude"):  # means of one sign: 8 bits leave a few per cent
        assert float((found - wanted).norm() / wanted.norm()) < 0.05


# Normalisers


def test_normalisers():
    scores = torch.tensor([[3.0, 4, torch.nan], [0, 0, 0], [1, 2, 5]], dtype=F64)
    norms = {"none": [1, 1, 1], "layer_l2": [5, 1, 30**0.5], "layer_sum": [7, 1, 8], "minmax": [5, 5, 5]}
    for name, divisors in norms.items():
        wanted = scores / torch.tensor(divisors, dtype=F64)[:, None]
        torch.testing.assert_close(normalise(scores, name), wanted, rtol=0, atol=1e-7, equal_nan=True)
    assert_same(head_importance(model_of(), data(), normaliser="layer_l2").square().sum(1), torch.ones(L, dtype=F64))


# What is refused


@pytest.mark.parametrize(
    ("score", "options", "message"),
    [
        (head_importance, {"criterion": "michael"}, "head criterion 'michael' is unknown; have: michel, fisher"),
        (head_importance, {"reduction": "sentence"}, "head reduction 'sentence' is unknown; have: example, token, b"),
        (head_importance, {"target": "logits"}, "target 'logits' is unknown"),
        (head_importance, {"normaliser": "l2"}, "normaliser 'l2' is unknown; have: none, layer_l2"),
        (head_importance, {"criterion": "leave_one_out", "reduction": "token"}, "no parts by token"),
        (head_importance, {"teacher": model_of()}, "target is 'loss'"),
        (head_importance, {"target": "kl", "loss": lambda out, batch: out.logits.sum(-1)}, "leave one of them out"),
        (neuron_importance, {"reduction": "token"}, "neuron reduction 'token' is unknown; have: example, batch"),
        (neuron_importance, {"criterion": "confidence"}, "'confidence' does not score neurons: it is computed"),
    ],
)
def test_what_means_nothing_is_refused_before_any_work(score, options, message):
    model = model_of()
    model.register_forward_pre_hook(lambda *args: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        score(model, data(), **options)
    with pytest.raises(TypeError, match="Linear is not a model of bertlite"):
        score(nn.Linear(3, 4), data())


(WHOLE,) = data(size=5)
NO_DATA: list[tuple[Any, str]] = [
    ([{"labels": torch.zeros(2)}], "batch 0 has no input_ids or inputs_embeds; it has labels"),
    ([WHOLE, []], "batch 1 is a list"),
    (WHOLE, r"this is one batch, not a list of batches: pass \[batch\]"),
    (3, "batches is of type int; give a list of batches"),
    ([{**WHOLE, "cu_seqlens": torch.arange(3)}], "batch 0 has cu_seqlens, whose tokens have no rows; give rows"),
    ([{"input_ids": [[1]]}], r"input_ids is a list; make it a tensor, as in torch.tensor\(input_ids\)"),
    ([WHOLE, {name: x[:0] for name, x in WHOLE.items()}], "batch 1 has no example"),
]


@pytest.mark.parametrize("criterion", ["michel", "leave_one_out", "confidence"])
@pytest.mark.parametrize(("batches", "message"), NO_DATA)
def test_what_holds_no_data_is_refused(criterion, batches, message):
    with pytest.raises((TypeError, ValueError), match=message):
        head_importance(model_of(), batches, criterion=criterion)


LABELS = [
    (BertForSequenceClassification, {"labels": classes(6, (5, 11))}, "batch 0: labels is torch.int64 of shape"),
    (BertForSequenceClassification, {"labels": 6 + 0 * WHOLE["labels"]}, "0: labels holds 6; the classes are 0 to 5"),
    (BertForSequenceClassification, {"labels": None}, "batch 0: there are no labels; label the data, or take"),
    (BertForTokenClassification, {"labels": classes(6, (5,))}, "batch 0: labels is torch.int64 of shape"),
    (BertForMaskedLM, {"labels": torch.full((5, 11), V)}, "batch 0: labels holds 97"),
    (BertForQuestionAnswering, {"end_positions": None}, "there are no end_positions"),
    (BertForPreTraining, {"next_sentence_label": torch.full((5,), 2)}, "next_sentence_label holds 2"),
    (BertForMultipleChoice, {"labels": torch.full((5,), 7)}, "labels holds 7; the classes are 0 to 6"),
    (BertForNextSentencePrediction, {"labels": torch.rand(5)}, "labels is torch.float32"),
    (BertForMaskedLM, {"labels": torch.full((5, 11), -100)}, "no example has a label that counts"),
    (BertModel, {}, "BertModel has no loss of its own; pass loss= or target='kl'"),
]


@pytest.mark.parametrize(("cls", "labels", "message"), LABELS)
def test_labels_that_do_not_fit_are_refused(cls, labels, message):
    (batch,) = data(cls, size=5)
    model, runs = model_of(cls), list[int]()
    model.register_forward_pre_hook(lambda *args: runs.append(1))
    with pytest.raises(ValueError, match=message):
        head_importance(model, [{**batch, **labels}])
    assert not runs or "no example" in message


@pytest.mark.parametrize("criterion", ["fisher", "leave_one_out"])
def test_a_teacher_of_another_task_is_refused(criterion):
    for teacher in (model_of(num_labels=3), model_of(BertModel)):
        with pytest.raises(ValueError, match=r"predict \[\(2, 1, \d+\)\] and \[\(2, 1, 6\)\] values"):
            head_importance(model_of(), data(), criterion=criterion, target="kl", teacher=teacher)


def test_an_example_of_padding_has_no_confidence():
    model, batches = model_of(), data()
    mask = torch.zeros_like(batches[0]["attention_mask"])
    scores = head_importance(model, [*batches, {**batches[0], "attention_mask": mask}], criterion="confidence")
    assert_same(scores, head_importance(model, batches, criterion="confidence"))
