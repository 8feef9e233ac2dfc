"""The public names of bertlite, each from the module it lives in."""

from bertlite.config import BertConfig as BertConfig
from bertlite.config import kept_heads as kept_heads
from bertlite.config import kept_neurons as kept_neurons
from bertlite.inference.gpu.training import TrainingStep as TrainingStep
from bertlite.inference.optimize import optimize_for_inference as optimize_for_inference
from bertlite.models.base import BertModel as BertModel
from bertlite.models.heads import *  # noqa: F403  # the task heads, each of which names itself there
from bertlite.models.structure import compact as compact
from bertlite.models.structure import compact_ as compact_
from bertlite.models.structure import densify as densify
from bertlite.models.structure import drop_layers as drop_layers
from bertlite.models.structure import drop_layers_ as drop_layers_
from bertlite.models.structure import prune_heads as prune_heads
from bertlite.models.structure import prune_heads_ as prune_heads_
from bertlite.models.structure import prune_neurons as prune_neurons
from bertlite.models.structure import prune_neurons_ as prune_neurons_
from bertlite.models.structure import scatter_heads as scatter_heads
from bertlite.models.structure import with_pruned as with_pruned
from bertlite.pruning.importance import head_importance as head_importance
from bertlite.pruning.importance import neuron_importance as neuron_importance
from bertlite.pruning.importance import prune_to_macs as prune_to_macs
from bertlite.pruning.importance import rank_heads as rank_heads
from bertlite.pruning.importance import rank_neurons as rank_neurons
from bertlite.pruning.importance import repair as repair
from bertlite.pruning.importance import repair_ as repair_
from bertlite.pruning.vocabulary import prune_vocabulary as prune_vocabulary
from bertlite.stack.cache import KeyValueCache as KeyValueCache
from bertlite.support.batching import Batches as Batches
from bertlite.support.batching import token_budget_batches as token_budget_batches
from bertlite.tokenizer import BatchEncoding as BatchEncoding
from bertlite.tokenizer import BertTokenizer as BertTokenizer
