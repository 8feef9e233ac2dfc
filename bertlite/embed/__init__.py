"""Turn texts into vectors: `Embedder`, and the job that embeds files of any size, as `bertlite embed` does."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertlite.embed.embedder import Embedder as Embedder

    __all__: list[str]
else:  # imported when asked for, as `--help` imports the settings without torch
    from bertlite.support.extras import on_demand

    __getattr__, __dir__ = on_demand(__name__)
