"""Texts to vectors: `Embedder`, and the jobs of `bertlite embed`, which embed files of any size."""

from bertlite.embed.embedder import Embedder

__all__ = ["Embedder"]
