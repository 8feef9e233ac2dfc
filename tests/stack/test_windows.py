"""Layers that attend within a window: blocks of queries compute what a mask does, in memory as long as the text."""

from typing import Any

import pytest
import torch
from conftest import SIZES, assert_same, randomise_
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bertlite import BertConfig, BertModel
from bertlite.stack import attention

LENGTH = 71  # several blocks of 16, and a rest


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 16)


def make_local(**changes: Any) -> BertModel:
    """Make a random model in float64 whose layers 1 and 2 have windows."""
    fields = {"position_embedding_type": "rotary_local", "local_layers": [1, 2], "local_attention": 3}
    sizes = {**SIZES, "max_position_embeddings": 1 << 14}
    config = BertConfig(**{**sizes, **fields, "position_biased_input": False, **changes})
    return randomise_(BertModel(config)).double().eval()


def batch_of(kind: str) -> dict[str, Tensor]:
    ids = torch.randint(1, SIZES["vocab_size"], (3, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if kind == "right":
        mask[0, 20:], mask[1, 1:] = 0, 0
    elif kind == "left":
        mask[0, :20], mask[1, :-1] = 0, 0
    elif kind == "between":
        mask[0, 20:40] = 0
    elif kind == "nothing":
        mask[1] = 0
    elif kind == "of queries":
        return {"input_ids": ids, "attention_mask": torch.rand(3, LENGTH, LENGTH) > 0.5}
    return {"input_ids": ids} if kind == "none" else {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", ["none", "right", "left", "between", "nothing", "of queries"])
@pytest.mark.parametrize("window", [0, 3, 30, LENGTH])
def test_blocks_compute_what_a_mask_does(kind: str, window: int) -> None:
    model, batch, found = make_local(local_attention=window), batch_of(kind), []
    for name in ("eager", "sdpa", "packed"):
        if name == "packed" and kind in ("between", "of queries"):
            continue
        model.set_attn_implementation(name)
        model.zero_grad()
        out = model(**batch).last_hidden_state
        if name == "packed" and kind != "none":
            out = out.where(batch["attention_mask"][..., None].bool(), found[0][0])  # which are zeros
        real = batch["attention_mask"][..., None] if kind in ("right", "left", "nothing") else 1
        (out * real).sin().sum().backward()
        grads = [x.grad for name, x in model.named_parameters() if x.grad is not None and "pooler" not in name]
        found.append([out.detach(), *grads])
        assert all(x.isfinite().all() for x in found[-1])
    assert len(found[0]) > 30
    for other in found[1:]:
        assert_same(other, found[0], atol=1e-11)


def test_first_tokens_and_packed_sequences_see_their_windows() -> None:
    model, batch = make_local(local_layers=[0, 2]), batch_of("right")
    real, whole = batch["attention_mask"].bool(), model(**batch).last_hidden_state
    assert_same([model(**batch, first_token_only=True).last_hidden_state[:, 0]], [whole[:, 0]])
    ends = torch.tensor([0, *real.sum(1).cumsum(0)], dtype=torch.int32)
    flat = {"input_ids": batch["input_ids"][real], "cu_seqlens": ends}
    assert_same([model(**flat).last_hidden_state], [whole[real]])
    assert_same([model(**flat, first_token_only=True).last_hidden_state], [whole[:, 0]])


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return out


@pytest.mark.parametrize("name", ["sdpa", "packed"])
def test_memory_grows_with_the_length(name: str) -> None:
    model, sizes = make_local(attn_implementation=name).float(), []
    for length in (1024, 2048):
        ids = torch.ones(2, length, dtype=torch.long)
        mask = (torch.arange(length) < torch.tensor([[length], [length - 9]])).long()
        with torch.no_grad(), Largest() as largest:
            model(ids, attention_mask=mask)
        sizes.append(largest.elements)
    assert sizes[1] < 2.2 * sizes[0]
    assert sizes[1] < 2048 * 2048
