"""The body of BERT: it checks the inputs, chooses the layout and the backend, and runs the stack.

A body has no `__init__` and is no Module: `build` attaches its parts and `forward` runs them.  So bertlite.models.base
can mix it into nn.Module, and bertlite.hf into transformers' PreTrainedModel.

Shapes:  B sequences · S positions · T tokens · D hidden · L layers · N heads as built
"""

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from bertlite.config import POSITIONS, BertConfig, embeds_as_bert
from bertlite.stack.attention import PACKING, Backend, LayerContext, Requirements, missing_for_varlen, select
from bertlite.stack.cache import KeyValueCache
from bertlite.stack.embeddings import FamilyEmbeddings
from bertlite.stack.inputs import ForwardArgs, Mask, causal_mask, check_inputs, read_gates, read_mask, values_readable
from bertlite.stack.layouts import CPU, MAX_FILL, MIN_POSITIONS, Layout, Packed, Padded, packing_of, token_positions
from bertlite.stack.modules import BertEmbeddings, BertEncoder, BertPooler
from bertlite.stack.outputs import BertModelOutput, EncoderOutput, ModelOutput
from bertlite.stack.positions import zero_padding

Out = TypeVar("Out")


class Body:
    """First base of every body: FSDP2 assigns model.__class__, which Python forbids if `Generic` is the first base."""

    config: Any  # a BertConfig, bertlite's or transformers'


class BertBody(Body, Generic[Out]):
    """The inputs, the mask and the stack of BERT."""

    embeddings: BertEmbeddings
    encoder: BertEncoder
    pooler: BertPooler | None
    output_type: ClassVar[type[Any]] = BertModelOutput
    encoder_class: ClassVar[type[BertEncoder]] = BertEncoder
    limits: Any = None  # a config with the sizes to check inputs with; None: the model's

    if TYPE_CHECKING:

        def __call__(self, *inputs: Any, **options: Any) -> Out: ...

    def build(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        """Attach the parts."""
        self.embeddings = (BertEmbeddings if embeds_as_bert(config) else FamilyEmbeddings)(config)
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
        return_encoded: bool = False,
        skip_padding: bool | None = None,
    ) -> Out:
        """Run BERT.

        With attn_implementation="packed" padding is left out: the outputs at padded positions are zeros, and the
        pooler reads the first token that is not padding.  `why_padded` has the rules of the other backends.

        Args:
            input_ids: (B, S), integers below vocab_size.
            attention_mask: the keys that may be attended to; see `bertlite.stack.inputs.read_mask`.  None is all.  It
                covers the keys of `past_key_values` too.  A decoder attends to no later token, unless a 3-D or
                4-D mask says so.
            token_type_ids: (B, S) or broadcastable to it, the segment of each token; zeros by default.
            position_ids: (B, S) or broadcastable to it; by default counted from 0, or from the length of
                `past_key_values`.  A model like RoBERTa takes RoBERTa's numbers: `pad_token_id` for padding, and
                from the next number on for tokens.
            inputs_embeds: (B, S, D), instead of input_ids.
            head_mask: a factor for each head's context: (N,), (L, N), (L, B, N) or transformers' (L, B, N, 1, 1),
                heads in the numbering of the unpruned model.  Cross-attention has none.
            encoder_hidden_states: (B or 1, K, D), for a model with cross-attention.
            encoder_attention_mask: the states that may be attended to; as attention_mask.
            past_key_values: the keys and values of the tokens before these; extended in place.
            use_cache: whether to return them; by default a decoder does, unless its layers are checkpointed.
            cu_seqlens: (B + 1,) int32, for packed sequences, one after another without padding: the start of each and
                the end of the last.  If it is on the CPU, the host does not wait for a GPU.  Inputs and outputs of
                shape (B, S, …) are then (T, …).
            first_token_only: the last layer computes only the first token of each sequence, [CLS]: last_hidden_state
                is (B, 1, D), or (B, D) for packed sequences.
            output_attentions, output_hidden_states, return_dict: by default what the config says.
            return_encoded: return `EncoderOutput`, for a head, which reads tokens as the layers left them.
            skip_padding: leave padding out if the mask permits it, or compute it; None: see `why_padded`.

        Returns:
            BertModelOutput, or with return_dict=False the tuple of its values.

        Raises:
            ValueError: the model cannot take an input; the message names it and what to give instead.
        """
        config = self.config
        attentions = config.output_attentions if output_attentions is None else output_attentions
        states = config.output_hidden_states if output_hidden_states is None else output_hidden_states

        # All inputs in one value, so that what follows can be checked and overridden piece by piece.
        args = ForwardArgs(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, head_mask, encoder_hidden_states,
            encoder_attention_mask, cu_seqlens, first_token_only, attentions, states, skip_padding,
            self.attention_name(), inputs_embeds if input_ids is None else input_ids,
        )  # fmt: skip

        keeps = bool(config.is_decoder) and self.returns_cache(use_cache)  # an encoder has no next token to keep for
        past = past_key_values
        cache = self.cache_for(past, encoder_hidden_states is not None) if keeps or past is not None else None

        # Wrong inputs are refused here, before anything is computed or a cache is extended.
        recomputes, checked = past is not None and self.recomputes(), None if past is None else cache
        check_inputs(args, self.limits or config, self.embeddings, checked, recomputes)

        parts, layout = self.encode(args, cache)
        parts["past_key_values"] = self.cache_out(cache) if keeps else None

        # Tokens go back to the caller's rows, unless a head goes on with them as they lie.
        x, pooler = parts["last_hidden_state"], self.pooler
        parts["last_hidden_state"] = x if return_encoded else layout.unpack(x)
        parts["pooler_output"] = None if pooler is None else pooler(layout.pooler_rows(x, pooler, args.attention_mask))
        return EncoderOutput(**parts, layout=layout) if return_encoded else self.output(parts, return_dict)  # type: ignore[return-value]

    def encode(self, args: ForwardArgs, cache: Any) -> tuple[dict[str, Any], Layout]:
        """Run the embeddings and the layers; return parts of the output, tokens in their layout, and the layout."""
        config, layout, positions = self.config, self.choose_layout(args, cache), args.position_ids

        # Positions that skip padding depend on it, so they are counted while it is still there.
        if getattr(config, "positions_skip_padding", False):
            positions = args.positions(config, 0 if cache is None else cache.length)
        packed = layout.pack_inputs(args.input_ids, args.token_type_ids, positions, args.inputs_embeds)

        x = self.embeddings(*packed)  # (B, S, D) or (T, D)
        if POSITIONS[config.position_embedding_type].zeroes_padding and not (config.is_decoder or layout.packs):
            x = zero_padding(x, args.attention_mask)

        # The choices are made once for all layers.
        inputs = self.layer_context(args, layout, x, cache, packed[2])
        x, states = self.run_encoder(x, inputs)

        weights, cross_weights = inputs.weights, None if inputs.encoder is None else inputs.encoder.weights
        parts = {
            "last_hidden_state": x,
            "hidden_states": None if states is None else tuple(map(layout.unpack, (*states, x))),
            "attentions": None if weights is None else tuple(weights.values()),
            "cross_attentions": None if cross_weights is None else tuple(cross_weights.values()),
        }
        return parts, layout.first_token_layout() if inputs.first_only else layout

    def run_encoder(self, x: Tensor, inputs: LayerContext) -> Any:
        """Run the encoder; return its output and, if they are kept, the inputs of each layer."""
        return self.encoder(x, inputs=inputs)

    def layer_context(
        self, args: ForwardArgs, layout: Layout, x: Tensor, cache: Any, places: Tensor | None
    ) -> LayerContext:
        """Return the inputs of the layers, except the embeddings x of tokens at these positions."""
        weights, states = args.output_attentions, args.encoder_hidden_states
        backend, mask = self.select_backend_and_mask(args, layout, x, cache)

        # A head's gate is laid out like the tokens that it multiplies.
        gates, encoder = None, None
        if args.head_mask is not None:
            gates = [layout.gate(g) for g in read_gates(args.head_mask, self.config, *layout.gate_shape, x.dtype)]

        # Cross-attention has keys of its own, and so a layout, a mask and a backend of its own.
        if states is not None:
            states = states.expand(x.shape[0], -1, -1)
            cross_layout = Padded(x.shape[0], x.shape[1], states.shape[1], x.device, "encoder_attention_mask")
            cross_backend, cross_mask = self.select_backend_and_mask(args, cross_layout, x, cache, crosses=True)
            encoder = LayerContext(
                cross_backend, cross_layout, cross_mask, cache=cache, source=states, returns_weights=weights,
                weights={} if weights else None,
            )  # fmt: skip

        return LayerContext(
            backend, layout, mask, gates, cache, encoder=encoder, first_only=args.first_token_only, places=places,
            keep_states=bool(args.output_hidden_states), returns_weights=weights, weights={} if weights else None,
        )  # fmt: skip

    def output(self, parts: dict[str, Any], return_dict: bool | None) -> Out:
        """Return the result of `forward`."""
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        out = self.output_type(**parts)
        return out if wants_dict else out.to_tuple()

    def choose_layout(self, args: ForwardArgs, cache: Any) -> Layout:
        """Choose the layout of the tokens: rows, or packed if padding is to be left out.

        "packed" always leaves padding out; `cu_seqlens` means that it is; `why_padded` has the rules for other cases.

        Raises:
            ValueError: padding is to be left out, and the model or the mask needs it.
        """
        name, x, mask = args.attention, args.tokens, args.attention_mask

        # Packed inputs leave no choice, a name is a promise, and otherwise packing is done if nothing reads padding.
        found: Packed | None = None
        if args.cu_seqlens is not None:
            if name != "auto" and name not in PACKING:
                raise ValueError(f"backend {name!r} cannot take cu_seqlens; use 'packed' or 'auto'")
            if mask is not None:
                raise ValueError("give attention_mask or cu_seqlens, not both: packed sequences have no padding")

            counts = args.cu_seqlens.to(x.device, non_blocking=True).diff()
            found = Packed(args.lengths, counts, (x.shape[0],))
        elif name in PACKING:
            if cache is not None:
                raise ValueError(
                    f"backend {name!r} supports neither a cache nor cross-attention; use 'sdpa' or 'auto'"
                )
            found = packing_of(x, mask, name)
        elif mask is not None and self.why_padded(args, mask, cache is not None) is None:
            real = token_positions(x, mask)
            found = Packed.of_mask(real) if bool(real[:, 0].all()) else None

        # Packing must not change the distance between two tokens, as it does where padding lies between them.
        kind = POSITIONS[self.config.position_embedding_type]
        if found is not None and (kind.in_scores or kind.has_windows) and not found.is_contiguous:
            if name in PACKING:
                raise ValueError(
                    "packed attention cannot use relative positions when padding lies between tokens;"
                    " use attn_implementation='sdpa' or 'eager'"
                )
            found = None

        if found is None:
            past = 0 if cache is None else cache.length
            return Padded(x.shape[0], x.shape[1], past + x.shape[1], x.device)
        if self.config.is_decoder:
            name = "packed" if name == "auto" else name
            raise ValueError(f"backend {name!r} does not support decoders; use 'sdpa' or 'auto'")
        return found

    def why_padded(self, args: ForwardArgs, mask: Tensor, cached: bool) -> str | None:
        """Return why padded positions are computed by a backend that does not pack; None if padding is left out.

        This decides for every model.  The caller may say in `skip_padding` whether padding may be left out.  Otherwise
        an encoder with `leaves_padding_out`, such as the native kernels', leaves it out.  "auto" does so if that pays
        and only rounding changes: a head reads only the first token of each sequence.
        """
        told = getattr(self.encoder, "skip_padding", None)  # set by `optimize_for_inference`
        asked = args.skip_padding if told is None else told
        leaves = asked or (args.attention != "eager" and getattr(self.encoder, "leaves_padding_out", False))

        # Some results need padded positions: these reasons hold for every backend.
        if asked is False:
            return "a head reads them"
        if mask.dim() != 2:
            return f"a {mask.dim()}-D mask says more than which positions are padding"
        if args.output_attentions:
            return "attentions are returned"
        if cached or self.config.is_decoder:
            return "a decoder computes them"

        # Training packs only if that is faster, which depends on the dtype that attention will see.
        trains = self.embeddings.training
        own = (self.embeddings.LayerNorm or self.embeddings.word_embeddings).weight.dtype
        dtype = torch.get_autocast_dtype("cuda") if mask.is_cuda and torch.is_autocast_enabled() else own
        if trains and not self.may_train_packed(mask.device, dtype):
            return "a model that trains computes them, unless varlen attention, which is faster, can run"

        # The values of padding are wanted, or unknown.
        if not (leaves or args.first_token_only):
            return "they are returned"
        if not values_readable(mask):
            return "a graph may not depend on the values of one mask"
        if leaves and not trains:
            return None

        # From here on it is a choice of "auto", which changes nothing but rounding and must pay.
        if args.attention != "auto" or not self.may_skip_padding():
            return f"attention {args.attention!r} gives transformers' results, bit for bit"
        on_cpu = mask.device == args.tokens.device == CPU
        if not (trains or (on_cpu and mask.numel() >= MIN_POSITIONS)):  # do not wait for a GPU
            return "leaving them out does not pay"
        if not trains and int(mask.count_nonzero()) > MAX_FILL * mask.numel():
            return "most of them hold tokens"
        return "hooks may see them" if has_hooks_within(self) else None

    def may_train_packed(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether varlen attention can run in a dtype on a device: training is faster then without padding."""
        relative = (kind := POSITIONS[self.config.position_embedding_type]).in_scores or kind.has_windows
        width = self.config.hidden_size // self.config.num_attention_heads
        needs = Requirements(relative=relative, device=device, dtype=dtype, head_dim=width)
        return missing_for_varlen(needs) is None

    @property
    def leaves_padding_out(self) -> bool:
        """True if padding is left out wherever it can be, even if all tokens are returned."""
        return getattr(self.encoder, "leaves_padding_out", False)

    def select_backend_and_mask(
        self, args: ForwardArgs, layout: Layout, x: Tensor, cache: Any, crosses: bool = False
    ) -> tuple[Backend, Any]:
        """Select the backend of attention, and read the mask.

        Args:
            layout: the layout of queries and keys.
            x: the embeddings.
            cache: a decoder's cache, for subclasses that read it.
            crosses: whether keys are an encoder's output.
        """
        config, name = self.config, args.attention
        kind = POSITIONS[config.position_embedding_type]

        requirements = Requirements(
            weights=args.output_attentions,
            dropout=bool(self.embeddings.training and config.attention_probs_dropout_prob > 0),
            relative=kind.in_scores or kind.has_windows,
            device=x.device,
            dtype=torch.get_autocast_dtype("cuda") if x.is_cuda and torch.is_autocast_enabled() else x.dtype,
            head_dim=config.hidden_size // config.num_attention_heads,
        )

        backend = select("packed" if layout.packs and name not in PACKING else name, requirements)
        if crosses and backend.packs:
            raise ValueError(f"backend {backend.name!r} does not support cross-attention; use 'sdpa' or 'auto'")

        if isinstance(layout, Packed):
            return backend, Mask()  # the layout has read it

        # Everything that forbids a key becomes one mask: padding, later tokens, and the caller's own.
        mask = args.encoder_attention_mask if crosses else args.attention_mask
        is_causal = config.is_decoder and not crosses
        causal = causal_mask(layout.length, layout.keys, layout.device) if is_causal else None
        shape = layout.batch, layout.length, layout.keys
        evenly = kind.zeroes_padding and not (config.is_decoder or crosses)
        return backend, read_mask(mask, *shape, config.num_attention_heads, causal, layout.mask_name, evenly)

    def may_skip_padding(self) -> bool:
        """Return whether computing padding may be left out, which rounds results differently in float32.

        "auto" and the backends that pack may do so; a named "eager" or "sdpa" computes transformers' results, bit for
        bit.
        """
        name = self.attention_name()
        return name == "auto" or name in PACKING

    def attention_name(self) -> str:
        """Return the name of the backend, or "auto"."""
        return str(self.config.attn_implementation)

    def returns_cache(self, use_cache: bool | None) -> bool:
        """Return whether a decoder gives the keys and values of this forward to the caller."""
        if use_cache is None:
            return bool(self.config.use_cache and not self.recomputes())
        if use_cache and self.recomputes():
            raise ValueError("use_cache=True with gradient checkpointing would fill the cache twice; turn one off")
        return use_cache

    def recomputes(self) -> bool:
        """Return whether some layer is run again in the backward pass."""
        return any(layer.recomputes for layer in self.encoder.layer)

    def cache_for(self, past: Any, crossed: bool) -> Any:
        """Return the cache of one forward for the layers: a new one, or the caller's."""
        if past is None:
            return KeyValueCache()
        if not isinstance(past, KeyValueCache):
            raise TypeError(
                f"past_key_values is a {type(past).__name__}; pass the KeyValueCache that a model returned"
            )
        return past

    def cache_out(self, cache: Any) -> Any:
        """Return the cache for the caller."""
        return cache


def has_hooks_within(module: Any) -> bool:
    """Return whether the module or a part of it has hooks."""
    return any(map(has_hooks, module.modules()))


def has_hooks(module: Any) -> bool:
    """Return whether hooks see the inputs or outputs of the module, or their gradients."""
    return any(hooks_of(module))


def hooks_of(module: Any) -> tuple[Any, ...]:
    """Return the dicts that hold the hooks of a module, which stay the same ones."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def output_or_tuple(out: ModelOutput, return_dict: bool) -> Any:
    """Return an output, or the tuple of its values."""
    return out if return_dict else out.to_tuple()


def config_of(model: Any) -> Any:
    """Return the config, which a model shares with the BertModel inside it, even if one of them gets another."""
    return model._modules.get(model.base_model_prefix, model)._config  # faster than `getattr`
