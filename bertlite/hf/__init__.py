"""bertlite as a drop-in for transformers' BERT: `from bertlite.hf import BertModel`, on transformers 4.57 and 5.x."""

from transformers import BertConfig

from bertlite.heads.layers import (
    BertLMPredictionHead,
    BertOnlyMLMHead,
    BertOnlyNSPHead,
    BertPredictionHeadTransform,
    BertPreTrainingHeads,
)
from bertlite.hf.modeling import (
    BertEncoder,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLayer,
    BertLMHeadModel,
    BertModel,
    BertPreTrainedModel,
)
from bertlite.hf.registry import export_remote_code, register, registered, unregister
from bertlite.stack.modules import (
    BertAttention,
    BertEmbeddings,
    BertIntermediate,
    BertOutput,
    BertPooler,
    BertSelfAttention,
    BertSelfOutput,
)

__all__ = [
    "BertAttention",
    "BertConfig",
    "BertEmbeddings",
    "BertEncoder",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
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
    "export_remote_code",
    "register",
    "registered",
    "unregister",
]
