"""Both sides of a comparison, loaded once for the cases that share them."""

from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import bertlite
from bertlite.model import BertPreTrainedModel
from bertlite.parity import reference
from bertlite.parity.cases import DECODER, Case, Overrides

OVERRIDES: dict[str, Overrides] = {  # three labels: with two, a loss that swaps them could pass
    "BertForSequenceClassification": {"num_labels": 3},
    "BertForTokenClassification": {"num_labels": 3},
    DECODER: {"is_decoder": True},
}


@dataclass
class Models:
    """Our model, theirs for each backend, and theirs in float64, each loaded on first use."""

    checkpoint: str | Path
    model: str
    overrides: Overrides
    dtype: torch.dtype
    device: str
    folder: TemporaryDirectory[str] = field(default_factory=partial(TemporaryDirectory, prefix="bertlite-parity-"))
    loaded: dict[str, nn.Module] = field(default_factory=dict)  # theirs, by backend

    @property
    def key(self) -> tuple[str, str, str, torch.dtype, str]:
        return (str(self.checkpoint), self.model, str(self.overrides), self.dtype, self.device)

    @cached_property
    def source(self) -> str | Path:
        """Return the checkpoint, or a copy that has the tensors of this class's head."""
        return reference.complete(self.checkpoint, self.model, self.overrides, Path(self.folder.name))

    @cached_property
    def ours(self) -> BertPreTrainedModel:
        cls: type[BertPreTrainedModel] = getattr(bertlite, self.model)
        changes: dict[str, Any] = dict(self.overrides)
        return cls.from_pretrained(self.source, dtype=self.dtype, device=self.device, **changes)

    def theirs(self, backend: str) -> nn.Module:
        if backend not in self.loaded:
            self.loaded[backend] = reference.load(
                self.source, self.model, self.overrides, self.dtype, backend, self.device
            )
        return self.loaded[backend]

    @cached_property
    def truth(self) -> nn.Module:
        return reference.in_float64(self.theirs("eager"))


_current: Models | None = None


def models_for(case: Case, device: str, checkpoint: str | Path) -> Models:
    """Return the models of a case; reuse those of the case before, if they are the same."""
    global _current
    overrides: Overrides = {**OVERRIDES.get(case.model, {}), **case.overrides}
    wanted = Models(checkpoint, case.model, overrides, getattr(torch, case.dtype), device)
    if _current is None or _current.key != wanted.key or not Path(_current.folder.name).exists():
        forget()
        _current = wanted
    return _current


def forget() -> None:
    """Release the models that are kept between cases, and delete the files made for them."""
    global _current
    if _current is not None:
        _current.folder.cleanup()
    _current = None
