"""BertModel: the body that reads the inputs and runs the stack, and the base class every model shares.

A body has no `__init__` and is no Module: `build` attaches its parts and `forward` runs them, so that the same body
hangs from nn.Module here and from transformers' PreTrainedModel in bertlite.hf.

Shapes:  B sequences · S positions · D hidden · L layers · N heads as built
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bertlite.checkpoint.files import Source
from bertlite.checkpoint.loading import load_model
from bertlite.checkpoint.names import rename_legacy_keys_
from bertlite.checkpoint.saving import save_model
from bertlite.config import BertConfig, ConfigLike
from bertlite.stack.attention import BACKENDS, Layout, Packed, Padded, select
from bertlite.stack.cache import KeyValueCache
from bertlite.stack.inputs import (
    check_devices,
    check_encoder_states,
    check_inputs,
    check_packed,
    read_gates,
    refuse_pruned,
)
from bertlite.stack.masks import check_shape, concrete, read_mask, read_ones, triangle
from bertlite.stack.modules import (
    NOTHING,
    BertEmbeddings,
    BertEncoder,
    BertLayer,
    BertPooler,
    Checkpointing,
    First,
    Memory,
    init_weights,
)
from bertlite.stack.outputs import BertModelOutput, ModelOutput
from bertlite.stack.packing import FILL, PLACES, Packing

CPU = torch.device("cpu")


class BertPreTrainedModel(nn.Module):
    """What every bertlite model can do: load, save, be pruned, checkpoint its layers."""

    _config: BertConfig
    base_model_prefix: ClassVar[str] = "bert"
    main_input_name: ClassVar[str] = "input_ids"

    def __init__(self, config: BertConfig, **options: Any) -> None:
        super().__init__()
        select(config.attn_implementation, weights=False, dropout=False)  # an unknown name is refused here, not later
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
        """Share the parameters that are one matrix under two names, in models that have some."""
        tie = getattr(self, "tie_decoder", None)
        if callable(tie):
            tie()

    @property
    def config(self) -> BertConfig:
        """One value for a model and the BertModel inside it, whichever of the two is given another."""
        return self.base_model._config

    @config.setter
    def config(self, config: BertConfig) -> None:
        self.base_model._config = config

    @property
    def base_model(self) -> "BertModel":
        """The BertModel inside a model with a head, or the model itself."""
        return getattr(self, self.base_model_prefix, self)  # type: ignore[arg-type]

    @property
    def build_options(self) -> dict[str, Any]:
        """Arguments beside the config that make a model of this one's shape."""
        return {}

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
        """Replace the word embeddings, and whatever is tied to them.

        Raises:
            ValueError: the table has another shape than the config says.
        """
        shape = (self.config.vocab_size, self.config.hidden_size)
        if tuple(embeddings.weight.shape) != shape:
            raise ValueError(f"the embeddings are {tuple(embeddings.weight.shape)}; by the config they are {shape}")
        self.base_model.embeddings.word_embeddings = embeddings
        self.tie_weights()

    def set_attn_implementation(self, name: str) -> None:
        """Choose how attention is computed: a name of `bertlite.stack.attention.BACKENDS`, or "auto".

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
            device: by default the CPU, where weights stay mapped from the file: read once, to refuse nan, and shared.
            attn_implementation: a name of `bertlite.stack.attention.BACKENDS`, or "auto".
            add_pooling_layer: for BertModel; whether it has a pooler.
            revision, subfolder, variant, cache_dir, token, local_files_only: as for `huggingface_hub`.
            overrides: fields of the config to replace, such as num_labels=3.

        Raises:
            FileNotFoundError: there is no such checkpoint, or a file of it is missing.
            ValueError: config.json or the tensors are not this model's; every fault is listed, with the file's name.
            TypeError: an override that is no field of BertConfig.
        """
        options = {} if add_pooling_layer is None else {"add_pooling_layer": add_pooling_layer}
        return load_model(
            cls,
            Source(source, revision, subfolder, variant, cache_dir, token, local_files_only),
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
        save_model(self, folder, max_shard_size=max_shard_size)

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
        rename_legacy_keys_(
            state_dict, prefix, self
        )  # here, so that load_state_dict of any model around this one does it too
        super()._load_from_state_dict(state_dict, prefix, *args)


class BertBody:
    """The inputs, the mask and the stack of BERT."""

    config: Any  # a ConfigLike; which one is the base class's business
    embeddings: BertEmbeddings
    encoder: BertEncoder
    pooler: BertPooler | None
    output_type: ClassVar[type[Any]] = BertModelOutput
    encoder_class: ClassVar[type[BertEncoder]] = BertEncoder

    def build(self, config: ConfigLike, add_pooling_layer: bool = True) -> None:
        self.embeddings = BertEmbeddings(config)
        self.encoder = self.encoder_class(config)
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
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: KeyValueCache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        first_token_only: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Run BERT.

        With attn_implementation="packed" padding is left out: the outputs at padded positions are zeros, and the
        pooler reads the first token that is not padding.  "auto" leaves it out by the rule of `packing`.

        Args:
            input_ids: (B, S), integers below vocab_size.
            attention_mask: what may be looked at; see `bertlite.stack.masks.read_mask`.  None is everything.  It
                covers the keys of `past_key_values` too.  A decoder never looks ahead, unless a 3-D or 4-D mask says
                so.
            token_type_ids: (B, S), the segment of each token; zeros by default.
            position_ids: (B, S), (1, S) or (S,); by default counted from 0, or from the length of `past_key_values`.
            inputs_embeds: (B, S, D), in place of input_ids.
            head_mask: what each head's context is multiplied by: (N,), (L, N), (L, B, N) or transformers'
                (L, B, N, 1, 1), heads in the numbering of the unpruned model.  Cross-attention has none.
            encoder_hidden_states: (B, K, D), for a model with cross-attention.
            encoder_attention_mask: which of them may be looked at; as attention_mask.
            past_key_values: the keys and values of the tokens before these; extended in place.
            use_cache: whether to return them; by default a decoder does, unless its layers are checkpointed.
            cu_seqlens: (B + 1,) int32, for sequences that come packed, one after another without padding: where each
                begins, and where the last one ends.  All that is (B, S) is then (T,), and so are the outputs.
            first_token_only: the last layer computes the first token of each sequence alone, [CLS]: last_hidden_state
                is (B, 1, D), of packed sequences (B, D).
            output_attentions, output_hidden_states, return_dict: by default what the config says.

        Returns:
            BertModelOutput, or with return_dict=False the tuple of what it holds.

        Raises:
            ValueError: an input that this model cannot take; the message names it and what would do.
        """
        config = self.config
        weights = config.output_attentions if output_attentions is None else output_attentions
        keep_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if first_token_only and (weights or keep_states):
            raise ValueError(
                "first_token_only=True leaves no hidden states or attentions to return; ask for one of them"
            )
        if past_key_values is not None and self.recomputes():
            raise ValueError("past_key_values with gradient checkpointing would be extended twice; turn one off")
        if past_key_values is not None and cu_seqlens is not None:
            raise ValueError("give past_key_values or cu_seqlens, not both: packed attention keeps no keys")
        if first_token_only and config.is_decoder:
            raise ValueError("first_token_only=True is for encoders: a decoder's first token sees no other")
        cache = self.cache_for(past_key_values, use_cache, encoder_hidden_states is not None)
        past = 0 if cache is None else cache.length
        seen = input_ids if input_ids is not None else inputs_embeds
        if cu_seqlens is None:
            check_inputs(config, input_ids, token_type_ids, position_ids, inputs_embeds, past)
        else:
            check_packed(config, input_ids, token_type_ids, position_ids, inputs_embeds, cu_seqlens)
        assert seen is not None  # or it has been refused
        check_devices(self.embeddings, seen, token_type_ids=token_type_ids, position_ids=position_ids)
        packing = None
        if cache is None or cu_seqlens is not None:
            packing = self.packing(seen, attention_mask, weights, cu_seqlens, first_token_only)
        if packing is not None:
            pack = packing.pack_ids
            input_ids, token_type_ids, inputs_embeds = map(pack, (input_ids, token_type_ids, inputs_embeds))
            position_ids = packing.positions() if position_ids is None else pack(position_ids)
        elif position_ids is None and past:
            position_ids = torch.arange(past, past + seen.shape[1], device=seen.device)[None]
        x = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)  # (B, S, D) or (T, D)
        layout: Layout
        if packing is not None:
            backend = select("packed", weights, self.drops())
            layout = Packed(backend.kernel, packing)
            batch, length = packing.shape or (len(packing.lengths), 1)
        else:
            batch, length = x.shape[:2]
            ahead = triangle(length, past + length, x.device) if config.is_decoder else None
            layout = self.layout(x, attention_mask, past + length, weights, ahead, cache)
        memory = NOTHING if cache is None else Memory(cache)
        if encoder_hidden_states is not None:
            check_encoder_states(config, encoder_hidden_states, batch)
            others = encoder_hidden_states.shape[1]
            crossing = self.layout(x, encoder_attention_mask, others, weights, name="encoder_attention_mask")
            memory = Memory(cache, crossing.attend)
        elif encoder_attention_mask is not None:
            raise ValueError("encoder_attention_mask was given without encoder_hidden_states")
        gates = None
        if head_mask is not None:
            gates = [layout.gate(gate) for gate in read_gates(head_mask, config, batch, length, x.dtype)]
        first = First(layout.first, partial(layout.attend, first=True)) if first_token_only else None
        x, states, given = self.encoder(x, layout.attend, gates, memory, encoder_hidden_states, keep_states, first)
        if packing is None:
            x = firsts = layout.unpack(x)
        else:
            firsts = packing.unpack_first(x if first_token_only else packing.first(x))[:, None]  # (B, 1, D)
            x = layout.unpack(x) if not first_token_only else firsts if packing.shape else firsts[:, 0]
        return pick(
            self.output_type(
                last_hidden_state=x,
                pooler_output=self.pooler(firsts) if self.pooler is not None else None,
                past_key_values=self.cache_out(cache) if self.returns_cache(use_cache) else None,
                hidden_states=(*map(layout.unpack, states), x) if keep_states else None,
                attentions=tuple(each[0] for each in given) if weights else None,
                cross_attentions=tuple(each[1] for each in given) if weights and memory.attend is not None else None,
            ),
            config.return_dict if return_dict is None else return_dict,
        )

    def drops(self) -> bool:
        """Whether attention dropout is live."""
        return bool(self.embeddings.training and self.config.attention_probs_dropout_prob > 0)

    def layout(
        self,
        x: Tensor,
        mask: Tensor | None,
        keys: int,
        weights: bool,
        ahead: Tensor | None = None,
        cache: Any = None,
        name: str = "attention_mask",
    ) -> Padded:
        """Attention from x (B, S, D) to so many keys, with the mask read and the backend chosen."""
        config = self.config
        backend = select(self.attention_name(), weights, self.drops())
        if backend.layout is not Padded:
            raise ValueError(f"backend {backend.name!r} keeps no keys and looks at no encoder; use 'sdpa' or 'auto'")
        if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
            refuse_pruned(config, f"an {name} for each head")
        read = read_mask(mask, x.shape[0], x.shape[1], keys, config.num_attention_heads, ahead, name)
        return Padded(backend.kernel, read, weights)

    def packing(
        self,
        x: Tensor,
        mask: Tensor | None,
        weights: bool = False,
        cu_seqlens: Tensor | None = None,
        first_token_only: bool = False,
    ) -> Packing | None:
        """Which tokens of x, (B, S, …) or packed (T, …), are real, if padding is to be left out; None if it is not.

        "packed" always leaves it out, and `cu_seqlens` says that it is.  "auto", in eval mode, leaves it out where
        that pays and nobody can see it, so that what "auto" returns differs by rounding alone:

        - Nobody sees it: of an encoder's output the first token of each sequence alone is wanted, as by a head of the
          pooler; every sequence begins with a token; no hook looks at the modules; nothing is compiled, exported,
          traced or mapped, where the mask of today must not decide for that of tomorrow.
        - It pays: the mask is 2-D, on the CPU, where reading it makes nobody wait, and has at least PLACES places, of
          which at most FILL hold tokens.

        Raises:
            ValueError: it is to be left out, and the model or the mask cannot do without it.
        """
        name, config = self.attention_name(), self.config
        if cu_seqlens is not None:
            if name not in ("auto", "packed"):
                raise ValueError(f"backend {name!r} cannot take cu_seqlens; use 'packed' or 'auto'")
            if mask is not None:
                raise ValueError("give attention_mask or cu_seqlens, not both: packed sequences have no padding")
            name = "packed"
        if name == "auto":
            spared = first_token_only and self.spares() and not (config.is_decoder or self.embeddings.training)
            return self.packing_that_pays(x, mask) if spared and mask is not None else None
        if name not in BACKENDS or select(name, weights, self.drops()).layout is not Packed:
            return None
        if config.is_decoder:
            raise ValueError("backend 'packed' cannot run a decoder, whose tokens do not see all others; use 'sdpa'")
        if cu_seqlens is not None:
            return Packing.of_ends(cu_seqlens)
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask.dim() != 2:
            raise ValueError(f"backend 'packed' takes a 2-D attention_mask, not {mask.dim()}-D; use 'sdpa' or 'auto'")
        check_shape(mask, (x.shape[0], 1, x.shape[1], x.shape[1]), "attention_mask")
        return Packing.of_mask(read_ones(mask, "attention_mask").to(x.device))

    def packing_that_pays(self, x: Tensor, mask: Tensor) -> Packing | None:
        """`packing`, where "auto" may leave padding out of x, (B, S, …)."""
        if not (concrete(mask) and mask.device == x.device == CPU and mask.dim() == 2 and mask.numel() >= PLACES):
            return None
        check_shape(mask, (x.shape[0], 1, x.shape[1], x.shape[1]), "attention_mask")
        real = read_ones(mask, "attention_mask")
        pays = int(real.sum()) <= FILL * real.numel() and bool(real[:, 0].all())
        return Packing.of_mask(real) if pays and not watched(self) else None

    def spares(self) -> bool:
        """Whether work may be left out that no result shows, which rounds the results differently in float32.

        Under "auto" and "packed"; a named "eager" or "sdpa" computes what transformers computes, bit for bit.
        """
        return self.attention_name() in ("auto", "packed")

    def first_will_do(self, output_attentions: bool | None, output_hidden_states: bool | None) -> bool:
        """Whether a head that reads the pooler alone may spare the last layer all tokens but the first.

        Not where hidden states or attentions are returned, nor where a hook would see the last layer or its output:
        under a hook every token passes through every layer.
        """
        asked = [self.config.output_attentions if output_attentions is None else output_attentions]
        asked.append(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        if any(asked) or self.config.is_decoder or not self.spares():
            return False
        layers = self.encoder.layer
        return not (hooked(self) or hooked(self.encoder) or (len(layers) and watched(layers[len(layers) - 1])))

    def attention_name(self) -> str:
        return str(self.config.attn_implementation)

    def returns_cache(self, use_cache: bool | None) -> bool:
        if not self.config.is_decoder:
            return False  # an encoder has no next token to keep keys for
        if use_cache is None:
            return bool(self.config.use_cache and not self.recomputes())
        if use_cache and self.recomputes():
            raise ValueError("use_cache=True with gradient checkpointing would fill the cache twice; turn one off")
        return use_cache

    def recomputes(self) -> bool:
        return any(layer.recomputes for layer in self.encoder.layer)

    def cache_for(self, past: Any, use_cache: bool | None, crossed: bool) -> Any:
        """The cache of one forward, as the layers use it."""
        if past is None:
            return KeyValueCache() if self.returns_cache(use_cache) else None
        if not isinstance(past, KeyValueCache):
            raise TypeError(
                f"past_key_values is a {type(past).__name__}; pass the KeyValueCache that a model returned"
            )
        return past

    def cache_out(self, cache: Any) -> Any:
        """The cache as the caller gets it."""
        return cache


class BertModel(BertBody, BertPreTrainedModel):
    """BERT without a head: token vectors, and the pooler's vector for the sequence.

    Args:
        add_pooling_layer: whether there is a pooler.
    """

    config: BertConfig

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)

    @property
    def build_options(self) -> dict[str, Any]:
        return {"add_pooling_layer": self.pooler is not None}


def watched(module: Any) -> bool:
    """Whether a hook looks at the module or at a part of it."""
    return any(map(hooked, module.modules()))


def hooked(module: Any) -> bool:
    """Whether a hook looks at what the module is given or gives."""
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


def pick(out: ModelOutput, return_dict: bool) -> Any:
    return out if return_dict else out.to_tuple()


def set_config(model: Any, config: ConfigLike) -> None:
    """Give a model, the BertModel inside it and the parts that keep its config another one."""
    before = model.config
    for part in model.modules():
        if vars(part).get("config") is before:  # in bertlite.hf, what attention functions of transformers look at
            part.config = config
    model.config = model.base_model.config = config
