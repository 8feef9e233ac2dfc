"""The commands of `bertlite` as functions, and their settings: each is imported when it is first asked for.

`bertlite` itself has three of these names.  No module of the library imports them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertlite.attention_view.command import attention as attention
    from bertlite.embed.command import embed as embed
    from bertlite.embed.settings import EmbedSettings as EmbedSettings
    from bertlite.experiments.budget.command import prune_to as prune_to
    from bertlite.experiments.budget.vocabulary import prune_vocabulary as prune_vocabulary
    from bertlite.experiments.command import finetune as finetune
    from bertlite.experiments.command import prune_compare as prune_compare
    from bertlite.experiments.evaluate_command import evaluate as evaluate
    from bertlite.experiments.experiment import prune_run as prune_run
    from bertlite.experiments.settings import PruneSettings as PruneSettings
    from bertlite.experiments.settings import Recipe as Recipe
    from bertlite.experiments.speed import measure_speed as measure_speed
    from bertlite.opened.inspection import inspect as inspect
    from bertlite.parity.command import ParitySettings as ParitySettings
    from bertlite.parity.command import parity as parity
    from bertlite.shipping.convert import convert as convert
    from bertlite.shipping.export import export as export
    from bertlite.shipping.pack import pack as pack
    from bertlite.support.environment import env as env

    __all__: list[str]
else:
    from bertlite.support.extras import on_demand

    __getattr__, __dir__ = on_demand(__name__)
