"""The BERT you can read, prove, prune and run.

- load: BertModel, BertForSequenceClassification and all other task heads, BertConfig, BertTokenizer
- run: optimize_for_inference, InferenceModel, Embedder, token_budget_batches
- prune: prune_heads, prune_neurons, drop_layers, head_importance, kept_heads, kept_neurons, prune_to
- judge and ship: evaluate, pack

More names stand in `bertlite.pruning`, `bertlite.inference`, `bertlite.commands` (each command as a function),
`bertlite.parity`, `bertlite.causal`, `bertlite.runtime` and `bertlite.hf`.

`import bertlite` is instant: names and modules are imported when they are first asked for.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # stated here alone; pyproject.toml reads it

if TYPE_CHECKING:  # each public name, from the module it lives in; `import_public` reads this list
    from bertlite.config import BertConfig as BertConfig
    from bertlite.config import kept_heads as kept_heads
    from bertlite.config import kept_neurons as kept_neurons
    from bertlite.embed.embedder import Embedder as Embedder
    from bertlite.experiments.budget.command import prune_to as prune_to
    from bertlite.experiments.evaluate_command import evaluate as evaluate
    from bertlite.inference.model import InferenceModel as InferenceModel
    from bertlite.inference.optimize import optimize_for_inference as optimize_for_inference
    from bertlite.models.base import BertModel as BertModel
    from bertlite.models.heads import *  # noqa: F403  # the task heads, each of which names itself there
    from bertlite.models.structure import drop_layers as drop_layers
    from bertlite.models.structure import prune_heads as prune_heads
    from bertlite.models.structure import prune_neurons as prune_neurons
    from bertlite.pruning.importance.scores import head_importance as head_importance
    from bertlite.shipping.pack import pack as pack
    from bertlite.support.batching import token_budget_batches as token_budget_batches
    from bertlite.tokenizer.tokenizer import BertTokenizer as BertTokenizer

    __all__: list[str]
else:  # type checkers would take the function to mean that every name exists

    def __getattr__(name: str) -> Any:
        from bertlite.support.extras import import_public

        return import_public(__name__, name)

    def __dir__() -> list[str]:
        return [*__getattr__("__all__"), "__all__", "__version__"]
