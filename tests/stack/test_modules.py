"""The stack against BERT written out once more, as plainly as it can be.

Letters are those of conftest.py.
"""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from conftest import F64, SIZES, assert_same, distance, full_outputs, gradients, make, make_batch, randomise_
from torch import Tensor, nn

from bertlite import BertConfig, BertModel
from bertlite.activations import ACTIVATIONS, Activation, activation
from bertlite.checkpoint.skeleton import init_weights
from bertlite.config import POSITIONS, RELATIVE
from bertlite.stack.modules import BertEmbeddings, linear

N, H, L = 4, 12, 3


def norm(x: Tensor, w: Mapping[str, Tensor], name: str, eps: float) -> Tensor:
    spread = (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / (spread + eps).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def dense(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def head_written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kind: str, table: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One head of one sequence, query by query and key by key: (S, H) x 3, (S,) -> context (S, H), weights (S, S)."""
    length = len(q)
    weights = torch.zeros(length, length, dtype=F64)
    for i in range(length):
        for j in range(length):
            score = q[i] @ k[j]
            if kind == "bucketed":  # a number for each distance up to 7; 8 to 10 share one, and later keys have others
                score = score + math.sqrt(H) * table[min(abs(i - j), 8) + (16 if i < j else 0)]
            elif table is not None:  # row P - 1 is distance 0
                to = table[i - j + SIZES["max_position_embeddings"] - 1]
                score = score + q[i] @ to + (k[j] @ to if kind == "relative_key_query" else 0)
            weights[i, j] = score / math.sqrt(H) if mask[j] else -math.inf
        weights[i] = weights[i].exp() / weights[i].exp().sum()
    return weights @ v, weights


def bert_written_out(config: BertConfig, w: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """All that a BertModel returns, one sequence at a time, from its state dict."""
    eps, kind = config.layer_norm_eps, config.position_embedding_type
    all_states, all_weights, pooled = [], [], []
    for ids, types, mask in zip(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"], strict=True):
        e = "embeddings"
        x = w[f"{e}.word_embeddings.weight"][ids] + w[f"{e}.token_type_embeddings.weight"][types]
        if kind in ("absolute", "bucketed"):
            x = x + w[f"{e}.position_embeddings.weight"][: len(ids)]
        states, weights = [norm(x, w, f"{e}.LayerNorm", eps)], []
        for i in range(config.num_hidden_layers):
            x, a = states[-1], f"encoder.layer.{i}.attention"
            q, k, v = (dense(x, w, f"{a}.self.{part}").split(H, -1) for part in ("query", "key", "value"))
            table = w.get(f"{a}.self.distance_embedding.weight")
            tables = table.T if kind == "bucketed" else [table] * N
            heads = [head_written_out(q[h], k[h], v[h], mask, kind, tables[h]) for h in range(N)]
            weights.append(torch.stack([each for _, each in heads]))
            context = torch.cat([each for each, _ in heads], -1)
            x = norm(dense(context, w, f"{a}.output.dense") + x, w, f"{a}.output.LayerNorm", eps)
            wide = gelu(dense(x, w, f"encoder.layer.{i}.intermediate.dense"))
            narrow = dense(wide, w, f"encoder.layer.{i}.output.dense")
            states.append(norm(narrow + x, w, f"encoder.layer.{i}.output.LayerNorm", eps))
        all_states.append(torch.stack(states))
        all_weights.append(torch.stack(weights))
        pooled.append(torch.tanh(dense(states[-1][0], w, "pooler.dense")))
    hidden = torch.stack(all_states, 1)  # (L + 1, B, S, D)
    return {
        "last_hidden_state": hidden[-1],
        "pooler_output": torch.stack(pooled),
        "hidden_states": tuple(hidden),
        "attentions": tuple(torch.stack(all_weights, 1)),
    }


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_BertModel_is_BERT_written_out(
    positions: str, backend: str, batch: dict[str, Tensor], kernels_run: list[str]
) -> None:
    model = make(position_embedding_type=positions, attn_implementation=backend)
    wanted = bert_written_out(model.config, model.state_dict(), batch)
    real = batch["attention_mask"].bool()
    got = full_outputs(model, batch)
    assert kernels_run == [backend] * L
    assert_same(dict(got.items()), wanted)
    with torch.no_grad():
        assert_same(model(**batch).last_hidden_state[real], wanted["last_hidden_state"][real])


@pytest.mark.parametrize("positions", RELATIVE)
def test_relative_positions_know_only_distances(positions: str) -> None:
    model = make(position_embedding_type=positions)
    batch = make_batch(lengths=(11, 11))
    later = full_outputs(model, batch, position_ids=torch.arange(11) + 29)
    assert_same(later, full_outputs(model, batch))
    model.embeddings.position_embeddings.weight.data.fill_(float("nan"))  # present in checkpoints, read by none
    assert_same(full_outputs(model, batch), later)


def test_relative_positions_can_be_trained(batch: dict[str, Tensor]) -> None:
    slopes = {}
    for backend in ("eager", "sdpa"):
        model = make(position_embedding_type="relative_key_query", attn_implementation=backend)
        slopes[backend] = gradients(model, model(**batch).last_hidden_state.square().mean())
    tables = {name: grad for name, grad in slopes["eager"].items() if "distance_embedding" in name}
    assert len(tables) == L
    reached = SIZES["max_position_embeddings"] - 1 + torch.arange(-10, 11)  # the distances within 11 positions
    for grad in tables.values():
        assert grad.abs().sum(-1).nonzero().flatten().equal(reached)
    assert_same(slopes["sdpa"], slopes["eager"])


# Feed-forward


@pytest.mark.parametrize("chunk", [1, 4, 11, 50])
def test_feed_forward_in_chunks_is_feed_forward(chunk: int, batch: dict[str, Tensor]) -> None:
    """4 does not divide 11: the last chunk is shorter."""
    model = make(chunk_size_feed_forward=chunk)
    lengths: list[int] = []
    model.encoder.layer[0].intermediate.register_forward_hook(lambda m, args, out: lengths.append(out.shape[1]))
    whole = make()
    out, wanted = model(**batch, output_hidden_states=True), whole(**batch, output_hidden_states=True)
    assert lengths == [chunk] * (11 // chunk) + [11 % chunk] * (11 % chunk > 0)
    assert_same(out, wanted)
    loss, wanted_loss = (each.last_hidden_state.square().mean() for each in (out, wanted))
    assert_same(gradients(model, loss), gradients(whole, wanted_loss))


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


@pytest.mark.parametrize("name", ["gelu_new", "relu", "prelu"])
def test_the_model_uses_the_activation_it_names(name: str, batch: dict[str, Tensor]) -> None:
    model = make(hidden_act=name)
    seen: list[tuple[Tensor, Tensor]] = []
    act = model.encoder.layer[1].intermediate.intermediate_act_fn
    act.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    out = model(**batch)
    ((x, y),) = seen
    assert_same(y, activation(name).double().eval()(x) if isinstance(act, Activation) else act(x))
    assert out.last_hidden_state.isfinite().all()
    extra = set(model.state_dict()) - set(make().state_dict())
    assert bool(extra) == (name == "prelu")


# Parts


def test_the_padding_token_keeps_the_vector_it_was_loaded_with_and_no_gradient() -> None:
    model = make()
    batch = make_batch()
    batch["input_ids"][0, 3] = 0
    padding = model.embeddings.word_embeddings.weight[0]
    assert padding.abs().max() > 0.1
    out = model(**batch)
    moved = make()
    moved.embeddings.word_embeddings.weight.data[0] *= -1
    assert distance(moved(**batch).last_hidden_state, out.last_hidden_state) > 1e-2
    grad = gradients(model, out.last_hidden_state.square().mean())["embeddings.word_embeddings.weight"]
    assert (grad[0] == 0).all()
    assert (grad[batch["input_ids"][0, 0]] != 0).any()


def test_without_a_padding_token_every_row_learns() -> None:
    model = make(pad_token_id=None)
    batch = make_batch()
    batch["input_ids"][0, 3] = 0
    grad = gradients(model, model(**batch).last_hidden_state.square().mean())["embeddings.word_embeddings.weight"]
    assert (grad[0] != 0).any()


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
    assert (BertModel(config).embeddings.word_embeddings.weight[0] == 0).all()
    assert (BertModel(config).embeddings.word_embeddings.weight[1] != 0).all()


def test_initialising_a_part_leaves_the_rest() -> None:
    model = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    init_weights(model.pooler, model.config)
    changed = {k for k, v in model.state_dict().items() if not v.equal(before[k])}
    assert changed == {"pooler.dense.weight", "pooler.dense.bias"}


def test_building_a_model_makes_no_buffer_and_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    model = BertModel(BertConfig(**SIZES, pruned_heads={1: [0, 1, 2, 3]}))
    assert not list(model.buffers())
    assert not [w for w in recwarn if "zero-element" in str(w.message)]
    with pytest.warns(UserWarning, match="zero-element"):  # what nn.Linear says of itself
        nn.Linear(0, 3)
    assert linear(0, 3).weight.shape == (3, 0)


def test_embeddings_place_tokens_by_position_ids() -> None:
    embeddings = randomise_(BertEmbeddings(BertConfig(**SIZES))).double().eval()
    ids = torch.tensor([[5, 5, 5]])
    row = embeddings(ids)[0]
    assert distance(row[0], row[2]) > 1e-2
    assert_same(embeddings(ids, position_ids=torch.tensor([[2, 1, 0]]))[0], row.flip(0))
    assert_same(embeddings(inputs_embeds=embeddings.word_embeddings(ids))[0], row)


def test_dropout_is_where_BERT_has_it(batch: dict[str, Tensor]) -> None:
    """After the embeddings, and after each projection before its residual; none in the pooler."""
    parts = ("attention.self", "attention.output", "output")
    assert {name for name, part in make().named_modules() if isinstance(part, nn.Dropout)} == {
        "embeddings.dropout",
        *(f"encoder.layer.{i}.{part}.dropout" for i in range(L) for part in parts),
    }
    model = make(hidden_dropout_prob=1.0, attention_probs_dropout_prob=0.0).train()
    out = model(**batch, output_hidden_states=True)
    assert (out.hidden_states[0] == 0).all()
    x = torch.zeros(2, 11, 48, dtype=F64)
    for layer in model.encoder.layer:
        x = layer.output.LayerNorm(layer.attention.output.LayerNorm(x))
    assert_same(out.last_hidden_state, x)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "packed", "cu_seqlens", "inputs_embeds"])
def test_positions_that_skip_padding_begin_with_the_first_token_wherever_padding_lies(backend: str) -> None:
    name = backend if backend in ("eager", "sdpa", "packed") else "auto"
    model = make(positions_skip_padding=True, pad_token_id=1, attn_implementation=name)
    ids = torch.randint(2, SIZES["vocab_size"], (3, 11))
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, 7:] = mask[1, :2] = 0
    ids[mask == 0] = 1
    real = mask.bool()
    with torch.no_grad():
        alone = torch.cat([model(input_ids=ids[i : i + 1, real[i]]).last_hidden_state[0] for i in range(3)])
        if backend == "cu_seqlens":
            ends = torch.tensor([0, *mask.sum(1).cumsum(0)], dtype=torch.int32)
            got = model(input_ids=ids[real], cu_seqlens=ends).last_hidden_state
        elif backend == "inputs_embeds":  # which do not say what is padding: they are counted from 0
            embeds = model.get_input_embeddings()(ids[2:])
            got, alone = model(inputs_embeds=embeds).last_hidden_state[0], alone[-11:]
        else:
            got = model(input_ids=ids, attention_mask=mask).last_hidden_state[real]
    assert_same(got, alone)
