"""Everything that makes a BERT smaller: heads, neurons and layers removed, scored, chosen, and the rest fitted again.

Heads and neurons have their numbers in the unpruned model.  A choice is {layer: [units]}, the argument of
`bertlite.prune_heads` and `bertlite.prune_neurons`.  The models' own module `structure` removes units.

criteria      the table of criteria of importance
importance/   scores and choices; the remaining weights fitted again by least squares
vocabulary    fewer tokens
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertlite.models.structure import compact as compact
    from bertlite.models.structure import compact_ as compact_
    from bertlite.models.structure import densify as densify
    from bertlite.models.structure import drop_layers_ as drop_layers_
    from bertlite.models.structure import prune_heads_ as prune_heads_
    from bertlite.models.structure import prune_neurons_ as prune_neurons_
    from bertlite.models.structure import scatter_heads as scatter_heads
    from bertlite.models.structure import with_pruned as with_pruned
    from bertlite.pruning.criteria import *  # noqa: F403  # the table and its columns, which it names
    from bertlite.pruning.importance.allocation import choose_sizes as choose_sizes
    from bertlite.pruning.importance.allocation import macs as macs
    from bertlite.pruning.importance.allocation import rank_heads as rank_heads
    from bertlite.pruning.importance.allocation import rank_neurons as rank_neurons
    from bertlite.pruning.importance.distillation import distillation_loss as distillation_loss
    from bertlite.pruning.importance.layerwise import loss_curves as loss_curves
    from bertlite.pruning.importance.layerwise import output_metrics as output_metrics
    from bertlite.pruning.importance.layerwise import prune_layerwise as prune_layerwise
    from bertlite.pruning.importance.layerwise import prune_layerwise_ as prune_layerwise_
    from bertlite.pruning.importance.least_squares import METHODS as METHODS
    from bertlite.pruning.importance.least_squares import repair as repair
    from bertlite.pruning.importance.least_squares import repair_ as repair_
    from bertlite.pruning.importance.scores import neuron_importance as neuron_importance
    from bertlite.pruning.importance.scores import normalise as normalise
    from bertlite.pruning.vocabulary import keep_used_tokens as keep_used_tokens

    __all__: list[str]
else:
    from bertlite.support.extras import on_demand

    __getattr__, __dir__ = on_demand(__name__)
