"""BertModel: the body that reads the inputs and runs the stack, and the base class every model shares.

A body has no `__init__` and is no Module: `build` attaches its parts and `forward` runs them, so that the same body
hangs from nn.Module here and from transformers' PreTrainedModel in bertlite.hf.

Shapes:  B sequences · S positions · D hidden · L layers · N heads as built
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bertlite.attention import concrete, read_mask, select
from bertlite.config import BertConfig, ConfigLike, kept_heads
from bertlite.modules import BertEmbeddings, BertEncoder, BertLayer, BertPooler, Checkpointing, init_weights
from bertlite.outputs import BertModelOutput, ModelOutput


class BertPreTrainedModel(nn.Module):
    """What every bertlite model can do: load, save, be pruned, checkpoint its layers."""

    config: BertConfig
    base_model_prefix: ClassVar[str] = "bert"
    main_input_name: ClassVar[str] = "input_ids"

    def __init__(self, config: BertConfig, **options: Any) -> None:
        super().__init__()
        self.config = config
        self.build(config, **options)
        for part in self.children():
            if not isinstance(part, BertPreTrainedModel):  # which has initialised itself
                init_weights(part, config)
        self.tie_weights()

    def build(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} is a base class; use BertModel or one of the BertFor… classes"
        )

    def tie_weights(self) -> None:
        """Share the parameters that are one matrix under two names.  Most models have none."""

    @property
    def base_model(self) -> "BertModel":
        """The BertModel inside a model with a head, or the model itself."""
        return self.get_submodule(self.base_model_prefix) if hasattr(self, self.base_model_prefix) else self  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        return self.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.get_input_embeddings().weight.dtype

    def num_parameters(self, only_trainable: bool = False) -> int:
        """How many numbers the model holds; shared ones count once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not only_trainable)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.base_model.embeddings.word_embeddings

    def set_input_embeddings(self, embeddings: nn.Embedding) -> None:
        """Replace the word embeddings, and whatever is tied to them."""
        self.base_model.embeddings.word_embeddings = embeddings
        self.tie_weights()

    def set_attn_implementation(self, name: str) -> None:
        """Choose how attention is computed: a name of `bertlite.attention.BACKENDS`, or "auto".

        Raises:
            ValueError: no backend has that name.
        """
        select(name, weights=False, dropout=False)
        set_config(self, replace(self.config, attn_implementation=name))

    @classmethod
    def from_pretrained(
        cls,
        source: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        attn_implementation: str = "auto",
        add_pooling_layer: bool | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        variant: str | None = None,
        cache_dir: str | PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        **overrides: Any,
    ) -> Self:
        """The model of a checkpoint, in eval mode.

        Args:
            source: a hub id, a folder, or a weights file with its config.json beside it.
            dtype: of the weights; by default the file's own.
            device: by default the CPU, where tensors are mapped from the file and read when first used.
            attn_implementation: a name of `bertlite.attention.BACKENDS`, or "auto".
            add_pooling_layer: for BertModel; whether it has a pooler.
            revision, subfolder, variant, cache_dir, token, local_files_only: as for `huggingface_hub`.
            overrides: fields of the config to replace, such as num_labels=3.

        Raises:
            FileNotFoundError: there is no such checkpoint, or a file of it is missing.
            ValueError: config.json or the tensors are not this model's; every fault is listed, with the file's name.
            TypeError: an override that is no field of BertConfig.
        """
        from bertlite import checkpoint

        options = {} if add_pooling_layer is None else {"add_pooling_layer": add_pooling_layer}
        return checkpoint.load(
            cls,
            checkpoint.Source(source, revision, subfolder, variant, cache_dir, token, local_files_only),
            options=options,
            overrides={"attn_implementation": attn_implementation, **overrides},
            dtype=dtype,
            device=device,
        )

    def save_pretrained(self, folder: str | PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
        """Write config.json and safetensors that bertlite and transformers load.

        The folder is replaced in one step: a crash leaves the old one or the new one.  Other files in it are kept.

        Args:
            max_shard_size: bytes, or a string such as "500MB"; a larger model is written as several files.
        """
        from bertlite import checkpoint

        checkpoint.save(self, folder, max_shard_size=max_shard_size)

    def prune_heads(self, heads: Mapping[int, Iterable[int]]) -> None:
        """Remove heads from this model: `bertlite.prune_heads_`."""
        from bertlite.pruning import prune_heads_

        prune_heads_(self, heads)

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        *,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Trade time for memory: layers forget their activations and compute them again in the backward pass.

        Gradients are those of the plain model.  It acts whenever gradients are recorded, in eval mode too.

        Args:
            gradient_checkpointing_kwargs: `preserve_rng_state` and `determinism_check` of torch.utils.checkpoint.
            every_n_layers: checkpoint layers 0, n, 2n …; the others keep their activations.
            offload: keep the checkpointed layers' inputs in host memory, pinned where there is a GPU.

        Raises:
            ValueError: `every_n_layers` is below 1, or the re-entrant kind is asked for, which loses gradients when
                the embeddings are frozen.
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
        for layer in self._layers():
            layer.checkpointing = None

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(layer.checkpointing is not None for layer in self._layers())

    def _layers(self) -> Iterable[BertLayer]:
        return self.base_model.encoder.layer  # type: ignore[return-value]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        from bertlite.checkpoint import modernise_

        modernise_(state_dict, prefix, self)  # here, so that load_state_dict of any model around this one does it too
        super()._load_from_state_dict(state_dict, prefix, *args)


class BertBody:
    """The inputs, the mask and the stack of BERT."""

    config: Any  # a ConfigLike; which one is the base class's business
    embeddings: BertEmbeddings
    encoder: BertEncoder
    pooler: BertPooler | None
    output_type: ClassVar[type[Any]] = BertModelOutput

    def build(self, config: ConfigLike, add_pooling_layer: bool = True) -> None:
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        head_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Run BERT.

        Args:
            input_ids: (B, S), integers below vocab_size.
            attention_mask: what may be looked at; see `bertlite.attention.read_mask`.  None is everything.
            token_type_ids: (B, S), the segment of each token; zeros by default.
            position_ids: (B, S), (1, S) or (S,); 0, 1, … S - 1 by default.
            inputs_embeds: (B, S, D), in place of input_ids.
            head_mask: what each head's context is multiplied by: (N,), (L, N), (L, B, N) or transformers'
                (L, B, N, 1, 1), heads in the numbering of the unpruned model.
            output_attentions, output_hidden_states, return_dict: by default what the config says.

        Returns:
            BertModelOutput, or with return_dict=False the tuple of what it holds.

        Raises:
            ValueError: an input that this model cannot take; the message names it and what would do.
        """
        config = self.config
        weights = config.output_attentions if output_attentions is None else output_attentions
        check_inputs(config, input_ids, token_type_ids, position_ids, inputs_embeds)
        x = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)  # (B, S, D)
        batch, length = x.shape[:2]
        dropout = self.embeddings.training and config.attention_probs_dropout_prob > 0
        backend = select(config.attn_implementation, weights, dropout)
        mask = read_mask(attention_mask, batch, length, length, config.num_attention_heads)
        if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] > 1:
            refuse_pruned(config, "an attention_mask for each head")
        layout = backend.layout(backend.kernel, mask, weights)
        gates = None if head_mask is None else read_gates(head_mask, config, batch, length, x.dtype)
        x, states, attentions = self.encoder(layout.pack(x), layout.attend, gates)
        x = layout.unpack(x)
        keep_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return pick(
            self.output_type(
                last_hidden_state=x,
                pooler_output=self.pooler(x) if self.pooler is not None else None,
                hidden_states=(*map(layout.unpack, states[:-1]), x) if keep_states else None,
                attentions=tuple(attentions) if weights else None,
            ),
            config.return_dict if return_dict is None else return_dict,
        )


class BertModel(BertBody, BertPreTrainedModel):
    """BERT without a head: token vectors, and the pooler's vector for the sequence.

    Args:
        add_pooling_layer: whether there is a pooler.
    """

    config: BertConfig

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)


def pick(out: ModelOutput, return_dict: bool) -> Any:
    return out if return_dict else out.to_tuple()


def set_config(model: BertPreTrainedModel, config: BertConfig) -> None:
    """Give a model, and the BertModel inside it, another config."""
    model.config = model.base_model.config = config


def refuse_pruned(config: ConfigLike, what: str) -> None:
    if any(config.pruned_heads.values()):
        raise ValueError(f"a pruned model cannot take {what}: its layers have different heads")


def check_inputs(
    config: ConfigLike,
    input_ids: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None,
) -> None:
    """Refuse what would fail later and less clearly, or not at all.

    Values are looked at on the CPU, where it costs nothing; elsewhere it would make the host wait.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(
            f"give {'either' if input_ids is not None else 'one of'} input_ids or inputs_embeds, not "
            f"{'both' if input_ids is not None else 'neither'}"
        )
    if input_ids is not None:
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; expected (batch, length)")
        check_ids("input_ids", input_ids, config.vocab_size, "vocab_size")
        batch, length = input_ids.shape
    else:
        assert inputs_embeds is not None
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != config.hidden_size:
            raise ValueError(
                f"inputs_embeds has shape {tuple(inputs_embeds.shape)}; expected (batch, length, {config.hidden_size})"
            )
        batch, length = inputs_embeds.shape[:2]
    if not 1 <= length <= config.max_position_embeddings:
        raise ValueError(
            f"the sequences are {length} tokens long; this model takes 1 to {config.max_position_embeddings}"
            " (max_position_embeddings): truncate them"
        )
    if token_type_ids is not None:
        if token_type_ids.shape != (batch, length):
            raise ValueError(f"token_type_ids has shape {tuple(token_type_ids.shape)}; expected {(batch, length)}")
        check_ids("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
    if position_ids is not None:
        if tuple(position_ids.shape) not in ((batch, length), (1, length), (length,)):
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)};"
                f" expected {(batch, length)}, (1, {length}) or ({length},)"
            )
        check_ids("position_ids", position_ids, config.max_position_embeddings, "max_position_embeddings")


def check_ids(name: str, ids: Tensor, limit: int, field: str) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} is {ids.dtype}; indices are torch.long or torch.int")
    if ids.device.type == "cpu" and ids.numel() and concrete(ids):
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= limit:
            wrong = low if low < 0 else high
            raise ValueError(f"{name} holds {wrong}; this model has 0 to {limit - 1} ({field} {limit})")


def read_gates(head_mask: Tensor, config: ConfigLike, batch: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """What each layer multiplies its heads' contexts by: L tensors of (B or 1, S or 1, heads kept, 1).

    Raises:
        ValueError: a shape that `BertBody.forward` does not name.
    """
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    gate, shape = head_mask, tuple(head_mask.shape)
    if shape == (heads,):
        gate = gate.expand(layers, heads)[:, None, None]
    elif shape == (layers, heads):
        gate = gate[:, None, None]
    elif gate.dim() == 3 and shape in ((layers, 1, heads), (layers, batch, heads)):
        gate = gate[:, :, None]
    elif gate.dim() == 5 and all(
        have == want or (have == 1 and i not in (0, 2))
        for i, (have, want) in enumerate(zip(shape, (layers, batch, heads, length, 1), strict=True))
    ):
        gate = gate[..., 0].transpose(2, 3)
    else:
        raise ValueError(
            f"head_mask has shape {shape}; expected ({heads},), ({layers}, {heads}), ({layers}, {batch}, {heads}) or"
            f" ({layers}, {batch}, {heads}, 1, 1), heads in the numbering of the unpruned model"
        )
    gate = gate.to(dtype)[..., None]  # (L, B or 1, S or 1, N, 1)
    if not any(config.pruned_heads.values()):
        return list(gate)
    return [gate[layer][:, :, list(kept_heads(config, layer))] for layer in range(layers)]
