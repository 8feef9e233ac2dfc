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
from bertlite.hf.modeling import *  # noqa: F403  # the classes in its list
from bertlite.hf.modeling import layers
from bertlite.hf.parts import *  # noqa: F403  # the classes in its list
from bertlite.hf.registry import *  # noqa: F403
from bertlite.models.remote import export_remote_code as export_remote_code

BertAttention = layers.BertAttention
BertEncoder = layers.BertEncoder
BertLayer = layers.BertLayer
BertSelfAttention = layers.BertSelfAttention

if not TYPE_CHECKING:  # for `import *`, which would take the modules of this folder too
    __all__ = [name for name, each in vars().items() if callable(each)]
