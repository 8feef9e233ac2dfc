"""bertlite as a drop-in for transformers' BERT: `from bertlite.hf import BertModel`, on transformers 4.57 and 5.x."""

from typing import TYPE_CHECKING

try:
    from transformers import BertConfig as BertConfig
    from transformers import BertTokenizer as BertTokenizer
    from transformers import BertTokenizerFast as BertTokenizerFast
except ModuleNotFoundError:
    from bertlite.support.extras import import_optional

    import_optional("transformers", "`bertlite.hf`", "hf")
    raise
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput as BertForPreTrainingOutput
from transformers.pytorch_utils import apply_chunking_to_forward as apply_chunking_to_forward

from bertlite.hf.compat import find_pruneable_heads_and_indices as find_pruneable_heads_and_indices
from bertlite.hf.compat import prune_linear_layer as prune_linear_layer
from bertlite.hf.modeling import BertForMaskedLM as BertForMaskedLM
from bertlite.hf.modeling import BertForMultipleChoice as BertForMultipleChoice
from bertlite.hf.modeling import BertForNextSentencePrediction as BertForNextSentencePrediction
from bertlite.hf.modeling import BertForPreTraining as BertForPreTraining
from bertlite.hf.modeling import BertForQuestionAnswering as BertForQuestionAnswering
from bertlite.hf.modeling import BertForSequenceClassification as BertForSequenceClassification
from bertlite.hf.modeling import BertForTokenClassification as BertForTokenClassification
from bertlite.hf.modeling import BertLMHeadModel as BertLMHeadModel
from bertlite.hf.modeling import BertLMPredictionHead as BertLMPredictionHead
from bertlite.hf.modeling import BertModel as BertModel
from bertlite.hf.modeling import BertOnlyMLMHead as BertOnlyMLMHead
from bertlite.hf.modeling import BertOnlyNSPHead as BertOnlyNSPHead
from bertlite.hf.modeling import BertPredictionHeadTransform as BertPredictionHeadTransform
from bertlite.hf.modeling import BertPreTrainedModel as BertPreTrainedModel
from bertlite.hf.modeling import BertPreTrainingHeads as BertPreTrainingHeads
from bertlite.hf.modeling import layers
from bertlite.hf.parts import BertEmbeddings as BertEmbeddings
from bertlite.hf.parts import BertIntermediate as BertIntermediate
from bertlite.hf.parts import BertOutput as BertOutput
from bertlite.hf.parts import BertPooler as BertPooler
from bertlite.hf.parts import BertSelfOutput as BertSelfOutput
from bertlite.hf.registry import register as register
from bertlite.hf.registry import registered as registered
from bertlite.hf.registry import unregister as unregister
from bertlite.models.remote import export_remote_code as export_remote_code

BertAttention = layers.BertAttention
BertEncoder = layers.BertEncoder
BertLayer = layers.BertLayer
BertSelfAttention = layers.BertSelfAttention

if not TYPE_CHECKING:  # for `import *`, which would take the modules of this folder too
    __all__ = [name for name, each in vars().items() if callable(each)]
