"""Texts to vectors: `bertlite.Embedder`, and the job that embeds files of any size, as `bertlite embed` does."""

from bertlite.support.extras import on_demand

__getattr__, _ = on_demand(__name__)  # an error names the new home of a name that was here
