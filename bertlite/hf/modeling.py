"""bertlite's bodies as transformers models: the same stack on PreTrainedModel, with transformers' own outputs."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from os import PathLike, fspath
from typing import Any, ClassVar, Self

import torch
import transformers
from torch import Tensor, nn
from transformers import BertConfig, GenerationMixin
from transformers import modeling_outputs as outputs
from transformers.models.bert import modeling_bert as stock
from transformers.utils import logging

from bertlite.checkpoint.checks import NONFINITE, nonfinite_tensors
from bertlite.checkpoint.faults import raise_faults
from bertlite.checkpoint.saving import CODE_MODULE
from bertlite.checkpoint.skeleton import is_misaligned
from bertlite.config import PRUNED, embeds_as_bert, embeds_size, normalise_heads, set_config
from bertlite.hf import compat, layers4, layers5, parts
from bertlite.hf.calls import StockCalls, check_unused
from bertlite.hf.folder import check_folder, check_hub_config, says_if_missing
from bertlite.hf.masks import OURS
from bertlite.hf.signatures import in_stocks_order
from bertlite.models import heads
from bertlite.models import layers as head_layers
from bertlite.models import structure as pruning
from bertlite.models.base import freeze_zeros_, lacking_parameters
from bertlite.models.body import HeadBody
from bertlite.models.remote import export_remote_code
from bertlite.stack.body import BertBody
from bertlite.stack.inputs import causal_mask
from bertlite.stack.outputs import EncoderOutput

__all__ = ["BertForMaskedLM", "BertForMultipleChoice", "BertForNextSentencePrediction", "BertForPreTraining"]
__all__ += ["BertForQuestionAnswering", "BertForSequenceClassification", "BertForTokenClassification"]
__all__ += ["BertLMHeadModel", "BertLMPredictionHead", "BertModel", "BertOnlyMLMHead", "BertOnlyNSPHead"]
__all__ += ["BertPreTrainedModel", "BertPreTrainingHeads", "BertPredictionHeadTransform"]
logger = logging.get_logger(__name__)
layers = layers4 if compat.RETURNS_TUPLES else layers5


class BertPreTrainedModel(stock.BertPreTrainedModel):
    """transformers' PreTrainedModel around a bertlite body, with the head pruning that transformers 5 removed.

    It is also a base for users' classes, which attach their parts after `super().__init__(config)` and then call
    `self.init_weights()` or `self.post_init()`.  Models are real subclasses of transformers' for the reason given in
    `bertlite.hf.parts`, and transformers' constructors do not run either.
    """

    base_class: ClassVar[type[Any]]  # BertModel; heads use it
    _supports_flash_attn = _supports_flex_attn = True  # with 4.57 too

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        for name in options.keys() & PRUNED:  # given to `from_pretrained`; transformers 5's config has no such field
            setattr(config, name, options.pop(name))
        transformers.PreTrainedModel.__init__(self, config)
        if isinstance(self, HeadBody | BertBody):
            compat.complete_config_(self.config)
            self.num_labels = self.config.num_labels  # clients read it from heads
            self.build(self.config, *args, **options)
            self.post_init()
            freeze_zeros_(self, self.config)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **options: Any) -> Self:
        """Load as transformers does; raise for damage that it would ignore, and for weights that are nan or infinite.

        Raises:
            ValueError: `bertlite.hf.folder.check_folder` refuses a folder's config or weights, a checkpoint on the hub
                is another family's, or any checkpoint has nan or inf in its weights.
        """
        source, is_bert = pretrained_model_name_or_path, issubclass(cls, HeadBody | BertBody)
        with torch.device("cpu"):  # transformers itself refuses a default device of "meta"
            check_folder(source, options, is_bert)
        if is_bert:
            check_hub_config(source, options)
        with says_if_missing(fspath(source)) if isinstance(source, str | PathLike) else nullcontext():
            loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info=True
        for parameter in model.parameters():
            if is_misaligned(parameter):
                parameter.data = parameter.data.clone()
        for parameter in lacking_parameters(model, model.config):  # transformers lets all that it loads learn
            parameter.requires_grad_(False)
        raise_faults(f"{pretrained_model_name_or_path} {NONFINITE}", nonfinite_tensors(dict(model.named_parameters())))
        return loaded

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Register a user's own class, whose code transformers then copies into each folder that it saves.

        transformers calls this for each class that it loads with trust_remote_code.  Ours stay as they are: a copy of
        this file would be another class, and only fit this version.
        """
        if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
            super().register_for_auto_class(auto_class)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **options: Any) -> Any:
        """Save as transformers does; a model that was loaded by `export_remote_code`'s code gets this code again.

        An unpruned model's config has no `pruned_heads`, which 5 does not have.
        """
        config, empty = self.config, not (compat.KNOWS_PRUNING or getattr(self.config, "pruned_heads", True))
        if empty:
            del config.pruned_heads
        try:
            saved = super().save_pretrained(save_directory, is_main_process, *args, **options)
        finally:
            if empty:
                config.pruned_heads = {}
        if is_main_process and self._auto_class is None and CODE_MODULE in str(getattr(config, "auto_map", "")):
            export_remote_code(save_directory)
        return saved

    def prune_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        """Remove heads, numbered as in the unpruned model; see `bertlite.pruning.prune_heads_`.

        The model gets a config of its own, so that other models with the same config do not change.  If the base model
        of a user's class has a `_prune_heads`, that prunes it.
        """
        heads = normalise_heads(heads_to_prune, self.config.num_hidden_layers, self.config.num_attention_heads)
        if self.prunes_itself:
            after = pruning.with_pruned(self.config, heads)
            self.base_model._prune_heads(heads)
            set_config(self, after)
        else:
            pruning.prune_heads_(self, heads)

    @property
    def prunes_itself(self) -> bool:
        return type(self.base_model)._prune_heads is not BertPreTrainedModel._prune_heads

    _prune_heads = prune_heads
    check_unused = check_unused

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Check a name as transformers does; ours are known too."""
        if requested_attention in OURS:
            return requested_attention
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    if not compat.KNOWS_PRUNING:  # here only code for transformers 4 calls this

        def init_weights(self) -> None:
            """Initialise the weights that are new; 5 wants `post_init`, which calls this, and 4 prunes here."""
            if "all_tied_weights_keys" in vars(self):
                if getattr(self.config, "pruned_heads", None) and self.prunes_itself:
                    self.prune_heads(self.config.pruned_heads)
                super().init_weights()
            else:
                self.post_init()

    def get_head_mask(
        self, head_mask: Tensor | None, num_hidden_layers: int, is_attention_chunked: bool = False
    ) -> Tensor | list[None]:
        """Return a mask, (N,) or (L, N), as (L, 1, N, 1, 1), none as a list of None; for code of transformers 4."""
        if head_mask is None:
            return [None] * num_hidden_layers
        if head_mask.dim() == 1:
            head_mask = head_mask.expand(num_hidden_layers, -1)
        if head_mask.dim() == 2:
            head_mask = head_mask[:, None, :, None, None]
        if head_mask.dim() != 5:
            raise ValueError(f"head_mask has shape {tuple(head_mask.shape)}; expected (heads,) or (layers, heads)")
        head_mask = head_mask.to(self.dtype)
        return head_mask.unsqueeze(-1) if is_attention_chunked else head_mask

    def invert_attention_mask(self, encoder_attention_mask: Tensor) -> Tensor:
        """Return a 0/1 mask, (B, K) or (B, S, K), as scores (B, 1, 1 or S, K); for code of transformers 4."""
        return additive_scores(encoder_attention_mask, self.dtype)

    def get_extended_attention_mask(
        self,
        attention_mask: Tensor,
        input_shape: tuple[int, ...],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return a 0/1 mask as scores, a decoder's with the causal mask; for code of transformers 4."""
        mask = attention_mask
        if mask.dim() == 2 and self.config.is_decoder:
            causal = causal_mask(input_shape[1], mask.shape[1], mask.device)
            mask = mask if causal is None else mask[:, None].bool() & causal
        return additive_scores(mask, dtype or self.dtype)


def additive_scores(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a 0/1 mask, (B, K) or (B, S, K), as scores to add, (B, 1, 1 or S, K)."""
    if mask.dim() not in (2, 3):
        raise ValueError(f"the mask has shape {tuple(mask.shape)}; expected (batch, keys) or (batch, queries, keys)")
    mask = mask[:, None] if mask.dim() == 3 else mask[:, None, None]
    scores = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return scores.masked_fill(mask == 0, torch.finfo(dtype).min)


@in_stocks_order
class BertModel(StockCalls, BertPreTrainedModel, stock.BertModel):
    """`transformers.BertModel` with bertlite's stack.

    `output_hidden_states` may also be an index, as in 5.23, or a list of indices, as in 5; other states are None.
    """

    output_type = outputs.BaseModelOutputWithPoolingAndCrossAttentions
    encoder_class = layers.BertEncoder

    def build(self, config: Any, add_pooling_layer: bool = True) -> None:
        self.embeddings = (parts.BertEmbeddings if embeds_as_bert(config) else parts.FamilyEmbeddings)(config)
        self.encoder = self.encoder_class(config)
        self.pooler = parts.BertPooler(config) if add_pooling_layer else None
        self.attn_implementation = config._attn_implementation  # as in 4.57
        self.position_embedding_type = config.position_embedding_type


BertPreTrainedModel.base_class = BertModel


class BertPredictionHeadTransform(
    head_layers.BertPredictionHeadTransform, parts.WithoutStock, stock.BertPredictionHeadTransform
):
    pass


class BertLMPredictionHead(head_layers.BertLMPredictionHead, parts.WithoutStock, stock.BertLMPredictionHead):
    """Scores of the vocabulary.  In 4.57 both names of the bias are one vector; in 5 the model ties them."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(embeds_size(config), config.vocab_size)
        self.bias = self.decoder.bias if compat.SHARES_BIAS else nn.Parameter(torch.zeros(config.vocab_size))


class BertOnlyMLMHead(head_layers.BertOnlyMLMHead, parts.WithoutStock, stock.BertOnlyMLMHead):
    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.predictions = BertLMPredictionHead(config)


class BertOnlyNSPHead(head_layers.BertOnlyNSPHead, parts.WithoutStock, stock.BertOnlyNSPHead):
    pass


class BertPreTrainingHeads(head_layers.BertPreTrainingHeads, parts.WithoutStock, stock.BertPreTrainingHeads):
    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


@in_stocks_order
class BertForPreTraining(
    heads.PreTrainingBody[stock.BertForPreTrainingOutput], BertPreTrainedModel, stock.BertForPreTraining
):
    head_class = BertPreTrainingHeads
    output_type = stock.BertForPreTrainingOutput


@in_stocks_order
class BertLMHeadModel(
    heads.CausalLMBody[outputs.CausalLMOutputWithCrossAttentions],
    BertPreTrainedModel,
    stock.BertLMHeadModel,
    GenerationMixin,
):
    output_type = outputs.CausalLMOutputWithCrossAttentions
    head_class = BertOnlyMLMHead

    def __init__(self, config: BertConfig) -> None:
        if not config.is_decoder:
            logger.warning("BertLMHeadModel writes from left to right only with is_decoder=True")
        super().__init__(config)

    def finish(self, encoded: EncoderOutput, loss: Tensor | None, **parts: Any) -> Any:
        parts[compat.CACHE] = parts.pop("past_key_values")
        return super().finish(encoded, loss, **parts)


@in_stocks_order
class BertForMaskedLM(heads.MaskedLMBody[outputs.MaskedLMOutput], BertPreTrainedModel, stock.BertForMaskedLM):
    output_type = outputs.MaskedLMOutput
    head_class = BertOnlyMLMHead


@in_stocks_order
class BertForNextSentencePrediction(
    heads.NextSentencePredictionBody[outputs.NextSentencePredictorOutput],
    BertPreTrainedModel,
    stock.BertForNextSentencePrediction,
):
    output_type = outputs.NextSentencePredictorOutput
    head_class = BertOnlyNSPHead


@in_stocks_order
class BertForSequenceClassification(
    heads.SequenceClassificationBody[outputs.SequenceClassifierOutput],
    BertPreTrainedModel,
    stock.BertForSequenceClassification,
):
    output_type = outputs.SequenceClassifierOutput

    def problem(self, labels: Tensor) -> str:
        """Return the problem_type, which the first labels set in the config: pipelines of a saved model read it."""
        self.config.problem_type = super().problem(labels)
        return self.config.problem_type


@in_stocks_order
class BertForMultipleChoice(
    heads.MultipleChoiceBody[outputs.MultipleChoiceModelOutput], BertPreTrainedModel, stock.BertForMultipleChoice
):
    output_type = outputs.MultipleChoiceModelOutput


@in_stocks_order
class BertForTokenClassification(
    heads.TokenClassificationBody[outputs.TokenClassifierOutput], BertPreTrainedModel, stock.BertForTokenClassification
):
    output_type = outputs.TokenClassifierOutput


@in_stocks_order
class BertForQuestionAnswering(
    heads.QuestionAnsweringBody[outputs.QuestionAnsweringModelOutput],
    BertPreTrainedModel,
    stock.BertForQuestionAnswering,
):
    output_type = outputs.QuestionAnsweringModelOutput
