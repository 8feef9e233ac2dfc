"""A checkpoint that a command works on: its files are found once, each is read once, and all are of one commit."""

import warnings
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch

from bertlite.checkpoint.checks import Fit, nonfinite_tensors
from bertlite.checkpoint.families import Origin
from bertlite.checkpoint.files import Folder, Source
from bertlite.checkpoint.pretrained import fit_model, load_model
from bertlite.checkpoint.reading import State
from bertlite.config import BertConfig
from bertlite.models.base import BertModel, BertPreTrainedModel
from bertlite.models.heads import CLASSES
from bertlite.runtime.contents import KINDS
from bertlite.runtime.processing import Processing
from bertlite.tokenizer import BertTokenizer, sentences

Model = TypeVar("Model", bound=BertPreTrainedModel)
CARD = "README.md"
CARRIED = ("license", "license_name", "license_link", "language")  # entries that a derived model's card takes over
ACTIVATIONS = "torch.nn."  # the module of activations that the runtime may have, by their names in lower case
PIPELINES = {"multi_label_classification": "sigmoid", "regression": "identity"}  # a pipeline's activations
ACTIVATION_BEFORE_4 = "sbert_ce_default_activation_function"  # a key in config.json of sentence-transformers 3
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
        return sentences.read_modules(self.place)

    @cached_property
    def processing(self) -> Processing:
        """The steps before and after its encoder, as its library runs them.

        A cross-encoder is a classifier that sentence-transformers loads as one; one with a single label is.
        """
        tokenizer, config, modules = self.tokenizer, self.config, self.modules
        own, whole = self.place.values("config.json"), self.place.values(sentences.SENTENCE_CONFIG) if modules else {}
        activation = PIPELINES.get(str(config.problem_type), "softmax")
        kind = {name: kind for kind, name in KINDS.items()}.get(self.model_class.__name__, "")

        # Different versions name a cross-encoder's activation in different places.
        stated = own.get("sentence_transformers") or {}
        named = [whole.get("activation_fn"), stated.get("activation_fn"), own.get(ACTIVATION_BEFORE_4)]
        if kind == "classifier" and (config.num_labels == 1 or stated or named[2] or modules):
            usual = "sigmoid" if config.num_labels == 1 else "identity"
            kind, activation = "cross-encoder", next(filter(None, named), f"{ACTIVATIONS}{usual}")
            activation = sentences.last_name(activation).lower() if activation.startswith(ACTIVATIONS) else activation

        # Entries that no file states have their defaults, as in the library.
        size, longest = whole.get("truncate_dim"), tokenizer.sentences.max_length or tokenizer.model_max_length
        return replace(
            tokenizer.sentences,
            **sentences.read_pooling(self.place),
            kind=kind,
            max_length=min(longest, config.max_position_embeddings),
            segments="token_type_ids" in tokenizer.model_input_names,
            truncation_side=tokenizer.text_settings["truncation_side"],
            # The steps from states to results.
            after=() if size is None else ({"type": "truncate", "size": size},),
            similarity=whole.get("similarity_fn_name") or Processing.similarity,
            unknown=tokenizer.unk_token,
            labels=[str(config.id2label[i]) for i in sorted(config.id2label)],
            activation=activation,
        )

    @cached_property
    def module_files(self) -> dict[str, bytes]:
        """The content of sentence-transformers' own files by path, an encoder's settings next to its weights."""
        place, whole = self.place, sentences.SENTENCE_CONFIG
        paths = {whole: whole}  # {path in a folder with other weights: here}
        for module in self.modules:
            inner = PurePosixPath(module["path"])
            if sentences.is_encoder(module["type"]):
                paths |= {name: str(inner / name) for name in sentences.TRANSFORMER_CONFIGS}
            elif inner.name:  # without a folder a module has no files: those there are the model's
                names = [str(inner / name) for name in MODULE_FILES]
                if isinstance(place, Folder):  # the hub lists no files
                    names = [str(path.relative_to(place.path)) for path in (place.path / inner).rglob("*")]
                paths |= dict(zip(names, names, strict=True))
        return {new: path.read_bytes() for new, old in paths.items() if (path := place.get(old))}

    @cached_property
    def card(self) -> dict[str, Any]:
        """The data of its card that also apply to a derived model, and its hub id as "base_model".

        For a folder, the hub id is the "base_model" of its card, if any.
        """
        from huggingface_hub import ModelCard
        from yaml import YAMLError

        # A card that cannot be read costs the license, and is no reason to write no model.
        place = self.place
        path = place.get(CARD)
        known: dict[str, Any] = {}
        if path is not None:
            try:
                known = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
            except (ValueError, YAMLError) as error:
                why = str(error).partition("\n")[0]
                warnings.warn(f"{path} has no readable YAML at its top ({why}): its license is left out", stacklevel=3)

        # The hub refuses a card whose base_model is no id, such as the path of a folder.
        found = {name: known[name] for name in CARRIED if known.get(name)}
        stated = known.get("base_model") if isinstance(place, Folder) else str(self)
        listed = stated if isinstance(stated, list) else [stated] if stated else []
        base = [each for each in listed if is_hub_id(each)]
        if len(base) < len(listed):
            wrong = next(each for each in listed if not is_hub_id(each))
            warnings.warn(f"{path}: its base_model {wrong!r} is not a hub id and is left out", stacklevel=3)
        return {**found, "base_model": base if len(base) > 1 else base[0]} if base else found

    def hold(self) -> object:
        """Read now the files to write with a model: a command may take hours, and a folder may change meanwhile."""
        return self.card, self.module_files

    @property
    def pinned(self) -> dict[str, str | None]:
        """The options with which another library loads the same commit of a name; see `check_is_whole`."""
        self.check_is_whole()
        return {} if isinstance(self.place, Folder) else {"revision": self.place.revision}

    @property
    def local(self) -> Path:
        """The folder that holds its config and weights, for other libraries; see `check_is_whole`."""
        self.check_is_whole()
        return self.files.config.parent

    def check_is_whole(self) -> None:
        """Raise ValueError if a weights file was named: other libraries load folders."""
        if (path := Path(self).expanduser()).is_file():
            raise ValueError(f"{path} is a single file, which other libraries do not load: name {path.parent}")

    @property
    def model_class(self) -> type[BertPreTrainedModel]:
        """The class that it is for: BertModel if sentence-transformers pools its states to vectors; otherwise
        config.json names it, as for a CrossEncoder."""
        pools = any(sentences.last_name(module["type"]) == sentences.POOLING for module in self.modules)
        return BertModel if pools else class_of(self.config)

    def load(
        self, cls: type[Model], *, dtype: torch.dtype | None = None, device: str | None = None, **options: Any
    ) -> Model:
        """Load it as a class, all parts of which it must have; an encoder without a pooler gets none.

        Args:
            options: for the class, such as `add_pooling_layer`.

        Raises:
            ValueError: it lacks a part, which would be initialised at random; or as for `from_pretrained`.
        """
        return load_model(cls, self, options, {"attn_implementation": "auto"}, dtype, device, whole=True)

    def fit(self, cls: type[BertPreTrainedModel], stored: State, **options: Any) -> Fit:
        """Return how its tensors, as they are in its files, fit a class; all that `from_pretrained` raises is a fault.

        Args:
            options: for the class, such as `add_pooling_layer`.
        """
        try:
            _, state, fit = fit_model(cls, self, stored, options, {})
        except ValueError as error:
            return Fit(set(), torch.float32, [str(error)], [], [])
        return replace(fit, faults=fit.faults + fit.mixed_dtypes + nonfinite_tensors(state))


def class_of(config: BertConfig) -> type[BertPreTrainedModel]:
    """Return the class that the config names if bertlite has it, else BertModel."""
    named = [name for name in config.extra.get("architectures") or () if isinstance(name, str)]
    return CLASSES.get(named[0], BertModel) if named else BertModel


def is_hub_id(name: Any) -> bool:
    """Return whether a value is the name of a repository on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
