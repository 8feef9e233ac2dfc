"""Turn texts into vectors: `Embedder`, and `embed`, which embeds files of any size as `bertlite embed` does.

`bertlite.embed(…)` calls the function.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bertlite.embed.settings import EmbedSettings
from bertlite.support.extras import CallableModule

sys.modules[__name__].__class__ = CallableModule

if TYPE_CHECKING:
    from bertlite.embed.command import embed
    from bertlite.embed.embedder import Embedder
else:  # imported when asked for, as `--help` imports the settings without torch

    def __getattr__(name: str) -> Any:
        homes = {"Embedder": "bertlite.embed.embedder", "embed": "bertlite.embed.command"}
        if name not in homes:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)


__all__ = ["EmbedSettings", "Embedder", "embed"]
