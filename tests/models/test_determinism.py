"""The same twice: bit for bit."""

from collections.abc import Iterator

import pytest
import torch
from conftest import assert_same, make, make_batch

from bertlite import head_importance, prune_heads
from bertlite.models.heads import BertForSequenceClassification


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch raise where an operator is not deterministic, and fill memory with nan: an early read shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("backend", ["eager", "sdpa", "packed", "auto"])
def test_deterministic_algorithms_are_enough_and_repeat(backend):
    """Training and inference, packed too."""
    batch, labels = make_batch(batch=3, length=19, lengths=(19, 3, 7)), torch.tensor([0, 2, 1])
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        model = make(BertForSequenceClassification, num_labels=3, attn_implementation=backend).float().train()
        loss = model(**batch, labels=labels).loss
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        pruned = prune_heads(model.eval(), {0: [1], 2: range(4)})
        scores = head_importance(model, [{**batch, "labels": labels}])
        with torch.no_grad():
            found.append([loss.detach(), *grads, pruned(**batch).logits, scores])
    assert all(x.isfinite().all() for x in found[0])
    assert_same(*found, atol=0)
