"""BertModel, and the base class of every model: loading, saving, resizing, pruning, checkpointing.

Shapes:  B sequences · S positions · D hidden
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import nn

from bertlite.checkpoint.names import rename_legacy_keys_
from bertlite.checkpoint.pretrained import Pretrained
from bertlite.checkpoint.skeleton import init_weights
from bertlite.config import BertConfig, own_field, set_config
from bertlite.models.resizing import Resizable
from bertlite.models.structure import compact_, drop_layers_, prune_heads_, prune_neurons_
from bertlite.stack.attention import check_attention_name
from bertlite.stack.body import BertBody, config_of
from bertlite.stack.modules import BertLayer
from bertlite.stack.outputs import BertModelOutput


@dataclass(frozen=True)
class Checkpointing:
    """Gradient checkpointing of a layer: it forgets its activations and computes them again in the backward pass."""

    offload: bool = False  # keep the layer's input in host memory
    preserve_rng_state: bool = True
    determinism_check: str = "default"

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()) if self.offload else nullcontext():
            return checkpoint(
                run,
                *args,
                use_reentrant=False,  # True loses all gradients when the embeddings are frozen
                preserve_rng_state=self.preserve_rng_state,
                determinism_check=self.determinism_check,
            )


class BertPreTrainedModel(Pretrained, Resizable, nn.Module):
    """Base of all models: loads, saves, resizes embeddings, prunes heads, checkpoints layers."""

    _config: BertConfig
    base_model_prefix: ClassVar[str] = "bert"
    base_class: ClassVar[type[Any]]  # BertModel; heads use it
    pipeline_tag: ClassVar[str | None] = None  # the hub's name of its task

    def __init__(self, config: BertConfig, **options: Any) -> None:
        super().__init__()
        check_attention_name(config.attn_implementation)
        self.config = config
        self.build(config, **options)
        for part in self.children():
            if not isinstance(part, BertPreTrainedModel):  # they have initialised themselves
                init_weights(part, config)
        freeze_zeros_(self, config)
        self.tie_weights()

    def _give_config(self, config: BertConfig) -> None:
        self.base_model._config = config

    def _drop_config(self) -> None:  # `mock.patch.object` deletes and sets again
        del self.base_model._config

    config = property(config_of, _give_config, _drop_config)

    def build(self, *args: Any, **options: Any) -> None:
        """Attach the parts; implemented by bodies."""
        name = type(self).__name__
        raise NotImplementedError(f"{name} is a base class; use BertModel or one of the BertFor… classes")

    def tie_weights(self) -> None:
        """Share the parameters that are one matrix under two names, if the model has any."""
        tie = getattr(self, "tie_decoder", None)
        if callable(tie):
            tie()

    @property
    def base_model(self) -> "BertModel":
        """The BertModel inside a model with a head, or the model itself."""
        return getattr(self, self.base_model_prefix, self)  # type: ignore[arg-type]

    @property
    def build_options(self) -> dict[str, Any]:
        """Arguments that, with the config, make a model of the same shape."""
        return {}

    @property
    def device(self) -> torch.device:
        return self.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.get_input_embeddings().weight.dtype

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Return the number of parameters; shared ones count once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not only_trainable)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the word embeddings."""
        return self.base_model.embeddings.word_embeddings

    def set_input_embeddings(self, embeddings: nn.Embedding) -> None:
        """Replace the word embeddings, and the matrices tied to them.

        Raises:
            ValueError: the shape does not fit the config.
        """
        shape = (self.config.vocab_size, self.config.hidden_size)
        if tuple(embeddings.weight.shape) != shape:
            raise ValueError(f"the embeddings are {tuple(embeddings.weight.shape)}; by the config they are {shape}")
        self.base_model.embeddings.word_embeddings = embeddings
        self.tie_weights()

    def set_attn_implementation(self, name: str) -> None:
        """Choose the attention backend: a name of `bertlite.stack.attention.BACKENDS`, or "auto".

        Raises:
            ValueError: no backend has that name.
        """
        check_attention_name(name)
        set_config(self, replace(self.config, attn_implementation=name))

    # a method changes its model; the function of the same name in bertlite returns a copy

    def prune_heads(self, heads: Mapping[int, Iterable[int]]) -> None:
        """Remove heads from this model: `bertlite.pruning.prune_heads_`."""
        prune_heads_(self, heads)

    def prune_neurons(self, neurons: Mapping[int, Iterable[int]]) -> None:
        """Remove intermediate neurons from this model: `bertlite.pruning.prune_neurons_`."""
        prune_neurons_(self, neurons)

    def drop_layers(self, layers: Iterable[int]) -> None:
        """Remove whole layers from this model: `bertlite.pruning.drop_layers_`."""
        drop_layers_(self, layers)

    def compact(self) -> None:
        """Remove heads and neurons that have no effect from this model: `bertlite.pruning.compact_`."""
        compact_(self)

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        *,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Trade time for memory: layers compute their activations again in the backward pass.

        Gradients are unchanged.  Checkpointing acts whenever gradients are recorded, also in eval mode.

        Args:
            gradient_checkpointing_kwargs: `preserve_rng_state` and `determinism_check` of torch.utils.checkpoint.
            every_n_layers: checkpoint layers 0, n, 2n …; the other layers keep their activations.
            offload: keep the checkpointed layers' inputs in host memory, pinned if there is a GPU.

        Raises:
            ValueError: `every_n_layers` is below 1, or use_reentrant is True, which loses gradients if the embeddings
                are frozen.
        """
        options = dict(gradient_checkpointing_kwargs or {})
        if options.pop("use_reentrant", False):
            raise ValueError("use_reentrant=True loses gradients when the embeddings are frozen; leave it out")
        if every_n_layers < 1:
            raise ValueError(f"every_n_layers is {every_n_layers}; it must be 1 (every layer) or more")
        checkpointing = Checkpointing(offload=offload, **options)
        for i, layer in enumerate(self._layers()):
            layer.checkpointing = checkpointing if i % every_n_layers == 0 else None

    def gradient_checkpointing_disable(self) -> None:
        """Undo `gradient_checkpointing_enable`."""
        for layer in self._layers():
            layer.checkpointing = None

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(layer.checkpointing is not None for layer in self._layers())

    def _layers(self) -> Iterable[BertLayer]:
        return self.base_model.encoder.layer  # type: ignore[return-value]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # load_state_dict of a model around this one calls it too
        rename_legacy_keys_(state_dict, prefix, self)
        super()._load_from_state_dict(state_dict, prefix, *args)


@torch.no_grad()
def freeze_zeros_(model: nn.Module, config: BertConfig) -> None:
    """Make the parameters that a family lacks zeros that do not learn."""
    for parameter in lacking_parameters(model, config):
        parameter.zero_().requires_grad_(False)


def lacking_parameters(model: nn.Module, config: Any) -> list[nn.Parameter]:
    """Return the parameters that a family lacks."""
    ends = own_field(config, "zeros") or ()
    return [x for name, x in model.named_parameters() if any(fnmatchcase(name, f"*{end}") for end in ends)]


class BertModel(BertBody[BertModelOutput], BertPreTrainedModel):
    """BERT without a head: token vectors, and the pooler's vector of the sequence.

    Args:
        add_pooling_layer: whether there is a pooler.
    """

    config: BertConfig
    pipeline_tag = "feature-extraction"

    def __init__(self, config: BertConfig, *, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)

    @property
    def build_options(self) -> dict[str, Any]:
        return {"add_pooling_layer": self.pooler is not None}


BertPreTrainedModel.base_class = BertModel
BertBody.forward.__qualname__ = "BertModel.forward"  # as errors for wrong arguments name it
