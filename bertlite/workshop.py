"""The public functions behind the commands of `bertlite`, each from the module it lives in.

They are names of `bertlite` too; no module of the library imports them.
"""

from bertlite.experiments.budget.command import prune_to
from bertlite.experiments.evaluate_command import evaluate
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
    "measure_speed",
    "pack",
    "prune_to",
]
