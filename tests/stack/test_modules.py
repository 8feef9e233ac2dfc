"""The parts of the stack; tests/parity compares what they give together with transformers, 4.57.6 and installed."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import F64, SIZES, assert_same, distance, make, make_batch
from torch import Tensor, nn

from bertlite import BertConfig, BertModel
from bertlite.stack.modules import activation, linear
from bertlite.support.activations import ACTIVATIONS

L = 3


# Feed-forward


@pytest.mark.parametrize("chunk", [1, 4, 11, 50])
def test_feed_forward_in_chunks_is_feed_forward(chunk: int, batch: dict[str, Tensor]) -> None:
    """4 does not divide 11: the last chunk is shorter."""
    model = make(chunk_size_feed_forward=chunk)
    lengths: list[int] = []
    model.encoder.layer[0].intermediate.register_forward_hook(lambda m, args, out: lengths.append(out.shape[1]))
    out, wanted = (each(**batch, output_hidden_states=True) for each in (model, make()))
    assert lengths == [chunk] * (11 // chunk) + [11 % chunk] * (11 % chunk > 0)
    assert_same(out, wanted)


# Activations


def grid() -> Tensor:
    return torch.cat([torch.linspace(-30, 30, 1201, dtype=F64), torch.tensor([-1e-9, -0.0, 1e-9, 1e-3], dtype=F64)])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_transformers_own(name: str) -> None:
    theirs = pytest.importorskip("transformers.activations").ACT2FN
    if name not in theirs:
        pytest.skip(f"this transformers has no {name}")
    ours, reference = activation(name).double(), theirs[name]
    if isinstance(reference, nn.Module):
        reference = reference.double()
    x = grid().requires_grad_()
    y, wanted = ours(x), reference(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), x)
    assert_same(y, wanted)
    assert_same(slope, wanted_slope)


def test_every_hidden_act_of_transformers_is_here() -> None:
    theirs = pytest.importorskip("transformers.activations").ACT2FN
    assert set(theirs) - set(ACTIVATIONS) == {"xielu"}
    assert set(ACTIVATIONS) - set(theirs) <= {"hardswish", "sqrtsoftplus"}  # which 4.57 lacks


def test_an_activation_with_parameters_has_transformers_keys() -> None:
    theirs = pytest.importorskip("transformers.activations").ACT2FN["prelu"]
    ours = activation("prelu")
    wanted = {key: (value.shape, value.dtype, value.float().tolist()) for key, value in theirs.state_dict().items()}
    assert wanted
    assert {k: (v.shape, v.dtype, v.float().tolist()) for k, v in ours.state_dict().items()} == wanted


def test_the_model_uses_an_activation_with_parameters(batch: dict[str, Tensor]) -> None:
    """Others are cases of parity."""
    model = make(hidden_act="prelu")
    seen: list[tuple[Tensor, Tensor]] = []
    act = model.encoder.layer[1].intermediate.intermediate_act_fn
    act.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    assert model(**batch).last_hidden_state.isfinite().all()
    ((x, y),) = seen
    assert_same(y, nn.functional.prelu(x, act.weight))
    assert len(set(model.state_dict()) - set(make().state_dict())) == L


# Parts


@pytest.mark.parametrize("padding", [0, None])
def test_the_padding_token_keeps_the_vector_it_was_loaded_with_and_no_gradient(padding: int | None) -> None:
    """Without a padding token every row learns."""
    model, batch, outs = make(pad_token_id=padding), make_batch(), []
    batch["input_ids"][0, 3] = 0
    words = model.embeddings.word_embeddings.weight
    for _ in range(2):
        outs.append(model(**batch).last_hidden_state)
        (grad,) = torch.autograd.grad(outs[-1].square().mean(), words)
        assert (grad[0] != 0).any() == (padding is None)
        assert (grad[batch["input_ids"][0, 0]] != 0).any()
        words.data[0] *= -1
    assert distance(*outs) > 1e-2


def test_a_new_model_is_initialised_as_BERT_is() -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=501, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    for name, p in BertModel(config).named_parameters():
        if name.endswith("LayerNorm.weight"):
            assert (p == 1).all(), name
        elif name.endswith("bias"):
            assert (p == 0).all(), name
        else:
            spread = p.std().item()  # of n draws: 0.02 · (1 ± 1 / √2n)
            assert abs(spread / 0.02 - 1) < 5 / math.sqrt(2 * p.numel()) + 1 / p.shape[0], (name, spread)
    words = BertModel(replace(config, pad_token_id=3)).embeddings.word_embeddings.weight
    assert (words == 0).all(1).nonzero().tolist() == [[3]]


def test_building_a_model_makes_no_buffer_and_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    model = BertModel(BertConfig(**SIZES, pruned_heads={1: [0, 1, 2, 3]}))
    assert not list(model.buffers())
    assert not [w for w in recwarn if "zero-element" in str(w.message)]
    with pytest.warns(UserWarning, match="zero-element"):  # what nn.Linear says of itself
        nn.Linear(0, 3)
    assert linear(0, 3).weight.shape == (3, 0)


@torch.no_grad()
def test_positions_that_skip_padding_are_counted_in_packed_tokens_and_embeddings_too() -> None:
    model = make(positions_skip_padding=True, pad_token_id=1)
    texts = [torch.randint(2, SIZES["vocab_size"], (length,)) for length in (6, 5, 11)]
    alone = [model(input_ids=text[None]).last_hidden_state[0] for text in texts]
    ends = torch.tensor([0, 6, 11, 22], dtype=torch.int32)
    assert_same(model(input_ids=torch.cat(texts), cu_seqlens=ends).last_hidden_state, torch.cat(alone))
    embeds = model.get_input_embeddings()(texts[2][None])  # which do not say what is padding: they are counted from 0
    assert_same(model(inputs_embeds=embeds).last_hidden_state[0], alone[2])
