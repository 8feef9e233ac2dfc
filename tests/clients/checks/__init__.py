"""One module for each client library: the checks of what bertlite promises to its users."""

from tests.clients.checks import (
    adapters,
    compilers,
    distributed,
    embeddings,
    interchange,
    launch,
    pipelines,
    tools,
    trainer,
)
from tests.clients.checks.common import (
    CHECKS,
    OURS,
    STOCK,
    V5,
    Check,
    MissingError,
    Observed,
    Side,
    equal,
    first_line,
    gap,
)

__all__ = [
    "CHECKS",
    "OURS",
    "STOCK",
    "V5",
    "Check",
    "MissingError",
    "Observed",
    "Side",
    "adapters",
    "compilers",
    "distributed",
    "embeddings",
    "equal",
    "first_line",
    "gap",
    "interchange",
    "launch",
    "pipelines",
    "tools",
    "trainer",
]
