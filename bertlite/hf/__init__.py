"""bertlite as a drop-in for transformers' BERT: `from bertlite.hf import BertModel`, on transformers 4.57 and 5.x."""

try:
    from transformers import BertConfig, BertTokenizer, BertTokenizerFast
except ModuleNotFoundError:
    from bertlite.support.extras import import_optional

    import_optional("transformers", "`bertlite.hf`", "hf")
    raise
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.pytorch_utils import apply_chunking_to_forward

from bertlite.hf.compat import find_pruneable_heads_and_indices, prune_linear_layer
from bertlite.hf.modeling import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertLMPredictionHead,
    BertModel,
    BertOnlyMLMHead,
    BertOnlyNSPHead,
    BertPredictionHeadTransform,
    BertPreTrainedModel,
    BertPreTrainingHeads,
    layers,
)
from bertlite.hf.parts import BertEmbeddings, BertIntermediate, BertOutput, BertPooler, BertSelfOutput
from bertlite.hf.registry import register, registered, unregister
from bertlite.models.remote import export_remote_code

BertAttention = layers.BertAttention
BertEncoder = layers.BertEncoder
BertLayer = layers.BertLayer
BertSelfAttention = layers.BertSelfAttention

__all__ = [
    "BertAttention",
    "BertConfig",
    "BertEmbeddings",
    "BertEncoder",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForPreTrainingOutput",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertIntermediate",
    "BertLMHeadModel",
    "BertLMPredictionHead",
    "BertLayer",
    "BertModel",
    "BertOnlyMLMHead",
    "BertOnlyNSPHead",
    "BertOutput",
    "BertPooler",
    "BertPreTrainedModel",
    "BertPreTrainingHeads",
    "BertPredictionHeadTransform",
    "BertSelfAttention",
    "BertSelfOutput",
    "BertTokenizer",
    "BertTokenizerFast",
    "apply_chunking_to_forward",
    "export_remote_code",
    "find_pruneable_heads_and_indices",
    "prune_linear_layer",
    "register",
    "registered",
    "unregister",
]
