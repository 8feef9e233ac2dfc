"""The task heads: their losses, ties and keys; tests/hf compares their logits and losses with transformers'."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import F64, HEADED, LABELS, NONE, assert_same, distance, inputs_of, labels_of, make, make_batch, words
from torch import Tensor, nn

from bertlite import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    prune_heads,
)

B, S, D, V = 2, 11, 48, 97
TIED = [BertForMaskedLM, BertForPreTraining]
WITH_LABELS = (BertForSequenceClassification, BertForTokenClassification)


def build(cls: Any, **changes: Any) -> Any:
    return make(cls, **({"num_labels": LABELS} if cls in WITH_LABELS else {}), **changes)


# Logits


@pytest.mark.parametrize("cls", HEADED)
def test_a_head_passes_everything_on_to_bert(cls):
    model, inputs = build(cls), inputs_of(cls.__name__)
    gate = torch.linspace(-0.5, 1.5, 12, dtype=F64).view(3, 4)
    asked = {"output_hidden_states": True, "output_attentions": True}
    flat = {name: x.flatten(0, -2) for name, x in inputs.items()}
    positions = torch.arange(S).flip(0).expand(inputs["input_ids"].shape)
    body = model.bert(**flat, position_ids=positions.flatten(0, -2), head_mask=gate, **asked)
    out = model(**inputs, position_ids=positions, head_mask=gate, **asked)
    assert_same(out.hidden_states, body.hidden_states, atol=0)
    assert_same(out.attentions, body.attentions, atol=0)
    for name in ("position_ids", "head_mask", "token_type_ids", "attention_mask"):
        fewer = {**inputs, "position_ids": positions, "head_mask": gate}
        del fewer[name]
        assert distance(model(**fewer)[0], out[0]) > 1e-3, name
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    rest = {k: x for k, x in inputs.items() if k != "input_ids"}
    assert_same(dict(model(**rest, inputs_embeds=embeds).items()), dict(model(**inputs).items()), atol=0)


@pytest.mark.parametrize("cls", HEADED)
def test_what_a_head_says_of_itself_is_true(cls):
    ids = inputs_of(cls.__name__)["input_ids"]
    first = next(iter(build(cls).label_shapes(tuple(ids.shape)).values()))
    assert (first[:2] == (B, S)) == cls.needs_tokens
    assert (ids.dim() == 3) == cls.takes_choices
    assert (first[-1] == LABELS) == cls.own_labels


def test_multiple_choice_needs_an_axis_of_choices():
    model = build(BertForMultipleChoice)
    with pytest.raises(ValueError, match="input_ids has shape \\(2, 11\\); expected \\(batch, choices, length\\)"):
        model(**make_batch())
    with pytest.raises(ValueError, match=r"inputs_embeds .* expected \(batch, choices, length, hidden_size\)"):
        model(inputs_embeds=torch.zeros(B, S, D, dtype=F64))


def test_question_answering_has_two_labels():
    with pytest.raises(ValueError, match="num_labels is 6; question answering has 2"):
        build(BertForQuestionAnswering, num_labels=LABELS)


# Losses


@pytest.mark.parametrize("cls", HEADED)
def test_labels_of_int32_or_with_strides_are_the_same_labels(cls):
    model, inputs, labels = build(cls), inputs_of(cls.__name__), labels_of(cls.__name__)
    wanted = model(**inputs, **labels).loss
    strided = {k: torch.stack([x, x], -1)[..., 0] for k, x in labels.items()}
    assert not any(x.is_contiguous() for x in strided.values())
    assert_same(model(**inputs, **strided).loss, wanted, atol=0)
    assert_same(model(**inputs, **{k: x.int() for k, x in labels.items()}).loss, wanted, atol=0)


def sequence_model(**changes: Any) -> Any:
    return make(BertForSequenceClassification, **changes)


SEVERAL = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]], dtype=F64)
SAME_LABELS: list[tuple[dict[str, Any], Tensor, Tensor]] = [
    ({"num_labels": 1}, torch.tensor([[3], [-1]]), torch.tensor([3.0, -1.0], dtype=F64)),  # numbers, not classes
    ({"problem_type": "multi_label_classification"}, SEVERAL.long(), SEVERAL),  # integers too, once it is named
    ({"problem_type": "single_label_classification"}, torch.tensor([[5], [NONE]]), torch.tensor([5, NONE])),
]


@pytest.mark.parametrize(("changes", "labels", "others"), SAME_LABELS)
def test_labels_of_a_sequence_may_be_integers_or_a_column(changes, labels, others):
    """The loss of each kind is transformers' in tests/hf/test_hf_losses.py."""
    model = sequence_model(**{"num_labels": LABELS, **changes})
    assert_same(model(**make_batch(), labels=labels).loss, model(**make_batch(), labels=others).loss, atol=0)


def test_one_named_class_is_not_regression():
    model = sequence_model(num_labels=1, problem_type="single_label_classification")
    assert model(**make_batch(), labels=torch.tensor([0, 0])).loss == 0
    with pytest.raises(ValueError, match="labels holds 1"):
        model(**make_batch(), labels=torch.tensor([0, 1]))


def test_the_labels_of_one_batch_do_not_decide_for_the_next():
    model = sequence_model(num_labels=LABELS)
    before = model.config
    many = torch.zeros(B, LABELS, dtype=F64)
    losses = [model(**make_batch(), labels=y).loss for y in (torch.tensor([5, 0]), many, torch.tensor([5, 0]))]
    assert_same(losses[2], losses[0], atol=0)
    assert distance(losses[1], losses[0]) > 1e-2
    assert model.config is before
    assert model.config.problem_type is None


def test_there_is_a_loss_only_with_both_kinds_of_labels():
    for cls in (BertForPreTraining, BertForQuestionAnswering):
        model = build(cls)
        assert all(model(**make_batch(), **{name: x}).loss is None for name, x in labels_of(cls.__name__).items())
        assert model(**make_batch(), **labels_of(cls.__name__)).loss is not None


@pytest.mark.parametrize(
    ("starts", "ends", "counted"),
    [([3, 11], [50, 4], [[3, NONE], [NONE, 4]]), ([-1, 5], [-1, 6], [[0, 5], [0, 6]])],
    ids=["past the end", "negative"],
)
def test_answers_past_the_end_do_not_count_and_a_negative_one_is_the_first_token(starts, ends, counted):
    model, given = build(BertForQuestionAnswering), torch.tensor([starts, ends])
    for start, end in (given, given[..., None]):
        out = model(**make_batch(), start_positions=start, end_positions=end)
        logits = torch.stack([out.start_logits, out.end_logits])
        losses = [nn.functional.cross_entropy(*each) for each in zip(logits, torch.tensor(counted), strict=True)]
        assert_same(out.loss, sum(losses) / 2)


REFUSED: list[tuple[Any, dict[str, Tensor], str]] = [
    (BertForMaskedLM, {"labels": torch.full((B, S), V)}, "labels holds 97; the classes are 0 to 96, and -100"),
    (BertForMaskedLM, {"labels": torch.full((B, S), -1)}, "labels holds -1"),
    (BertForMaskedLM, {"labels": torch.zeros(B, S - 1).long()}, "int64 of shape \\(2, 10\\); .* shape \\(2, 11\\)"),
    (BertForMaskedLM, {"labels": torch.zeros(B, S)}, "labels is torch.float32"),
    (BertForTokenClassification, {"labels": torch.zeros(B).long()}, "shape \\(2,\\); expected .* \\(2, 11\\)"),
    (BertForTokenClassification, {"labels": torch.zeros(S, B).long()}, "shape \\(11, 2\\)"),
    (BertForMultipleChoice, {"labels": torch.tensor([7, 0])}, "labels holds 7; the classes are 0 to 6"),
    (BertForSequenceClassification, {"labels": torch.tensor([1, 2, 3])}, "shape \\(3,\\); expected .* \\(2,\\)"),
    (BertForSequenceClassification, {"labels": torch.ones(B)}, "multi_label_classification takes \\(2, 6\\)"),
    (BertForSequenceClassification, {"labels": torch.ones(LABELS, B)}, "shape \\(6, 2\\); multi_label"),
    (BertForPreTraining, {"labels": words(), "next_sentence_label": torch.tensor([0, 2])}, "sentence_label holds 2"),
    (
        BertForQuestionAnswering,
        {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([1, 2, 3])},
        "end_positions is torch.int64 of shape \\(3,\\); expected class indices of shape \\(2,\\)",
    ),
]


@pytest.mark.parametrize(
    ("cls", "labels", "says"), REFUSED, ids=[f"{c.__name__}-{says[:24]}" for c, _, says in REFUSED]
)
def test_a_label_that_cannot_be_is_refused(cls, labels, says):
    with pytest.raises(ValueError, match=says):
        build(cls)(**inputs_of(cls.__name__), **labels)


# Outputs


@pytest.mark.parametrize("cls", HEADED)
def test_an_empty_batch_has_empty_logits(cls):
    model, inputs = build(cls), inputs_of(cls.__name__)
    full, empty = model(**inputs), model(**{k: x[:0] for k, x in inputs.items()})
    assert {name: x.shape for name, x in empty.items()} == {name: (0, *x.shape[1:]) for name, x in full.items()}


# Ties


def is_tied(model: Any) -> bool:
    head = model.cls.predictions
    return (
        head.decoder.weight is model.bert.embeddings.word_embeddings.weight
        and head.bias is head.decoder.bias
        and model.get_output_embeddings() is head.decoder
    )


def tied(model: Any) -> Any:
    model.tie_weights()
    return model


def with_words(model: Any, part: str = "") -> Any:
    model.get_submodule(part).set_input_embeddings(nn.Embedding(V, D, dtype=F64))
    return model


def with_state(model: Any, **options: Any) -> Any:
    model.load_state_dict(make(type(model)).state_dict(), **options)
    return model


STILL_TIED: dict[str, Callable[[Any], Any]] = {
    "made": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "half": lambda model: model.half(),
    "set_input_embeddings": with_words,
    "set_input_embeddings of bert": lambda model: tied(with_words(model, "bert")),
    "prune_heads": lambda model: prune_heads(model, {0: [1]}),
    "load_state_dict": with_state,
    "load_state_dict-assign": lambda model: tied(with_state(model, assign=True)),
    "a step of an optimizer": lambda model: one_step(model),
}


def one_step(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(**make_batch(), **labels_of(type(model).__name__)).loss.backward()
    optimizer.step()
    return model


@pytest.mark.parametrize("cls", TIED)
@pytest.mark.parametrize("how", STILL_TIED)
def test_the_decoder_is_the_word_embeddings(how, cls):
    model = STILL_TIED[how](build(cls))
    assert is_tied(model)
    assert model.config is model.base_model.config
    names = {name for name, _ in model.named_parameters()}
    assert "cls.predictions.decoder.weight" not in names
    assert "cls.predictions.decoder.weight" in model.state_dict()
    before = model(**make_batch())[0].detach()
    with torch.no_grad():
        model.get_input_embeddings().weight[5] += 1  # a word that the batch does not hold
    assert not (make_batch()["input_ids"] == 5).any()
    after = model(**make_batch())[0].detach()
    changed = (after != before).flatten(0, 1).any(0)
    assert changed.nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("cls", TIED)
def test_an_untied_decoder_is_its_own(cls):
    model = build(cls, tie_word_embeddings=False)
    assert model.cls.predictions.decoder.weight is not model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.bias is model.cls.predictions.decoder.bias
    other = nn.Embedding(V, D, dtype=F64)
    model.set_input_embeddings(other)
    assert model.cls.predictions.decoder.weight is not other.weight
    assert "cls.predictions.decoder.weight" in dict(model.named_parameters())
