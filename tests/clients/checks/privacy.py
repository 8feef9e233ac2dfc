"""Gradients of each example: torch.func and, in the optional tier, Opacus, differentially private training."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.clients.checks.common import (
    ROUNDING,
    Observed,
    Side,
    check,
    dense_and_pruned,
    equal,
    gradients,
    tiny,
    tiny_batch,
)


@check("torch.func", "vmap(grad): the gradients of each example")
def mapped_gradients(side: Side, folder: Path) -> Observed:
    from torch.func import functional_call, grad, vmap

    cls = "BertForSequenceClassification"
    model = side.load(cls, tiny(folder, cls, dtype=torch.float64), dtype=torch.float64).eval()
    side.owns(model)
    batch, labels = tiny_batch(4), torch.tensor([0, 1, 1, 0])

    def loss(parameters: dict[str, Tensor], example: dict[str, Tensor], label: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (), {name: x[None] for name, x in example.items()}).logits
        return F.cross_entropy(logits, label[None])

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    got = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, batch, labels)
    for row in range(4):
        one = {name: x[row : row + 1] for name, x in batch.items()}
        F.cross_entropy(model(**one).logits, labels[row : row + 1]).backward()
        equal({name: g[row] for name, g in got.items()}, gradients(model), ROUNDING, f"gradients of example {row}")
    return {"gradients": got}


@dense_and_pruned("Opacus", "per-example gradients of every parameter", "opacus")
def per_example_gradients(side: Side, folder: Path, pruned: bool = False) -> Observed:
    from opacus import GradSampleModule

    cls = "BertForSequenceClassification"
    path, batch, labels = tiny(folder, cls, pruned, torch.float64), tiny_batch(4), torch.tensor([0, 1, 1, 0])
    model = side.load(cls, path, dtype=torch.float64).train()
    side.owns(model)
    wrapped = GradSampleModule(model)
    F.cross_entropy(wrapped(**batch).logits, labels, reduction="mean").backward()
    torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in wrapped.parameters()])  # as Opacus clips them
    got = {name: p.grad_sample for name, p in model.named_parameters()}
    plain = side.load(cls, path, dtype=torch.float64).train()
    for row in range(4):
        F.cross_entropy(
            plain(**{k: v[row : row + 1] for k, v in batch.items()}).logits, labels[row : row + 1]
        ).backward()
        equal({k: g[row] for k, g in got.items()}, gradients(plain), ROUNDING, f"gradients of example {row}")
    return {"gradients": got}
