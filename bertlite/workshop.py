"""The public functions behind the commands of `bertlite`, each from the module it lives in.

They are names of `bertlite` too; no module of the library imports them.
"""

from bertlite.experiments.budget.command import prune_to
from bertlite.experiments.budget.vocabulary import prune_vocabulary_of
from bertlite.experiments.command import finetune, prune_compare
from bertlite.experiments.evaluate_command import evaluate
from bertlite.experiments.experiment import prune_run
from bertlite.experiments.settings import PruneSettings
from bertlite.experiments.speed import measure_speed
from bertlite.shipping.convert import convert
from bertlite.shipping.export import export
from bertlite.shipping.pack import pack

__all__ = [
    "PruneSettings",
    "convert",
    "evaluate",
    "export",
    "finetune",
    "measure_speed",
    "pack",
    "prune_compare",
    "prune_run",
    "prune_to",
    "prune_vocabulary_of",
]
