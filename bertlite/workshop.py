"""The public functions behind the commands of `bertlite`, each from the module it lives in.

They are names of `bertlite` too; no module of the library imports them.
"""

from bertlite.attention_view.command import attention as attention
from bertlite.experiments.budget.command import prune_to as prune_to
from bertlite.experiments.budget.vocabulary import prune_vocabulary_of as prune_vocabulary_of
from bertlite.experiments.command import finetune as finetune
from bertlite.experiments.command import prune_compare as prune_compare
from bertlite.experiments.evaluate_command import evaluate as evaluate
from bertlite.experiments.experiment import prune_run as prune_run
from bertlite.experiments.settings import PruneSettings as PruneSettings
from bertlite.experiments.speed import measure_speed as measure_speed
from bertlite.opened.inspection import inspect as inspect
from bertlite.shipping.convert import convert as convert
from bertlite.shipping.export import export as export
from bertlite.shipping.pack import pack as pack
from bertlite.support.environment import env as env
