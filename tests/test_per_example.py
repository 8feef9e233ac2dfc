"""Gradients of each example: torch.func computes them, and Opacus gets positions for each example."""

from typing import Any

import pytest
import torch
from conftest import SIZES, assert_same, make, make_batch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from bertlite import BertForMaskedLM, BertForSequenceClassification, prune_heads

ROWS, LENGTHS = 4, (11, 7, 3, 1)
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # SDPA, on the CPU


def labelled(cls: Any) -> dict[str, Tensor]:
    batch = make_batch(ROWS, lengths=LENGTHS)
    labels = torch.tensor([0, 1, 1, 0])
    return {**batch, "labels": labels if cls is BertForSequenceClassification else batch["input_ids"] % 2}


def loss_of(model: Any) -> Any:
    def loss(parameters: dict[str, Tensor], example: dict[str, Tensor]) -> Tensor:
        batch = {name: x[None] for name, x in example.items()}
        result: Tensor = functional_call(model, parameters, (), batch).loss
        return result

    return loss


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("cls", [BertForSequenceClassification, BertForMaskedLM])
def test_vmap_of_grad_gives_the_gradients_of_each_example(cls: Any, backend: str, mode: str) -> None:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = prune_heads(make(cls, attn_implementation=backend, **quiet), {1: [2]})
    model.train(mode == "train")
    batch = labelled(cls)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    got = vmap(grad(loss_of(model)), in_dims=(None, 0))(parameters, batch)
    for row in range(ROWS):
        model.zero_grad()
        model(**{name: x[row : row + 1] for name, x in batch.items()}).loss.backward()
        for name, p in model.named_parameters():
            wanted = torch.zeros_like(p) if p.grad is None else p.grad
            assert_same({name: got[name][row]}, {name: wanted})


def test_a_packing_backend_says_that_vmap_cannot_run_it() -> None:
    model = make(BertForSequenceClassification, attn_implementation="packed")
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"backend 'packed' cannot run in torch\.func\.vmap, .* use 'auto'"):
        vmap(grad(loss_of(model)), in_dims=(None, 0))(parameters, labelled(BertForSequenceClassification))
    batch = labelled(BertForSequenceClassification)
    one = {name: x[0] for name, x in batch.items()}
    whole = grad(loss_of(model))(parameters, one)  # without vmap it runs
    model(**{name: x[:1] for name, x in batch.items()}).loss.backward()
    assert_same(whole, {name: p.grad for name, p in model.named_parameters()})


def positions_seen(model: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape of the position ids that the embeddings look up, and the output."""
    seen: list[tuple[int, ...]] = []
    table = model.base_model.embeddings.position_embeddings
    hook = table.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    out = model(**make_batch())
    hook.remove()
    [shape] = seen
    return shape, out


@pytest.mark.parametrize("room", ["core", "hf"])
def test_positions_are_those_of_each_example_only_where_opacus_asks(room) -> None:
    model = make(BertForSequenceClassification)
    if room == "hf":
        hf, transformers = pytest.importorskip("bertlite.hf"), pytest.importorskip("transformers")
        state = model.state_dict()
        model = hf.BertForSequenceClassification(transformers.BertConfig(**SIZES)).double().eval()
        model.load_state_dict(state)
    shape, plain = positions_seen(model)
    assert shape == (1, 11)  # what transformers looks up, and adds to every sequence
    for p in model.parameters():
        p.grad_sample = None  # as Opacus marks parameters
    shape, out = positions_seen(model)
    assert shape == (2, 11)
    assert_same(out, plain, atol=0)
    given = torch.arange(11)[None]
    assert_same(model(**make_batch(), position_ids=given), plain, atol=0)
