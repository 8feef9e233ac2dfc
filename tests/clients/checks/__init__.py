"""One module for each client library: the checks of what bertlite promises to its users, in `common.CHECKS`."""

from tests.clients.checks import (  # noqa: F401  # each enters its checks
    adapters,
    apart,
    compilers,
    distributed,
    embeddings,
    interchange,
    pipelines,
    trainer,
)
