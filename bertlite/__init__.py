"""The BERT you can read, prove, prune and run.

`import bertlite` is instant: the public names, and modules such as `bertlite.inference`, are imported when they are
first asked for.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # stated here alone; pyproject.toml reads it

if TYPE_CHECKING:  # each public name, from the module it lives in; `import_public` reads this list
    from bertlite.attention_view.command import attention as attention
    from bertlite.config import BertConfig as BertConfig
    from bertlite.config import kept_heads as kept_heads
    from bertlite.config import kept_neurons as kept_neurons
    from bertlite.embed.embedder import Embedder as Embedder
    from bertlite.experiments.budget.command import prune_to as prune_to
    from bertlite.experiments.budget.vocabulary import prune_vocabulary as prune_vocabulary
    from bertlite.experiments.command import finetune as finetune
    from bertlite.experiments.command import prune_compare as prune_compare
    from bertlite.experiments.evaluate_command import evaluate as evaluate
    from bertlite.experiments.experiment import prune_run as prune_run
    from bertlite.experiments.settings import PruneSettings as PruneSettings
    from bertlite.experiments.speed import measure_speed as measure_speed
    from bertlite.inference.gpu.training import TrainingStep as TrainingStep
    from bertlite.inference.model import InferenceModel as InferenceModel
    from bertlite.inference.optimize import optimize_for_inference as optimize_for_inference
    from bertlite.inspection import inspect as inspect
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
    from bertlite.pruning.importance.allocation import rank_heads as rank_heads
    from bertlite.pruning.importance.allocation import rank_neurons as rank_neurons
    from bertlite.pruning.importance.layerwise import prune_layerwise as prune_layerwise
    from bertlite.pruning.importance.least_squares import repair as repair
    from bertlite.pruning.importance.least_squares import repair_ as repair_
    from bertlite.pruning.importance.scores import head_importance as head_importance
    from bertlite.pruning.importance.scores import neuron_importance as neuron_importance
    from bertlite.shipping.convert import convert as convert
    from bertlite.shipping.export import export as export
    from bertlite.shipping.pack import pack as pack
    from bertlite.stack.cache import KeyValueCache as KeyValueCache
    from bertlite.support.batching import Batches as Batches
    from bertlite.support.batching import token_budget_batches as token_budget_batches
    from bertlite.support.environment import env as env
    from bertlite.tokenizer.encoding import BatchEncoding as BatchEncoding
    from bertlite.tokenizer.tokenizer import BertTokenizer as BertTokenizer

    __all__: list[str]
else:  # type checkers would take the function to mean that every name exists

    def __getattr__(name: str) -> Any:
        from bertlite.support.extras import import_public

        return import_public(__name__, name)

    def __dir__() -> list[str]:
        return [*__getattr__("__all__"), "__all__", "__version__"]
