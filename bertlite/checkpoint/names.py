"""The names of tensors: current names for legacy ones, and every name of a shared tensor."""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from bertlite.checkpoint.faults import raise_faults
from bertlite.config import BertConfig

WRAPPER_PREFIXES = ("module.", "_orig_mod.")  # DistributedDataParallel and torch.compile put them before every name
LEGACY_SUFFIXES = {  # TensorFlow's names, in 2018
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
}
FORMER_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # buffers that transformers once saved
HEAD_PARTS = (  # parts that only some classes of a family use
    "pooler",
    "cls.predictions",
    "cls.seq_relationship",
    "classifier",
    "qa_outputs",
    "head",
    "discriminator_predictions",
    "lm_predictions",
    "mask_predictions",
)
WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"  # the same matrix, if tied
HEAD_BIAS = "cls.predictions.bias"
DECODER_BIAS = "cls.predictions.decoder.bias"  # the same vector, always


class LoadableModel(Protocol):
    """A model that can be loaded and saved, of any class."""

    base_model_prefix: ClassVar[str]

    @property
    def config(self) -> BertConfig: ...

    @property
    def base_model(self) -> Any: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def build_options(self) -> dict[str, Any]:
        """Arguments that, with the config, make a model of the same shape."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def get_submodule(self, target: str) -> Any: ...

    def named_parameters(self) -> Iterator[tuple[str, Any]]: ...

    def tie_weights(self) -> None: ...

    def eval(self) -> Self: ...


def rename_legacy_keys_(state: MutableMapping[str, Any], prefix: str, model: LoadableModel) -> None:
    """Give the tensors under `prefix` the names that the model has for them, so that legacy state dicts load strictly.

    Raises:
        ValueError: a tensor is present under two names, or a tied decoder differs from the word embeddings.
    """
    faults = apply_current_names_(state, prefix, model) + fill_shared_names_(state, prefix, model)
    raise_faults(f"this state dict does not fit {type(model).__name__}:", faults)


def current_name(name: str, base: str) -> str | None:
    """Return a tensor's current name in a model whose BertModel is under `base`; None if it is obsolete."""
    while name.startswith(WRAPPER_PREFIXES):
        name = name.partition(".")[2]
    for old, new in LEGACY_SUFFIXES.items():
        if name.endswith(old):
            name = name.removesuffix(old) + new
    inner = name.removeprefix("bert.")
    if inner in FORMER_BUFFERS:
        return None
    return base + inner if inner.startswith(("embeddings.", "encoder.", "pooler.")) else name


def apply_current_names_(state: MutableMapping[str, Any], prefix: str, model: LoadableModel) -> list[str]:
    """Rename every tensor under `prefix` to its current name; return the faults found."""
    base, faults = body_prefix(model), []
    for old in [name for name in state if name.startswith(prefix)]:
        new = current_name(old.removeprefix(prefix), base)
        if new is None:
            del state[old]
        elif prefix + new != old:
            if prefix + new in state:
                faults.append(f"{new} is there twice, once as {old}")
            state[prefix + new] = state.pop(old)
    return faults


def fill_shared_names_(state: MutableMapping[str, Any], prefix: str, model: LoadableModel) -> list[str]:
    """Add the shared tensors of a language model under all their names; return the faults found."""
    if getattr(getattr(model, "cls", None), "predictions", None) is None:
        return []
    names = (HEAD_BIAS, DECODER_BIAS, WORD_EMBEDDINGS, DECODER)
    bias, decoder_bias, words, decoder = (prefix + name for name in names)

    # The bias of the decoder has two names, and a file may hold either.
    if decoder_bias in state:
        state[bias] = state[decoder_bias]
    elif bias in state:
        state[decoder_bias] = state[bias]
    if not model.config.tie_word_embeddings or words not in state:
        return []

    # A decoder of its own must equal the embeddings that it is tied to, or one of them would be lost.
    own = state.get(decoder)
    state[decoder] = state[words]
    if own is None or equal_tensors(own, state[words]):
        return []
    way_out = "tie_word_embeddings=False uses this decoder, tie_word_embeddings=True the embeddings"
    return [f"{DECODER} differs from the word embeddings, but the config ties them: {way_out}"]


def body_prefix(model: LoadableModel) -> str:
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def equal_tensors(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.is_meta or torch.equal(a, b))


def optional_part(name: str) -> str | None:
    """Return the part of a model that a checkpoint may lack, such as "pooler"; None for the rest."""
    start, second, *_ = [*name.removeprefix("bert.").split("."), ""]
    if start == "pooler":
        return start
    if start in ("embeddings", "encoder") or name.startswith("bert."):
        return None
    return f"cls.{second}" if start == "cls" else start


def legacy_part(name: str) -> str | None:
    """Return the legacy part of a tensor's name, if any: a wrapper's prefix, a suffix or a former buffer."""
    end = next((end for end in (*LEGACY_SUFFIXES, *FORMER_BUFFERS) if name.endswith(end)), None)
    return next((start for start in WRAPPER_PREFIXES if name.startswith(start)), end)


def decoder_differs(config: BertConfig, state: Mapping[str, Tensor]) -> bool:
    """Return True if a decoder that the config ties to the word embeddings is another matrix."""
    words = state.get(WORD_EMBEDDINGS, state.get(WORD_EMBEDDINGS.removeprefix("bert.")))
    if not config.tie_word_embeddings or words is None or DECODER not in state:
        return False
    return not equal_tensors(state[DECODER], words)


def missing_parts(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], config: BertConfig) -> set[str]:
    """Return the parts of a model without any tensor, by current names."""
    stated = {optional_part(name) for name in state if not (name == DECODER and config.tie_word_embeddings)}
    return {part for name in wanted if (part := optional_part(name)) and part not in stated}


def missing_names(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], absent: set[str]) -> list[str]:
    """Return the names without a tensor, except names in absent parts."""
    return [name for name in wanted if name not in state and optional_part(name) not in absent]
