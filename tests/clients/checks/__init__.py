"""What bertlite promises to the users of other libraries, client by client, as functions that run."""

from checks import adapters, compilers, distributed, embeddings, interchange, launch, pipelines, tools, trainer
from checks.common import CHECKS, OURS, STOCK, V5, Check, MissingError, Side, equal, gap, told

__all__ = [
    "CHECKS",
    "OURS",
    "STOCK",
    "V5",
    "Check",
    "MissingError",
    "Side",
    "adapters",
    "compilers",
    "distributed",
    "embeddings",
    "equal",
    "gap",
    "interchange",
    "launch",
    "pipelines",
    "told",
    "tools",
    "trainer",
]
