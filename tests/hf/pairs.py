"""transformers' own models and ours with the same weights, and inputs for each class."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from conftest import CHOICES, F64, HEADED, LABELS, NONE, SIZES, inputs_of, labels_of, randomise_  # noqa: F401  # for tests
from torch import Tensor

import bertlite
from bertlite import hf
from bertlite.hf import v4
from bertlite.hf.compat import CACHE  # noqa: F401  # for tests

B, S, K, D, L, N, H, V = 2, 11, 8, 48, 3, 4, 12, 97
VERSION = transformers.__version__
V5 = int(VERSION.split(".")[0]) >= 5
# what checkpointing is called since 5.23, and was called before
CHECKPOINTING = "activation" if hasattr(hf.BertModel, "activation_checkpointing_enable") else "gradient"
only_5 = pytest.mark.skipif(not V5, reason=f"about transformers 5; this is {VERSION}")
only_4 = pytest.mark.skipif(V5, reason=f"about transformers 4; this is {VERSION}")
BOTH = pytest.mark.parametrize("backend", ["eager", "sdpa"])
DECODER = {"is_decoder": True}
CROSS = {**DECODER, "add_cross_attention": True}
HEADS = [cls.__name__ for cls in HEADED]
MODELS = ["BertModel", *HEADS]
EVERY = pytest.mark.parametrize("name", MODELS)
EVERY_CLASS = pytest.mark.parametrize("name", [*MODELS, "BertLMHeadModel"])
FORMS = pytest.mark.parametrize("form", [hf, v4], ids=["hf", "v4"])
ALONE_OR_CROSS = pytest.mark.parametrize("changes", [DECODER, CROSS], ids=["alone", "cross"])
TIED = ["BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel"]


def config_of(name: str = "", backend: str | None = None, **changes: Any) -> transformers.BertConfig:
    labels = {"num_labels": LABELS} if name in ("BertForSequenceClassification", "BertForTokenClassification") else {}
    decoder = DECODER if name == "BertLMHeadModel" else {}
    chosen = {} if backend is None else {"attn_implementation": backend}
    return transformers.BertConfig(**{**SIZES, **labels, **decoder, **chosen, **changes})


def model_of(
    library: Any, name: str = "BertModel", backend: str | None = None, dtype: torch.dtype = F64, **changes: Any
) -> Any:
    """Make a library's model, in eval mode, with weights that make every part matter."""
    return randomise_(getattr(library, name)(config_of(name, backend, **changes))).to(dtype).eval()


theirs_of, ours_of = partial(model_of, transformers), partial(model_of, hf)


def core_of(ours: Any, **changes: Any) -> Any:
    """Make bertlite's own model of a class, with the weights of ours."""
    config = bertlite.BertConfig.from_dict(ours.config.to_dict(), **changes)
    core = getattr(bertlite, type(ours).__name__)(config).double().eval()
    core.load_state_dict(ours.state_dict())
    return core


def pair(name: str, backend: str = "eager", dtype: torch.dtype = F64, **changes: Any) -> tuple[Any, Any]:
    """Make transformers' model, and ours with its weights."""
    overflows = not V5 and dtype == F64 and (name == "BertLMHeadModel" or changes.get("is_decoder"))
    theirs = theirs_of(name, "eager" if overflows else backend, dtype, **changes)  # 4.57's causal mask, for sdpa
    ours = ours_of(name, backend, dtype, **changes)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def states_of(dtype: torch.dtype = F64) -> dict[str, Tensor]:
    """Make the inputs of cross-attention; the second sequence has 5 of 8 positions."""
    states = torch.randn(B, K, D, generator=torch.Generator().manual_seed(7), dtype=F64).to(dtype)
    return {
        "encoder_hidden_states": states,
        "encoder_attention_mask": (torch.arange(K) < torch.tensor([[K], [5]])).long(),
    }


def tokens_of(inputs: dict[str, Tensor], start: int, end: int | None = None) -> dict[str, Tensor]:
    """Return inputs of some of the tokens; masks and states are of all."""
    return {k: x[:, start:end] if k in ("input_ids", "token_type_ids") else x for k, x in inputs.items()}


def present(out: Any) -> dict[str, Any]:
    """Return the fields of an output that hold something; transformers 5 gives () for attentions that it lacks."""
    return {name: value for name, value in out.items() if isinstance(value, Tensor) or value}


def score_of(out: Any) -> Tensor:
    """Return a scalar to which every number of an output contributes with a weight of its own."""
    parts = [value for value in out.values() if isinstance(value, Tensor)]
    draws = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).to(x) for i, x in enumerate(parts)]
    return torch.stack([(x * draw).sum() for x, draw in zip(parts, draws, strict=True)]).sum()
