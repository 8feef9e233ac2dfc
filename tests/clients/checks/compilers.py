"""torch.compile, torch.export, and gradients of each example.

Of torch.func and, in the optional tier, of Opacus, which trains with differential privacy.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.clients.checks import common

COMPILE, EXPORT = "torch.compile", "torch.export"
CLS = "BertForMaskedLM"


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    """Compile the model as one graph; aot_eager traces the backward pass too and needs no C compiler."""
    return torch.compile(model, fullgraph=True, backend="aot_eager", **options)


@common.check(COMPILE, "one graph with attentions", output="output_attentions")
@common.dense_and_pruned(COMPILE, "one graph with hidden states", output="output_hidden_states")
@torch.no_grad()
def whole_graph(side: common.Side, folder: Path, output: str, pruned: bool = False) -> common.Observed:
    model = side.load(CLS, common.tiny(folder, CLS, pruned))
    got = compiled(model)(**common.tiny_batch(), **{output: True})  # first, as a user does it
    wanted = model(**common.tiny_batch(), **{output: True})
    name = output.removeprefix("output_")
    if len(got[name]) != len(wanted[name]) or len(got[name]) < common.SIZES["num_hidden_layers"]:
        raise AssertionError(f"{len(got[name])} {name}, and {len(wanted[name])} without compiling")
    common.equal(dict(got), dict(wanted), what="compiled and plain")
    return {name: got[name], "logits": got.logits}


@common.check(COMPILE, "one graph for every batch and length")
@torch.no_grad()
def dynamic_graph(side: common.Side, folder: Path) -> common.Observed:
    model, graphs = side.load(CLS, common.tiny(folder, CLS)), []

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(model, fullgraph=True, backend=counting, dynamic=True)
    seen = {}
    for rows, length in ((2, 11), (3, 7), (5, 13)):
        batch = common.tiny_batch(rows, length)
        seen[f"{rows}x{length}"] = run(**batch).logits
        common.equal(seen[f"{rows}x{length}"], model(**batch).logits, what="compiled and plain")
    if len(graphs) != 1:
        raise AssertionError(f"{len(graphs)} graphs were made for 3 shapes")
    return seen


@common.dense_and_pruned(COMPILE, "one graph in training with checkpointed layers")
def trained_graph(side: common.Side, folder: Path, pruned: bool = False) -> common.Observed:
    path, batch = common.tiny(folder, CLS, pruned), {**common.tiny_batch(), "labels": common.tiny_batch()["input_ids"]}
    model = side.load(CLS, path).train()
    getattr(model, f"{common.CHECKPOINTING}_enable")()
    loss = compiled(model)(**batch).loss
    loss.backward()
    got = common.gradients(model)
    with common.counted(model) as ran:
        model(**batch).loss.backward()
    if len(ran) != 2 * common.SIZES["num_hidden_layers"]:
        raise AssertionError(f"{len(ran)} layers ran")
    plain = side.load(CLS, path).train()
    plain(**batch).loss.backward()
    wanted = common.gradients(plain)
    common.equal(got, wanted, within=common.ROUNDING32, what="gradients compiled and plain")
    return {"loss": float(loss.detach())}


def dynamic() -> dict[str, Any]:
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=40)
    return {name: {0: batch, 1: length} for name in common.tiny_batch()}


@common.dense_and_pruned(EXPORT, "any batch and length, saved and loaded")
@torch.no_grad()
def exported(side: common.Side, folder: Path, pruned: bool = False) -> common.Observed:
    model = side.load(CLS, common.tiny(folder, CLS, pruned)).eval()
    program = torch.export.export(model, (), common.tiny_batch(), dynamic_shapes=dynamic())
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again, seen = torch.export.load(file).module(), {}
    for rows, length in ((2, 11), (5, 3), (1, 17)):
        batch = common.tiny_batch(rows, length)
        seen[f"{rows}x{length}"] = again(**batch).logits
        common.equal(
            seen[f"{rows}x{length}"], model(**batch).logits, within=common.ROUNDING32, what="exported and plain"
        )
    return seen


# Gradients of each example -------------------------------------------------------------------------------------------

CLASSIFIER = "BertForSequenceClassification"
LABELS = torch.tensor([0, 1, 1, 0])


@common.check("torch.func", "vmap(grad): the gradients of each example")
def mapped_gradients(side: common.Side, folder: Path) -> common.Observed:
    from torch.func import functional_call, grad, vmap

    model = side.load(CLASSIFIER, common.tiny(folder, CLASSIFIER, dtype=torch.float64), dtype=torch.float64).eval()
    side.owns(model)

    def loss(parameters: dict[str, Tensor], example: dict[str, Tensor], label: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (), {name: x[None] for name, x in example.items()}).logits
        return F.cross_entropy(logits, label[None])

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return of_each(model, vmap(grad(loss), in_dims=(None, 0, 0))(parameters, common.tiny_batch(4), LABELS))


@common.dense_and_pruned("Opacus", "per-example gradients of every parameter", "opacus")
def per_example_gradients(side: common.Side, folder: Path, pruned: bool = False) -> common.Observed:
    from opacus import GradSampleModule

    path = common.tiny(folder, CLASSIFIER, pruned, torch.float64)
    model, plain = (side.load(CLASSIFIER, path, dtype=torch.float64).train() for _ in range(2))
    side.owns(model)
    wrapped = GradSampleModule(model)
    F.cross_entropy(wrapped(**common.tiny_batch(4)).logits, LABELS, reduction="mean").backward()
    torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in wrapped.parameters()])  # as Opacus clips them
    return of_each(plain, {name: p.grad_sample for name, p in model.named_parameters()})


def of_each(model: Any, found: dict[str, Tensor]) -> common.Observed:
    """Return the gradients of each example, and raise unless they are those of a model that is given it alone."""
    for row in range(4):
        one = {name: x[row : row + 1] for name, x in common.tiny_batch(4).items()}
        F.cross_entropy(model(**one).logits, LABELS[row : row + 1]).backward()
        common.equal(
            {name: g[row] for name, g in found.items()},
            common.gradients(model),
            common.ROUNDING,
            f"gradients of example {row}",
        )
    return {"gradients": found}
