"""The public functions behind the commands of `bertlite`, each from the module it lives in.

They are names of `bertlite` too; no module of the library imports them.
"""

from bertlite.attention_view.command import attention
from bertlite.experiments.budget.command import prune_to
from bertlite.experiments.budget.vocabulary import prune_vocabulary_of
from bertlite.experiments.command import finetune, prune_compare
from bertlite.experiments.evaluate_command import evaluate
from bertlite.experiments.experiment import prune_run
from bertlite.experiments.settings import PruneSettings
from bertlite.experiments.speed import measure_speed
from bertlite.inspection import inspect
from bertlite.shipping.convert import convert
from bertlite.shipping.export import export
from bertlite.shipping.pack import pack
from bertlite.support.environment import env

__all__ = [
    "PruneSettings",
    "attention",
    "convert",
    "env",
    "evaluate",
    "export",
    "finetune",
    "inspect",
    "measure_speed",
    "pack",
    "prune_compare",
    "prune_run",
    "prune_to",
    "prune_vocabulary_of",
]
