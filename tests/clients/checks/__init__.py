"""What bertlite promises to the users of other libraries, client by client, as functions that run."""

from checks import adapters, compilers, embeddings, interchange, launch, pipelines, tools, trainer
from checks.common import CHECKS, OURS, STOCK, V5, Check, MissingError, Side, equal, gap

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
    "embeddings",
    "equal",
    "gap",
    "interchange",
    "launch",
    "pipelines",
    "tools",
    "trainer",
]
