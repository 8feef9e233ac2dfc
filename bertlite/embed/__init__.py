"""Texts to vectors: `Embedder`, and what `bertlite embed` does with it for files of any size."""

from bertlite.embed.embedder import POOLINGS, Embedder, pool

__all__ = ["POOLINGS", "Embedder", "pool"]
