"""The model that `optimize_for_inference` returns: it runs, and raises for everything else."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Self, TypeAlias

import torch
from torch import Tensor, nn

from bertlite.config import BertConfig
from bertlite.inference.checks import ComputeDtype
from bertlite.inference.native.saving import load_native, save_native
from bertlite.models.base import BertModel, BertPreTrainedModel
from bertlite.stack.outputs import ModelOutput
from bertlite.support.contexts import own_context
from bertlite.support.kinds import checked

Output: TypeAlias = ModelOutput | tuple[object, ...]
FORKS: list[None] = []  # one for each fork between the import of bertlite and this process
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=lambda: FORKS.append(None))


def refuse_saving(*args: object, **options: object) -> NoReturn:
    raise_missing("save_pretrained: save the original")


class RunsOnly(nn.Module):
    """A module whose weights are packed: it refuses to train, to save and to load."""

    is_optimised = True
    save_pretrained = refuse_saving

    def train(self, mode: bool = True) -> Self:
        return raise_missing("training mode: train the original, and optimise that") if mode else super().train(False)

    def state_dict(self, *args: object, **kwargs: object) -> NoReturn:
        raise_missing("state_dict: save the original; InferenceModel.save and `bertlite pack` keep packed weights")

    def _load_from_state_dict(self, *args: object) -> NoReturn:
        raise_missing("load_state_dict: load into the original, and optimise that")


class InferenceModel(RunsOnly):
    """A model that only runs, made by `optimize_for_inference`.

    It is called like the model it was made from and returns the same types, without gradients, with every backend.
    It pickles.  In a forked process the first run of a model that was loaded before, or is unpickled there, sets torch
    to one thread: torch's operators would wait for threads that a fork does not copy.
    """

    def __init__(
        self, model: BertPreTrainedModel, backend: str, dtype: ComputeDtype, skip_padding: bool | None = None
    ) -> None:
        super().__init__()
        model.base_model.encoder.skip_padding = skip_padding
        self.model, self.backend, self.compute_dtype = model, backend, dtype
        self.forks = len(FORKS)
        self.train(False)

    def forward(self, *args: object, **kwargs: object) -> Output:
        check_no_gradients(*args, *kwargs.values())
        with torch.no_grad():
            return self.run(*args, **kwargs)

    def run(self, *args: object, **kwargs: object) -> Output:
        if self.forks != len(FORKS):  # torch.compile guards this number, and no call of `os`
            torch.set_num_threads(1)
            self.forks = len(FORKS)
        if self.backend in ("native", "graphs") and torch.compiler.is_compiling():
            return torch.compiler.disable(self.model.__call__)(*args, **kwargs)
        return self.model(*args, **kwargs)

    @property
    def config(self) -> BertConfig:
        return self.model.config

    @property
    def base_model(self) -> BertModel:
        """Return the BertModel inside; code that prunes or measures recognises it as packed."""
        return self.model.base_model

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the outputs."""
        return self.model.dtype

    @property
    def rounding(self) -> str | None:
        """How weights were rounded to 8 bits, "plain", or "fitted" to texts and in how many matrices; else None."""
        return getattr(getattr(self.base_model.encoder, "weights", None), "rounding", None)

    def extra_repr(self) -> str:
        rounding = "" if self.rounding is None else f", rounding={self.rounding!r}"
        return f"backend={self.backend!r}, dtype={self.compute_dtype}{rounding}"

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__({**state, "forks": 0})  # type: ignore[no-untyped-call]

    @checked
    @own_context()
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model with its packed weights to a folder, for `load`; the folder is replaced in one step.

        Raises:
            RuntimeError: the backend is not "native": there are no packed weights.
            ValueError: the folder holds a checkpoint, or the config describes other layers.
            OSError: the folder cannot be written.
        """
        if self.backend != "native":
            raise RuntimeError(
                f"backend {self.backend!r} has no packed weights, which save(folder) is for: save the model itself"
            )
        save_native(self.model, Path(folder).expanduser())

    @classmethod
    @checked
    @own_context()
    def load(cls, folder: str | os.PathLike[str]) -> "InferenceModel":
        """Return a model that `save` wrote; its packed weights are read and compared with their checksum.

        Raises:
            FileNotFoundError: the folder lacks the file.
            ValueError: it has another format or is damaged.
            RuntimeError: the native kernels are not available on this machine.
        """
        model, dtype, skip_padding = load_native(Path(folder).expanduser())
        return cls(model, "native", dtype, skip_padding)

    def requires_grad_(self, requires_grad: bool = True) -> "InferenceModel":
        return raise_missing("gradients") if requires_grad else self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoReturn:
        raise_missing("other device or dtype than it was made for: move the model it was made from, and optimise that")


def check_no_gradients(*inputs: object) -> None:
    """Raise RuntimeError if gradients are on and an input requires one: it would be lost."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        raise_missing("gradients: train the original, or run this under torch.no_grad()")


def raise_missing(feature: str) -> NoReturn:
    raise RuntimeError(f"an optimised model has no {feature}; its weights are packed only for running")
