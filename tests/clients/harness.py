"""Helpers of this folder's tests: every check runs with bertlite's classes and with transformers'."""

import re
from pathlib import Path
from typing import Any

import pytest

from bertlite.hf.compat import CACHE
from tests.clients.checks.common import (
    CHECKS,
    OURS,
    ROUNDING,
    ROUNDING32,
    STOCK,
    V5,
    MissingError,
    Side,
    equal,
    first_line,
)

# What stock cannot do, and what it says.  Where it does a thing wrong in silence, it is the check that speaks.
UNLOADABLE = "RuntimeError: You set `ignore_mismatched_sizes` to `False`"  # a pruned checkpoint, in transformers 5
GRAPH = "Unsupported: "  # a graph break
STACK = "RuntimeError: stack expects each tensor to be equal size"  # one gradient of the positions for all examples
EACH = {name: STACK for name in CHECKS if CHECKS[name].client == "Opacus"}
EACH["mapped_gradients"] = "RuntimeError: vmap: It looks like you're either"  # it looks at the mask's values
UNTIED = (
    "AttributeError: .* has no attribute 'all_tied_weights_keys'"  # post_init makes it; 4 needs init_weights alone
)
WEIGHED = "AssertionError: loss is .* for the same 8 rows in one"  # accumulated batches: 5 adds means, 4 averages
STOCK_FAILS = {
    5: {
        **EACH,
        **{
            name: UNLOADABLE
            for name in CHECKS
            if name.endswith("-pruned") or name in ("loads_pruned", "fresh_process")
        },
        **{name: WEIGHED for name in CHECKS if name.startswith(("accumulation", "trainer_ddp"))},
        "whole_graph-output_attentions": GRAPH,
        "whole_graph-output_hidden_states": GRAPH,
        "trained_graph": GRAPH,
        "loads_relative": "AssertionError: the model and bertlite's core differ by",
        "attentions": "AssertionError: 0 attentions of 3 layers",
        "head_mask": "AssertionError: head_mask changed nothing",
        "prune_heads": "AttributeError: .* has no attribute 'prune_heads'",
        "mask_3d": "RuntimeError: expand",
        **dict.fromkeys(("colbert", "simcse"), UNTIED),
        "bottlenecks": "AttributeError: 'tuple' object has no attribute 'shape'",  # layers return no tuples
        **({"prefixes": "ValueError: Model does not support past key values"} if CACHE == "cache" else {}),  # PEFT
    },
    4: {
        **EACH,
        "accumulation-BertForTokenClassification": WEIGHED,
        "accumulation-BertForMaskedLM": WEIGHED,
        "trainer_ddp-BertForMaskedLM": WEIGHED,
        "lora_checkpointed": "AssertionError: checkpointed and plain training differ by",
        "whole_graph-output_attentions": GRAPH,
        "tensor_parallel": "RuntimeError: shape",
        "tensor_parallel-pruned": "RuntimeError: shape",
    },
}[5 if V5 else 4]
WITHIN = {  # elsewhere what the two saw is equal bit for bit
    "ddp": 1e-12,  # float64
    "fsdp": 1e-12,
    "tensor_parallel": 1e-12,
}
if not V5:  # its attention divides where 5 multiplies: float32 and float64 round differently
    WITHIN["attentions"] = ROUNDING32
    WITHIN |= dict.fromkeys(("head_mask", "loads_relative", "simcse", "bottlenecks"), ROUNDING)
    WITHIN |= dict.fromkeys(("trains_embeddings", "trains_embeddings-pruned"), 5e-3)  # Adam makes rounding a step


def seen(name: str, folder: Path, side: Side = OURS) -> Any:
    """Run a check and return what it observed; skip, with the reason, where what it needs is not installed."""
    try:
        return CHECKS[name].run(side, folder / side.name)
    except MissingError as reason:
        pytest.skip(str(reason))


def same_as_stock(name: str, folder: Path) -> None:
    """Assert that a check passes with both, and that what they observe is equal."""
    ours, stocks = seen(name, folder), seen(name, folder, STOCK)
    equal(ours, stocks, WITHIN.get(name, 0.0), f"bertlite.hf and transformers in {name}")


def only_ours(name: str, folder: Path) -> None:
    """Assert that a check passes with bertlite, and that stock fails as STOCK_FAILS says."""
    assert seen(name, folder)
    with pytest.raises(Exception) as failure:  # noqa: PT011  # the table has the type and the text
        CHECKS[name].run(STOCK, folder / STOCK.name)
    assert re.match(STOCK_FAILS[name], first_line(failure.value)), first_line(failure.value)
