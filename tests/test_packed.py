"""Without padding the model computes what it computed with it.

Shapes:  B 5 sequences · S 11 positions · T tokens, of all sequences together
"""

from typing import Any

import pytest
import torch
from conftest import SIZES, assert_same, distance, gradients, make, make_batch
from torch import Tensor, nn

from bertlite import BertModel
from bertlite import packing as packing_module
from bertlite.packing import Packing, grouped

B, S, D, N, L = 5, 11, 48, 4, 3
F64 = torch.float64
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LENGTHS = (11, 3, 7, 1, 10)


def right() -> Tensor:
    return (torch.arange(S) < torch.tensor(LENGTHS)[:, None]).long()


def scattered() -> Tensor:
    return (torch.rand(B, S, generator=torch.Generator().manual_seed(2)) < 0.6).long()


MASKS = {  # (B, S)
    "none": None,
    "full": torch.ones(B, S, dtype=torch.long),
    "right": right(),
    "left": right().flip(1),
    "scattered": scattered(),
    "a row of padding": right() * torch.tensor([1, 0, 1, 1, 1])[:, None],
}
CONTIGUOUS = [name for name in MASKS if name != "scattered"]


def real_of(mask: Tensor | None) -> Tensor:
    return torch.ones(B, S, dtype=torch.bool) if mask is None else mask.bool()


def inputs_of(name: str) -> dict[str, Any]:
    mask = MASKS[name]
    batch: dict[str, Any] = {**make_batch(B, S, lengths=LENGTHS), "attention_mask": mask}
    if name == "left":
        batch["position_ids"] = (right().flip(1).cumsum(-1) - 1).clamp(min=0)
    return batch


def on(model: Any, backend: str) -> Any:
    model.set_attn_implementation(backend)
    return model


def packed_inputs(batch: dict[str, Any]) -> tuple[Packing, dict[str, Any]]:
    """The tokens of a batch, one sequence after another."""
    packing = Packing.of_mask(real_of(batch["attention_mask"]))
    inputs = {k: packing.pack(x) for k, x in batch.items() if k != "attention_mask"}
    return packing, {"position_ids": packing.positions(), **inputs, "cu_seqlens": packing.cu_seqlens}


# Forward


@pytest.mark.parametrize("call", [0, 30, 10**9], ids=["each alone", "some groups", "one group"])
@pytest.mark.parametrize("changes", [{}, {"pruned_heads": {0: [1, 3], 1: [0, 1, 2, 3]}}], ids=["dense", "pruned"])
@pytest.mark.parametrize("mask", MASKS)
def test_packed_is_padded(mask: str, changes: dict[str, Any], call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "CALL", call)
    model, inputs = make(**changes), inputs_of(mask)
    real = real_of(MASKS[mask])
    with torch.no_grad():
        wanted = on(model, "sdpa")(**inputs, output_hidden_states=True)
        got = on(model, "packed")(**inputs, output_hidden_states=True)
    assert_same([x[real] for x in got.hidden_states], [x[real] for x in wanted.hidden_states])
    assert all((x[~real] == 0).all() for x in got.hidden_states)
    assert got.last_hidden_state.shape == (B, S, D)
    begins = real[:, 0]  # with padding there the padded pooler reads padding
    assert_same(got.pooler_output[begins], wanted.pooler_output[begins])


@pytest.mark.parametrize("mask", MASKS)
def test_the_pooler_reads_the_first_token_that_is_not_padding(mask: str, model: BertModel) -> None:
    out = on(model, "packed")(**inputs_of(mask))
    real = real_of(MASKS[mask])
    firsts = torch.stack([x[m][0] if m.any() else x.new_zeros(D) for x, m in zip(out[0], real, strict=True)])
    assert_same(out.pooler_output, model.pooler(firsts[:, None]))


@pytest.mark.parametrize("positions", ["relative_key", "relative_key_query"])
@pytest.mark.parametrize("mask", CONTIGUOUS)
def test_relative_positions_survive_packing(mask: str, positions: str) -> None:
    model, inputs = make(position_embedding_type=positions), inputs_of(mask)
    real = real_of(MASKS[mask])
    wanted, got = on(model, "eager")(**inputs)[0], on(model, "packed")(**inputs)[0]
    assert_same(got[real], wanted[real])


def test_relative_positions_are_not_guessed_where_padding_lies_between() -> None:
    model = on(make(position_embedding_type="relative_key"), "packed")
    with pytest.raises(ValueError, match="padding between the tokens of a sequence shifts relative positions"):
        model(**inputs_of("scattered"))


@pytest.mark.parametrize("mask", MASKS)
def test_tokens_that_come_packed(mask: str, model: BertModel) -> None:
    inputs = inputs_of(mask)
    packing, tokens = packed_inputs(inputs)
    wanted = on(model, "packed")(**inputs, output_hidden_states=True)
    for backend in ("packed", "auto"):
        got = on(model, backend)(**tokens, output_hidden_states=True)
        assert got.last_hidden_state.shape == (packing.tokens, D)
        assert_same([packing.unpack(x) for x in got.hidden_states], wanted.hidden_states)
        assert_same(got.pooler_output, wanted.pooler_output)


def test_packed_positions_are_counted_from_the_start_of_each_sequence(model: BertModel) -> None:
    _, tokens = packed_inputs(inputs_of("right"))
    counted = on(model, "packed")(**tokens)
    assert_same(model(**{**tokens, "position_ids": None}), counted, atol=0)
    embeds = model.get_input_embeddings()(tokens.pop("input_ids"))
    assert_same(model(**tokens, inputs_embeds=embeds), counted, atol=0)


def test_a_sequence_does_not_see_its_batch(model: BertModel) -> None:
    batch = make_batch(B, S, lengths=LENGTHS)
    together = on(model, "packed")(**batch)
    for i, length in enumerate(LENGTHS):
        alone = model(**{k: x[i : i + 1, :length] for k, x in batch.items()})
        assert_same(together.last_hidden_state[i : i + 1, :length], alone.last_hidden_state)
        assert_same(together.pooler_output[i : i + 1], alone.pooler_output)
    order = torch.tensor([3, 0, 4, 2, 1])
    shuffled = model(**{k: x[order] for k, x in batch.items()})
    assert_same(shuffled.last_hidden_state, together.last_hidden_state[order])


@pytest.mark.parametrize(
    "batch",
    [{k: x[:0] for k, x in make_batch().items()}, {**make_batch(), "attention_mask": torch.zeros(2, S).long()}],
    ids=["no rows", "no tokens"],
)
def test_nothing_gives_nothing(batch: dict[str, Tensor]) -> None:
    for model in (make(), make(pruned_heads={1: [0, 1, 2, 3]}), make(position_embedding_type="relative_key")):
        out = on(model, "packed")(**batch)
        rows = batch["input_ids"].shape[0]
        assert out.last_hidden_state.shape == (rows, S, D)
        assert out.pooler_output.shape == (rows, D)
        assert (out.last_hidden_state == 0).all()
        out.last_hidden_state.sum().backward()


GATES = {
    "(N,)": (N,),
    "(L, N)": (L, N),
    "(L, B, N)": (L, B, N),
    "(L, B, N, 1, 1)": (L, B, N, 1, 1),
    "(L, B, N, S, 1)": (L, B, N, S, 1),
}


@pytest.mark.parametrize("shape", GATES.values(), ids=GATES)
@pytest.mark.parametrize("changes", [{}, {"pruned_heads": {0: [1], 2: [0, 1, 2, 3]}}], ids=["dense", "pruned"])
def test_gates_of_every_shape(changes: dict[str, Any], shape: tuple[int, ...]) -> None:
    model, inputs, real = make(**changes), inputs_of("right"), right().bool()
    gate = torch.rand(shape, dtype=F64, generator=torch.Generator().manual_seed(6)) * 2 - 0.5
    wanted, got = (on(model, name)(**inputs, head_mask=gate)[0] for name in ("sdpa", "packed"))
    assert_same(got[real], wanted[real])
    assert distance(got, model(**inputs)[0]) > 1e-2
    first = model(**inputs, head_mask=gate, first_token_only=True)
    assert_same(first.last_hidden_state, got[:, :1])
    if shape in (GATES["(N,)"], GATES["(L, N)"], GATES["(L, B, N)"]):
        packing, tokens = packed_inputs(inputs)
        assert_same(packing.unpack(model(**tokens, head_mask=gate)[0]), got)


# Training


def loss_of(model: Any, inputs: dict[str, Any], real: Tensor) -> Tensor:
    """One that every token and every parameter has a part in, and padding none."""
    out = model(**inputs)
    draw = torch.randn(B, S, D, dtype=F64, generator=torch.Generator().manual_seed(8))
    return (out.last_hidden_state * draw)[real].sum() + out.pooler_output[real[:, 0]].square().sum()


@pytest.mark.parametrize("checkpointing", [None, {}, {"every_n_layers": 2}, {"offload": True}], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"pruned_heads": {0: [1], 1: [0, 1, 2, 3]}}, {"position_embedding_type": "relative_key_query"}],
    ids=["dense", "pruned", "relative"],
)
def test_gradients_are_those_of_the_padded_model(
    changes: dict[str, Any], checkpointing: dict[str, Any] | None
) -> None:
    model, real = make(**OFF, **changes).train(), right().bool()
    wanted = gradients(model, loss_of(on(model, "sdpa"), inputs_of("right"), real))
    if checkpointing is not None:
        model.gradient_checkpointing_enable(**checkpointing)
    got = gradients(model, loss_of(on(model, "packed"), inputs_of("right"), real))
    largest = max(1.0, *(grad.abs().max().item() for grad in wanted.values() if grad.numel()))
    assert_same(got, wanted, atol=1e-12 * largest)  # sums over a whole batch


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_whatever_the_padding(mask: str, model: BertModel) -> None:
    inputs, real = inputs_of(mask), real_of(MASKS[mask])
    wanted, got = (gradients(model, loss_of(on(model, name), inputs, real)) for name in ("sdpa", "packed"))
    largest = max(1.0, *(grad.abs().max().item() for grad in wanted.values() if grad.numel()))
    assert_same(got, wanted, atol=1e-12 * largest)


def test_dropout_is_live_in_training(model: BertModel) -> None:
    model = on(make(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5), "packed")
    inputs = inputs_of("right")
    assert_same(model(**inputs), model(**inputs), atol=0)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(model.train()(**inputs).last_hidden_state)
    assert_same(outs[0], outs[1], atol=0)
    assert distance(outs[0], outs[2]) > 1e-2


def test_checkpointed_is_plain_with_dropout_too() -> None:
    model = on(make(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2).train(), "packed")
    grads = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)
        grads.append(gradients(model, loss_of(model, inputs_of("right"), right().bool())))
    assert_same(*grads, atol=0)


def test_under_autocast_it_attends_in_bfloat16() -> None:
    model, inputs, real = make().float(), inputs_of("right"), right().bool()
    seen: list[torch.dtype] = []
    model.encoder.layer[0].attention.self.register_forward_hook(lambda m, args, out: seen.append(out[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        wanted, got = (on(model, name)(**inputs)[0] for name in ("sdpa", "packed"))
    assert seen == [torch.bfloat16] * 2
    torch.testing.assert_close(got[real], wanted[real], rtol=0, atol=5e-2)  # values of up to 3, rounded at 8e-3


# What cannot be packed is refused


def test_what_packed_cannot_do_is_refused(model: BertModel) -> None:
    inputs = inputs_of("right")
    with pytest.raises(ValueError, match="'packed' cannot give attentions; use 'eager' or 'auto'"):
        on(model, "packed")(**inputs, output_attentions=True)
    for mask in (torch.ones(B, S, S), torch.ones(B, 1, S, S).bool()):
        with pytest.raises(ValueError, match=f"'packed' takes a 2-D attention_mask, not {mask.dim()}-D"):
            model(**{**inputs, "attention_mask": mask})
    with pytest.raises(ValueError, match=r"attention_mask has shape \(5, 10\); expected \(5, 11\)"):
        model(**{**inputs, "attention_mask": torch.ones(B, S - 1)})
    with pytest.raises(ValueError, match=r"holds 0\.5"):
        model(**{**inputs, "attention_mask": torch.full((B, S), 0.5)})
    with pytest.raises(ValueError, match="'packed' cannot run a decoder"):
        make(is_decoder=True, attn_implementation="packed")(**inputs, use_cache=False)


def test_bad_packed_inputs_are_refused_by_name(model: BertModel) -> None:
    ids, ends = torch.ones(7, dtype=torch.long), torch.tensor([0, 3, 7], dtype=torch.int32)
    for inputs, says in (
        ({"input_ids": ids[None]}, r"input_ids has shape \(1, 7\); beside cu_seqlens expected \(tokens,\)"),
        ({"inputs_embeds": torch.ones(7, D - 1)}, r"inputs_embeds has shape \(7, 47\)"),
        ({}, "give either input_ids or inputs_embeds"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 4)}, "attention_mask or cu_seqlens, not both"),
        ({"input_ids": ids, "cu_seqlens": ends.long()}, "cu_seqlens is torch.int64"),
        ({"input_ids": ids, "cu_seqlens": ends[None]}, r"cu_seqlens is torch.int32 of shape \(1, 3\)"),
        ({"input_ids": ids, "cu_seqlens": ends[:2]}, "goes from 0 to 3; it must rise from 0 to the 7 tokens"),
        ({"input_ids": ids, "cu_seqlens": ends[1:]}, "goes from 3 to 7"),
        ({"input_ids": ids, "cu_seqlens": ends[[0, 2, 1, 2]]}, "must rise"),
        ({"input_ids": ids, "token_type_ids": ids[:6]}, r"token_type_ids has shape \(6,\); expected \(7,\)"),
        ({"input_ids": ids, "position_ids": ids * 40}, "position_ids holds 40"),
        ({"input_ids": ids * 97}, "input_ids holds 97"),
        ({"input_ids": torch.ones(41).long(), "cu_seqlens": torch.tensor([0, 41]).int()}, "longest sequence has 41"),
    ):
        with pytest.raises(ValueError, match=says):
            model(**{"cu_seqlens": ends, **inputs})
    with pytest.raises(ValueError, match="backend 'sdpa' cannot take cu_seqlens; use 'packed' or 'auto'"):
        on(model, "sdpa")(input_ids=ids, cu_seqlens=ends)


# Groups


def test_a_new_group_begins_where_padding_costs_more_than_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "CALL", 100)
    order, sizes = grouped((3, 20, 0, 19, 5, 20, 4))
    assert order == [1, 5, 3, 4, 6, 0]  # the empty one is left out
    assert sizes == [3, 3]  # 20² - 19² = 39 is less than a call, 20² - 5² is not
    assert grouped(()) == ([], [])
    assert grouped((0, 0)) == ([], [])


@pytest.mark.parametrize("call", [0, 30, 10**9])
@pytest.mark.parametrize("lengths", [LENGTHS, (4, 4, 4), (9, 9, 2, 2), (0, 5, 0, 1, 5), (1,)])
def test_the_way_to_the_groups_and_back(lengths: tuple[int, ...], call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "CALL", call)
    packing = Packing(lengths, torch.device("cpu"))
    tokens = torch.arange(sum(lengths)) + 100
    groups = packing.groups
    places = groups.spread(tokens)
    assert groups.gather(places).equal(tokens)
    rows = []
    for group in groups.groups:
        block = places[group.places].view(group.sequences, group.length)
        real = torch.ones_like(block).bool() if group.real is None else group.real[:, 0, 0]
        rows += [row[keep] for row, keep in zip(block, real, strict=True)]
    alone = [part for part in tokens.split(list(lengths)) if len(part)]
    order = range(len(alone)) if groups.order is None else groups.order.tolist()
    assert [row.tolist() for row in rows] == [alone[i].tolist() for i in order]


def test_sequences_of_one_length_are_not_moved() -> None:
    groups = Packing((4, 4, 4), torch.device("cpu")).groups
    assert (groups.there, groups.back, groups.order) == (None, None, None)
    assert [group.real for group in groups.groups] == [None]


def test_padding_is_not_computed(model: BertModel) -> None:
    rows: set[int] = set()
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.LayerNorm | nn.Embedding):
            part.register_forward_hook(lambda m, args, out: rows.add(out.shape[0]))
    on(model, "packed")(**inputs_of("right"))
    assert rows == {sum(LENGTHS), B}  # the pooler has B
    assert SIZES["hidden_size"] == D
