"""A checkpoint that a command works on: its files are found once, each is read once, and all are of one commit."""

import os
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch

from bertlite.checkpoint.checks import nonfinite_tensors
from bertlite.checkpoint.families import Origin
from bertlite.checkpoint.files import Folder, Source
from bertlite.checkpoint.pretrained import fit_model, load_model
from bertlite.checkpoint.reading import State
from bertlite.config import BertConfig
from bertlite.models.base import BertModel, BertPreTrainedModel
from bertlite.models.heads import CLASSES
from bertlite.opened.card import read_card
from bertlite.tokenizer import BertTokenizer
from bertlite.tokenizer.sentences import (
    SENTENCE_CONFIG,
    TRANSFORMER_CONFIGS,
    is_encoder,
    read_modules,
    read_pooling,
)

Model = TypeVar("Model", bound=BertPreTrainedModel)
MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")  # files of one module


class Checkpoint(Source):
    """A folder or a hub id, with its tokenizer, and with sentence-transformers' files if it has them.

    `Checkpoint.of(name)` opens it; nothing is read before it is asked for, and no weights are kept.  Several functions
    that get one checkpoint read one commit of the hub.  The config, the tokenizer and the data of the card are shared:
    who changes one copies it first.
    """

    @cached_property
    def origin(self) -> Origin:
        """Its family, and the content of its config.json."""
        return Origin.read(self)

    @cached_property
    def config(self) -> BertConfig:
        return self.origin.config()

    @cached_property
    def tokenizer(self) -> BertTokenizer:
        return BertTokenizer.from_pretrained(self)

    @property
    def modules(self) -> list[dict[str, Any]]:
        """The modules of sentence-transformers, each with its "type" and "path"; none without a modules.json."""
        return read_modules(self.place)

    @property
    def pooling(self) -> tuple[list[str], bool]:
        """How texts are pooled, such as ["mean"], empty if they are not; and whether tokens of a prompt count."""
        return read_pooling(self.place)

    @cached_property
    def module_files(self) -> dict[PurePosixPath, bytes]:
        """The content of sentence-transformers' own files by path: each module's, and of an encoder its settings."""
        paths = [PurePosixPath(SENTENCE_CONFIG)]
        for module in self.modules:
            inner = PurePosixPath(module["path"])
            if is_encoder(module["type"]):
                paths += [inner / name for name in TRANSFORMER_CONFIGS]
            elif inner.name:  # without a folder a module has no files: those there are the model's
                paths += self.paths_in(inner)
        return {path: file.read_bytes() for path in paths if (file := self.place.get(str(path)))}

    def paths_in(self, inner: PurePosixPath) -> list[PurePosixPath]:
        """Return the paths of the files in a module's folder; on the hub, which does not list them, known ones."""
        if not isinstance(self.place, Folder):
            return [inner / name for name in MODULE_FILES]
        root = self.place.path
        return [PurePosixPath(path.relative_to(root)) for path in (root / inner).rglob("*") if path.is_file()]

    @cached_property
    def card(self) -> dict[str, Any]:
        """The data of its card that also apply to a derived model, and its hub id as "base_model"; see `read_card`."""
        return read_card(self)

    def hold(self) -> None:
        """Read what is written with a model, for a command that takes hours: a folder may change meanwhile."""
        for part in ("card", "module_files"):
            getattr(self, part)

    @property
    def pinned(self) -> dict[str, str | None]:
        """The options with which another library loads the same commit of a name."""
        return {} if isinstance(self.place, Folder) else {"revision": self.place.revision}

    @property
    def local(self) -> str | os.PathLike[str]:
        """The folder that holds its config and weights, for other libraries; or the weights file that was named."""
        return self.name if Path(self).expanduser().is_file() else self.files.config.parent

    @property
    def model_class(self) -> type[BertPreTrainedModel]:
        """The class that it is for: BertModel if sentence-transformers pools its states to vectors; otherwise
        config.json names it, as for a CrossEncoder."""
        return BertModel if self.pooling[0] else class_of(self.config)

    def load(
        self,
        cls: type[Model],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Model:
        """Load it as a class, all parts of which it must have; an encoder without a pooler gets none.

        Args:
            options: for the class, such as `add_pooling_layer`.

        Raises:
            ValueError: it lacks a part, which would be initialised at random; or as for `from_pretrained`.
        """
        return load_model(cls, self, options, {"attn_implementation": "auto"}, dtype, device, whole=True)

    def faults(
        self, cls: type[BertPreTrainedModel], stored: State, **options: Any
    ) -> tuple[set[str], list[str], list[str]]:
        """Return the parts that `cls.from_pretrained` would initialise, tensors of no BERT, and the faults it raises.

        Args:
            stored: its tensors, as they are in its files.
        """
        try:
            _, state, fit = fit_model(cls, self, self.origin, stored, options, {})
        except ValueError as error:
            return set(), [], [str(error)]
        return fit.absent, fit.unused, fit.faults + fit.mixed_dtypes + nonfinite_tensors(state)


def class_of(config: BertConfig) -> type[BertPreTrainedModel]:
    """Return the class that the config names if bertlite has it, else BertModel."""
    named = [name for name in config.extra.get("architectures") or () if isinstance(name, str)]
    return CLASSES.get(named[0], BertModel) if named else BertModel
