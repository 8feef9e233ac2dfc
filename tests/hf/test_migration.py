"""What notebooks/docs/migration.md says of transformers is what the transformers that is installed does."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pairs import CHECKPOINTING, F64, V5, config_of, inputs_of, theirs_of
from transformers import BertConfig, BertForSequenceClassification, BertModel, pytorch_utils
from transformers.activations import ACT2FN


@dataclass(frozen=True)
class Fact:
    """What a question about transformers gives in 4 and in 5; an error is given by its name."""

    ask: Callable[[], Any]
    four: Any
    five: Any


def run(backend: str = "eager", **inputs: Any) -> Any:
    with torch.no_grad():
        return theirs_of("BertModel", backend)(**{**inputs_of(), **inputs})


def moved(backend: str, **inputs: Any) -> bool:
    """Whether inputs change the output."""
    return bool((run(backend, **inputs)[0] - run(backend)[0]).abs().max() > 1e-9)


def mask(axes: int) -> torch.Tensor:
    given = inputs_of()["attention_mask"].bool()
    batch, length = given.shape
    return given[:, None].expand(batch, length, length) if axes == 3 else given[:, None, None]


def added() -> torch.Tensor:
    allowed = mask(4)
    return torch.zeros(allowed.shape, dtype=F64).masked_fill(~allowed, torch.finfo(F64).min)


def gate() -> torch.Tensor:
    config = config_of()
    return torch.linspace(0, 1, config.num_hidden_layers * config.num_attention_heads, dtype=F64).view(
        config.num_hidden_layers, config.num_attention_heads
    )


def dtype_of_a_half_precision_file(folder: Path, **options: Any) -> torch.dtype:
    theirs_of("BertModel").bfloat16().save_pretrained(folder)
    return BertModel.from_pretrained(folder, **options).dtype


def checkpointing() -> bool:
    """Whether it is re-entrant by default."""
    model = theirs_of("BertModel").train()
    model.gradient_checkpointing_enable()
    part = next(part for part in model.modules() if hasattr(part, "_gradient_checkpointing_func"))
    return part._gradient_checkpointing_func.keywords["use_reentrant"]


def layers_learn() -> bool:
    """Under re-entrant checkpointing, with frozen embeddings."""
    model = BertForSequenceClassification(config_of()).train()
    model.bert.embeddings.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model(**inputs_of(), labels=torch.tensor([0, 1])).loss.backward()
    return any(p.grad is not None for p in model.bert.encoder.parameters())


def has(*names: str, of: Any = BertModel) -> list[str]:
    return [name for name in names if hasattr(of, name)]


REMOVED = ["prune_heads", "get_head_mask", "invert_attention_mask", "get_extended_attention_mask"]
NEW = ["activation_checkpointing_enable", "activation_checkpointing_disable"]  # since 5.23
LABELS = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}
FACTS = {
    "BertTokenizerFast is BertTokenizer": Fact(
        lambda: transformers.BertTokenizerFast is transformers.BertTokenizer, False, True
    ),
    "pruning functions": Fact(
        partial(has, "find_pruneable_heads_and_indices", "prune_linear_layer", of=pytorch_utils),
        ["find_pruneable_heads_and_indices", "prune_linear_layer"],
        ["prune_linear_layer"],
    ),
    "methods that are gone": Fact(partial(has, *REMOVED), REMOVED, []),
    "methods that are new": Fact(partial(has, *NEW), [], NEW if CHECKPOINTING == "activation" else []),
    "the fifth positional argument": Fact(
        lambda: list(inspect.signature(BertModel.forward).parameters)[5], "head_mask", "inputs_embeds"
    ),
    "activations": Fact(
        lambda: [name for name in ("hardswish", "sqrtsoftplus") if name in ACT2FN], [], ["hardswish", "sqrtsoftplus"]
    ),
    "labels that disagree with their number": Fact(lambda: BertConfig(num_labels=3, **LABELS).num_labels, 2, 3),
    "cross-attention without a decoder": Fact(
        lambda: BertModel(config_of(add_cross_attention=True)), "ValueError", "ValueError"
    ),
    "the default attention": Fact(lambda: BertModel(config_of()).config._attn_implementation, "sdpa", "sdpa"),
    "attentions under sdpa": Fact(lambda: len(run("sdpa", output_attentions=True).attentions), 3, 0),
    "flex attention": Fact(
        lambda: bool(BertModel._from_config(config_of(), attn_implementation="flex_attention")), "ValueError", True
    ),
    "head_mask under eager": Fact(lambda: moved("eager", head_mask=gate()), True, False),
    "head_mask under sdpa": Fact(lambda: moved("sdpa", head_mask=gate()), True, False),
    "a 3-D mask": Fact(lambda: moved("sdpa", attention_mask=mask(3)), False, "RuntimeError"),
    "a 4-D mask of scores": Fact(lambda: moved("eager", attention_mask=added()), "ValueError", False),
    "a 4-D bool mask under sdpa": Fact(lambda: moved("sdpa", attention_mask=mask(4)), "ValueError", False),
    "a 4-D bool mask under eager": Fact(lambda: moved("eager", attention_mask=mask(4)), "ValueError", True),
    "a misspelt argument": Fact(lambda: moved("sdpa", attention_maks=mask(4)), "TypeError", False),
    "re-entrant by default": Fact(checkpointing, True, False),
    "layers learn under re-entrant checkpointing": Fact(layers_learn, False, True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FACTS)
def test_transformers_does_what_the_page_says(name: str) -> None:
    fact = FACTS[name]
    try:
        found = fact.ask()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        found = type(error).__name__
    assert found == (fact.five if V5 else fact.four)


@pytest.mark.filterwarnings("ignore")
def test_which_dtype_a_file_is_loaded_in(tmp_path: Path) -> None:
    assert dtype_of_a_half_precision_file(tmp_path) == (torch.bfloat16 if V5 else torch.float32)
    assert dtype_of_a_half_precision_file(tmp_path, dtype="auto") == torch.bfloat16
