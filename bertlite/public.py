"""The public names of bertlite, each from the module it lives in."""

from bertlite.config import BertConfig, kept_heads, kept_neurons
from bertlite.inference.optimize import optimize_for_inference
from bertlite.inference.training import TrainingStep
from bertlite.models import heads
from bertlite.models.base import BertModel
from bertlite.models.heads import *  # noqa: F403  # the task heads, each of which names itself there
from bertlite.models.structure import (
    compact,
    compact_,
    densify,
    drop_layers,
    drop_layers_,
    prune_heads,
    prune_heads_,
    prune_neurons,
    prune_neurons_,
    scatter_heads,
    with_pruned,
)
from bertlite.pruning.importance import (
    head_importance,
    neuron_importance,
    prune_to_macs,
    rank_heads,
    rank_neurons,
    repair,
    repair_,
)
from bertlite.pruning.vocabulary import prune_vocabulary
from bertlite.stack.cache import KeyValueCache
from bertlite.support.batching import Batches, token_budget_batches
from bertlite.tokenizer import BatchEncoding, BertTokenizer

__all__ = [
    "BatchEncoding",
    "Batches",
    "BertConfig",
    "BertModel",
    "BertTokenizer",
    "KeyValueCache",
    "TrainingStep",
    "compact",
    "compact_",
    "densify",
    "drop_layers",
    "drop_layers_",
    "head_importance",
    "kept_heads",
    "kept_neurons",
    "neuron_importance",
    "optimize_for_inference",
    "prune_heads",
    "prune_heads_",
    "prune_neurons",
    "prune_neurons_",
    "prune_to_macs",
    "prune_vocabulary",
    "rank_heads",
    "rank_neurons",
    "repair",
    "repair_",
    "scatter_heads",
    "token_budget_batches",
    "with_pruned",
]
__all__ += heads.__all__
__all__.sort()
