"""Libraries read a forward: they trace it, or take its source apart and run it again."""

import ast
import inspect
import sys
import textwrap
from types import MethodType
from typing import Any

import pytest
import torch
from conftest import assert_same
from pairs import CROSS, EVERY_CLASS, F64, inputs_of, only_4, ours_of, present, states_of

from bertlite.hf import modeling, v4


def run_again(module: Any, namespace: dict[str, Any]) -> Any:
    """Return a module's forward, made of its source without decorators, in a copy of a namespace."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(module.forward))))
    [function] = tree.body
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    made = {**namespace, "self": module}
    exec(compile(ast.unparse(tree), "<again>", "exec"), made)
    return MethodType(made["forward"], module)


@EVERY_CLASS
@pytest.mark.parametrize("library", [modeling, v4], ids=["hf", "v4"])
def test_the_source_of_a_model_runs_again_where_its_class_is(library: Any, name: str) -> None:
    torch.manual_seed(0)
    model = getattr(library, name)(ours_of(name).config).to(F64).eval()
    wanted = dict(model(**inputs_of(name)))
    for part in {model, model.base_model}:
        part.forward = run_again(part, vars(sys.modules[type(part).__module__]))
    assert_same(dict(model(**inputs_of(name))), wanted, atol=0)


@pytest.mark.parametrize("changes", [{}, CROSS], ids=["encoder", "decoder"])
def test_the_source_of_every_part_runs_again(changes: dict[str, Any]) -> None:
    model = ours_of("BertForPreTraining", "eager", **changes, **({"use_cache": False} if changes else {}))
    inputs = {**inputs_of(), **(states_of() if changes else {})}
    run = model.bert if changes else model  # which takes an encoder's output
    wanted = dict(run(**inputs))
    parts = [part for part in model.modules() if type(part).__module__.startswith("bertlite")]
    assert len(parts) > 20
    for part in parts:
        part.forward = run_again(part, inspect.unwrap(part.forward).__globals__)
    assert_same(dict(run(**inputs)), wanted)


@only_4
@EVERY_CLASS
@pytest.mark.parametrize("whole", ["", "BertLayer"], ids=["traced", "run whole"])
def test_a_traced_model_equals_the_model(name: str, whole: str) -> None:
    """Its layers too, or cut between its layers, as llm-compressor does."""
    from transformers.utils.fx import HFTracer, symbolic_trace

    class Tracer(HFTracer):
        def is_leaf_module(self, module: Any, name: str) -> bool:
            return type(module).__name__ == whole or super().is_leaf_module(module, name)

    model = ours_of(name, use_cache=False)
    traced = symbolic_trace(model, list(inputs_of(name)), tracer_cls=Tracer)
    layers = [node.op == "call_module" and "encoder.layer" in node.target for node in traced.graph.nodes]
    assert sum(layers) == (3 if whole else 30)
    for length in (11, 7):
        inputs = {key: x[..., :length] for key, x in inputs_of(name).items()}
        assert_same(present(traced(**inputs)), present(model(**inputs)))
