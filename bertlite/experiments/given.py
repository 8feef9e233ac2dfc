"""Scores of heads and of neurons from files, instead of scoring."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from bertlite.experiments.files import read_scores
from bertlite.importance.structures import HEADS, NEURONS

Given: TypeAlias = tuple[Tensor | None, Tensor | None]  # (layers, heads), (layers, neurons)


@dataclass(frozen=True)
class ScoreFiles:
    """Files that `bertlite prune score` wrote; None for units that are scored."""

    heads: str | Path | None = None
    neurons: str | Path | None = None

    def contents(self) -> list[bytes]:
        """Return what the files hold, so that other files make another run."""
        heads = [Path(self.heads).read_bytes()] if self.heads is not None else []
        return heads + ([b"neurons", Path(self.neurons).read_bytes()] if self.neurons is not None else [])

    def read(self, cell: Any, model: Any, sha256: str) -> Given:
        """Read the scores of a model for a cell.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: they belong to another model or to other units, or the cell does not use them.
        """
        if self != ScoreFiles() and cell.steps > 1:
            raise ValueError(f"with {cell.steps} steps units are scored before each: give no scores, or 1 step")
        if self.neurons is not None and not cell.prunes_neurons:
            raise ValueError(f"{self.neurons} scores neurons, but none are removed: add --neurons SHARE")
        found = []
        for path, structure in ((self.heads, HEADS), (self.neurons, NEURONS)):
            scores = None if path is None else read_scores(path, sha256)
            wanted = structure.shape(model)
            if scores is not None and scores.shape != wanted:
                of = f"{' x '.join(map(str, wanted))} {structure.unit}s"
                raise ValueError(f"{path} holds {tuple(scores.shape)} scores: give those of {of}")
            found.append(scores)
        return found[0], found[1]
