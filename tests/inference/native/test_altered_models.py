"""bertlite/inference: a model whose modules are not what its config says runs as it is, or is refused by name.

Each alteration is converted by every backend, unverified, so that the look at the modules is what is tested.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from conftest import distance, make_batch
from natively import SIZES, kernels_or_skip, make_native
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.prune import random_unstructured

from bertlite import BertModel, optimize_for_inference
from bertlite.causal import ablated
from bertlite.inference.native import choice
from bertlite.stack.modules import Activation, BertEncoder, BertLayer

WIDTH = SIZES["hidden_size"]
NONE: tuple[str, ...] = ()
PLAIN = ("auto",)  # which copies what "native" does not run
ALL = (*PLAIN, "native")


class DoubledLayer(BertLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*args, **kwargs)


class BackwardEncoder(BertEncoder):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, *others = super().forward(*args, **kwargs)
        return -x, *others


def put(path: str, make_part: Callable[[Any], Any]) -> Callable[[BertModel], None]:
    """Return what replaces the part at a path."""

    def alter(model: BertModel) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, make_part(model.get_submodule(path)))

    return alter


def on(path: str, change: Callable[[Any], Any]) -> Callable[[BertModel], None]:
    """Return what changes the part at a path in place."""

    def alter(model: BertModel) -> None:
        change(model.get_submodule(path))

    return alter


def turn_into(cls: type[nn.Module]) -> Callable[[nn.Module], None]:
    return lambda part: setattr(part, "__class__", cls)


def linears(part: nn.Module) -> list[nn.Module]:
    return [each for each in part.modules() if isinstance(each, nn.Linear)]


def without_bias(part: Any) -> Any:
    part.bias = None
    return part


def hooked(part: nn.Module) -> None:
    part.register_forward_hook(lambda module, args, out: None)


def doubled(part: nn.Module) -> None:
    part.forward = MethodType(lambda self, x, *rest: 2 * type(self).forward(self, x, *rest), part)  # type: ignore[method-assign]


def transposed(table: Any) -> None:
    table.weight = nn.Parameter(table.weight.detach().T.contiguous().T)


def widen(model: BertModel) -> None:
    layer: Any = model.encoder.layer[1]
    layer.intermediate.dense, layer.output.dense = nn.Linear(WIDTH, 53), nn.Linear(53, WIDTH)


def narrow(model: BertModel) -> None:
    """Leave out a head by hand, so that its number is not what the module says."""
    own: Any = model.encoder.layer[1].attention
    own.self.query, own.self.key, own.self.value = (nn.Linear(WIDTH, 64) for _ in range(3))
    own.output.dense = nn.Linear(64, WIDTH)


class Alteration(NamedTuple):
    alter: Callable[[BertModel], Any]
    runs: tuple[str, ...]  # the backends that run it; the others refuse
    name: str = ""  # of the module that an error names


L = "encoder.layer.1"
QUERY, OUTPUT, DROPOUT = f"{L}.attention.self.query", f"{L}.output.dense", f"{L}.output.dropout"
NORM = f"{L}.output.LayerNorm"
ACT = f"{L}.intermediate.intermediate_act_fn"
ALTERED = {
    "a compiled layer": Alteration(put(L, lambda x: torch.compile(x, backend="eager")), NONE, L),
    "layers in a wrapper of checkpointing": Alteration(
        lambda model: apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, BertLayer)),
        NONE,
        "encoder.layer.0",
    ),
    "a layer of another class": Alteration(on(L, turn_into(DoubledLayer)), NONE, L),
    "another output": Alteration(put(OUTPUT, lambda x: nn.Sequential(x, nn.Tanh())), NONE, OUTPUT),
    "an adapter": Alteration(on(OUTPUT, turn_into(type("Adapter", (nn.Linear,), {}))), NONE, OUTPUT),
    "another dropout": Alteration(put(DROPOUT, lambda x: nn.Tanh()), NONE, DROPOUT),
    "no dropout": Alteration(put(DROPOUT, lambda x: nn.Identity()), ALL),
    "hooks on a layer": Alteration(on(L, hooked), NONE, L),
    "hooks on a matrix": Alteration(on(QUERY, hooked), NONE, QUERY),
    "hooks on the pooler's matrix": Alteration(on("pooler.dense", hooked), NONE, "pooler.dense"),
    "backward hooks": Alteration(on(L, lambda x: x.register_full_backward_hook(print)), NONE, L),
    "a forward of its own": Alteration(on(f"{L}.output", doubled), NONE, f"{L}.output"),
    **{
        f"a forward of the {name}'s own": Alteration(on(name, doubled), NONE, name)
        for name in ("embeddings", "embeddings.LayerNorm", "embeddings.position_embeddings", "pooler", "pooler.dense")
    },
    **{
        f"transposed {name}": Alteration(on(f"embeddings.{name}_embeddings", transposed), ALL)
        for name in ("word", "position", "token_type")
    },
    "embeddings of bounded norm": Alteration(
        on("embeddings.word_embeddings", lambda x: setattr(x, "max_norm", 0.5)), ALL
    ),
    "a mask of torch's pruning": Alteration(on(QUERY, lambda x: random_unstructured(x, "weight", 0.5)), NONE, QUERY),
    "a parametrization": Alteration(
        on(QUERY, lambda x: register_parametrization(x, "weight", nn.Tanh())), NONE, QUERY
    ),
    "ablated heads": Alteration(
        lambda model: ablated(model, {1: [0]}), NONE, "encoder.layer.0.attention.output.dense"
    ),
    "an encoder of another class": Alteration(on("encoder", turn_into(BackwardEncoder)), PLAIN, "encoder"),
    "hooks on the encoder": Alteration(
        on("encoder", lambda x: x.register_forward_hook(lambda module, args, out: (-out[0], *out[1:]))),
        PLAIN,
        "encoder",
    ),
    "another activation": Alteration(put(ACT, lambda x: Activation("relu")), PLAIN, ACT),
    "another eps": Alteration(on(NORM, lambda x: setattr(x, "eps", 0.5)), PLAIN, NORM),
    "RMSNorm": Alteration(put(NORM, lambda x: nn.RMSNorm(WIDTH)), PLAIN, NORM),
    "a norm without bias": Alteration(put(NORM, without_bias), PLAIN, NORM),
    "a norm without weight": Alteration(put(NORM, lambda x: nn.LayerNorm(WIDTH, 1e-12, False)), PLAIN, NORM),
    "keys without bias": Alteration(put(f"{L}.attention.self.key", without_bias), ALL),
    "no biases": Alteration(lambda model: [without_bias(x) for x in linears(model.encoder)], ALL),
    "one layer three times": Alteration(
        lambda model: setattr(model.encoder, "layer", nn.ModuleList([model.encoder.layer[0]] * 3)), ALL
    ),
    "a layer less": Alteration(lambda model: model.encoder.layer.__delitem__(1), ALL),
    "more neurons": Alteration(widen, ALL),
    "fewer heads": Alteration(narrow, PLAIN, QUERY),
}


@pytest.mark.parametrize("backend", ["native", "auto"])
@pytest.mark.parametrize("what", ALTERED)
def test_an_altered_model_runs_as_it_is_or_is_refused_by_name(what, backend, monkeypatch):
    monkeypatch.setattr(choice, "kernels_are_faster", lambda *_: True)  # on any processor
    kernels_or_skip()
    alteration, model, batch = ALTERED[what], make_native().float(), make_batch()
    context = alteration.alter(model)
    if backend not in alteration.runs:
        named = pytest.raises((TypeError, ValueError), match=rf"\b{re.escape(alteration.name)} (is|has) ")
        with named, context if hasattr(context, "__enter__") else nullcontext():
            optimize_for_inference(model, dtype=torch.float32, backend=backend, verify=False)
        return
    quick = optimize_for_inference(model, dtype=torch.float32, backend=backend, verify=False)
    assert quick.backend == ("native" if "native" in alteration.runs else "plain")
    real = batch["attention_mask"].bool()
    with torch.no_grad():  # torch does not compile `forward`
        ours, plain = (each.forward(**batch).last_hidden_state[real] for each in (quick.model, model))
    assert distance(ours, plain) <= 2e-5 * float(plain.abs().max())  # some hundred steps of float32
