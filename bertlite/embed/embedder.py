"""One vector per text: sentence-transformers loads, prompts, truncates and pools, with bertlite's kernels beneath.

Packed folders are run by bertlite.runtime alone.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bertlite.checkpoint.families import FAMILIES
from bertlite.checkpoint.faults import raise_faults
from bertlite.checkpoint.files import ADAPTER, CONFIG_FILES, Folder, first_existing
from bertlite.checkpoint.reading import read_tensors
from bertlite.checkpoint.saving import dtype_name
from bertlite.embed.settings import VectorSettings, compared
from bertlite.inference import optimize_for_inference
from bertlite.inference.checks import ComputeDtype, parse_device
from bertlite.inference.clients.bodies import OptimizedBody
from bertlite.inference.clients.pooling import in_order, normalize_rows
from bertlite.inference.gpu.ahead import run_ahead
from bertlite.inference.model import FORKS
from bertlite.inference.optimize import PLAIN, check_backend, check_dtype, parse_compute_dtype
from bertlite.models.base import BertModel
from bertlite.opened.checkpoint import Checkpoint
from bertlite.runtime.encoder import Floats
from bertlite.runtime.packed import FILE
from bertlite.runtime.processing import Processing
from bertlite.runtime.tasks import ABOUT, AFTER, TOKENIZER, PackedModel, is_packed
from bertlite.runtime.texts import batches, check_texts, run_batches
from bertlite.shipping.original import check_modules
from bertlite.support.contexts import own_context
from bertlite.support.extras import import_optional
from bertlite.support.files import sha256_of
from bertlite.support.progress import count_of
from bertlite.tokenizer.sentences import MODULES, POOLING, TRANSFORMER_CONFIGS

MEMORY_ERRORS = (torch.OutOfMemoryError, MemoryError)
NO_PRIMITIVE = "could not create a primitive"  # oneDNN's message if memory runs out, or a matmul is unsupported
CHARACTERS_PER_TOKEN = 4  # for estimating the tokens of a text
SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", MODULES, ADAPTER, *TRANSFORMER_CONFIGS)


log = logging.getLogger("bertlite")


class Loaded(NamedTuple):
    """A SentenceTransformer that runs optimised, or a packed folder.

    Args:
        encoder: its `encode` returns the vectors of a batch.
        options: for `encode`, besides the texts and the prompt.
        sha256: the hash of its tensors and tokenizer before.
        files: hashes of other files that change vectors.
        settings: the settings that it decides or completes.
        processing: the steps before and after it.
    """

    encoder: Any
    options: dict[str, Any]
    sha256: str
    files: dict[str, str]
    settings: dict[str, Any]
    processing: Processing


@dataclass(frozen=True)
class Embedder(VectorSettings):
    """Turn texts into vectors: a SentenceTransformer on the kernels, loaded when a process first uses it.

    It is a frozen value, which can be pickled, and small until then.  Called with a batch of columns, it adds a column
    of vectors; called with texts, it returns their vectors.  So it can be passed directly to::

        datasets:  dataset.map(embedder, batched=True)
        Ray Data:  dataset.map_batches(Embedder, fn_constructor_args=(model,), compute=ActorPoolStrategy(size=2))
        Spark:     predict_batch_udf(lambda: embedder, return_type=ArrayType(FloatType()), batch_size=1024)

    Args:
        model: a hub id or a folder that sentence-transformers loads; without modules.json its states are pooled by the
            mean, as there.  Or a folder that `bertlite pack` wrote, which keeps its own dtype and pooling.
        pooling: instead of the model's: "cls", "mean", "max", "lasttoken" or another of sentence-transformers.
        normalize: scale vectors to length 1, even if the model does not; after truncation.
        prompt: a string to put before each text; or `prompt_name`, the name of one of the model's.  By default the
            model's `default_prompt_name`, else none.
        truncate_dim: keep only this many numbers of each vector; by default as the model states, else all.
        dtype: the dtype that the encoder computes in; the vectors are float32.  "int8", only on the CPU, rounds the
            layers' matrices and their inputs to 8 bits, plainly; `bertlite pack` rounds better.  By default float32.
        reproducible: give the same bits on every processor, in float32 or int8; as `optimize_for_inference`.
        device: "cpu", "cuda" or "cuda:1".
        backend: a backend of `optimize_for_inference`.  With "auto" an encoder that is no BERT runs unchanged, with a
            warning in the log.  With "native" or int8 that is an error.
        max_length: the most tokens of a text; longer texts are truncated.  By default the model's.
        max_tokens: tokens in a batch, if each has 4 characters; a longer text is a batch of its own.
        text, vector: names of the column to read and of the column to add.
        options: for SentenceTransformer, such as `revision` and `token`.

    Raises:
        ValueError: there is no such dtype, backend or device; when the model is loaded: no such prompt or pooling, a
            tokenizer of another model, or a module that is not reproducible.
    """

    model: str | PathLike[str]
    _: KW_ONLY
    text: str = "text"
    vector: str = "vector"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        device = parse_device(self.device)
        check_backend(self.backend)
        if self.backend != PLAIN:
            check_dtype(self.compute_dtype, device)

    @property
    def compute_dtype(self) -> ComputeDtype:
        return parse_compute_dtype(self.dtype) or torch.float32

    @property
    def encoder(self) -> Any:
        """The SentenceTransformer, with the kernels beneath it, or the PackedModel of a packed folder."""
        return self.loaded.encoder

    @cached_property
    def loaded(self) -> Loaded:
        """The model, which is loaded once in a process.

        Raises:
            FileNotFoundError: there is no such model.
            ModuleNotFoundError: sentence-transformers is not installed.
            ValueError: a packed folder makes no vectors, or cannot obey a setting.
        """
        return self.load_packed() if is_packed(self.model) else self.load_sentences()

    @own_context()
    def load_sentences(self) -> Loaded:
        """Return the model, loaded by sentence-transformers and optimised."""
        library = import_optional("sentence_transformers", "embedding texts", "embed")
        from bertlite.hf.registry import registered

        hub = {name: self.options[name] for name in ("revision", "token", "local_files_only") if name in self.options}
        cache = self.options.get("cache_folder") or os.environ.get("SENTENCE_TRANSFORMERS_HOME")

        # Faults of the files get an error that names the way out, before the library meets them.
        checkpoint = find_model(self.model, {"cache_dir": cache, **hub})
        check_modules(checkpoint)
        check_folder(checkpoint)
        given = {"model_kwargs": {"dtype": torch.float32}, **self.options, **checkpoint.pinned}
        with registered():  # so that pruned checkpoints load
            loaded = library.SentenceTransformer(fspath(self.model), device=self.device, **given)

        # The modules are described and hashed before the kernels replace parts of them.
        if self.pooling is not None:
            replace_pooling_(loaded, self.pooling)
        modules = {str(i): repr(part) for i, part in enumerate(loaded)}
        before = fingerprint(loaded), hashes_of(checkpoint)
        encoder = self.optimise(loaded.eval())
        check_fit_(encoder, self.max_length)

        # Batches are made here, by tokens, so that the library must not cut them again.
        options = {
            "batch_size": sys.maxsize,
            "normalize_embeddings": self.normalize and not self.reproducible,
            "truncate_dim": self.truncate_dim,
            "show_progress_bar": False,
            "device": self.device,
        }

        limit, name = encoder.max_seq_length or sys.maxsize, self.prompt_name or encoder.default_prompt_name
        about = Processing(max_length=limit, prompts=encoder.prompts, default_prompt=name)
        settings = {"prompt_name": name, "prompts": encoder.prompts, "modules": modules}
        return Loaded(encoder, options, *before, {"dtype": dtype_name(self.compute_dtype), **settings}, about)

    def load_packed(self) -> Loaded:
        """Return a packed folder; raise ValueError if it makes no vectors, or cannot obey a setting."""
        packed = PackedModel(self.model, torch.get_num_threads(), self.max_tokens)
        folder = packed.folder
        if packed.kind != "encoder":
            raise ValueError(f"{folder} is a packed {packed.kind}, which makes no vectors: give a sentence encoder")

        # A packed folder has made its choices: a setting may repeat one, and not change it.
        settings = {"dtype": packed.dtype, "reproducible": packed.reproducible}
        modes = "+".join(packed.processing.modes)
        own = {"pooling": modes, **settings, "device": "cpu", "backend": "native", "options": {}}
        for name, value in own.items():
            given = str(getattr(self, name)).removeprefix("torch.")
            if given not in (str(getattr(VectorSettings, name, {})), str(value)):
                raise ValueError(
                    f"{name} is {given}; {folder}, a packed folder, has {value}: leave {name} out, or give the"
                    " checkpoint that was packed"
                )

        packed.processing.prompt(self.prompt_name)
        if self.max_length is not None:
            check_length(self.max_length, packed.encoder.embeddings["positions"])
            packed.max_seq_length = self.max_length

        # The files that decide the vectors, for the key of a job.
        paths = filter(Path.is_file, [folder / name for name in (ABOUT, AFTER, FILE, TOKENIZER)])
        return Loaded(packed, {}, sha256_of(*paths), {}, settings, packed.processing)

    def optimise(self, model: Any) -> Any:
        """Return a SentenceTransformer that runs on the kernels, or itself if it holds no encoder that they run."""
        try:
            quick = optimize_for_inference(
                model, dtype=self.compute_dtype, backend=self.backend, reproducible=self.reproducible
            )
        except TypeError as error:
            if self.backend == "native" or self.compute_dtype == torch.int8 or self.reproducible:
                raise
            if self.backend == "auto":
                log.warning("embedding runs the model as it is: %s", error)
            return model.to(self.compute_dtype)

        # Bits that torch computes may differ between processors, so all of them must come from the kernels.
        others = [type(part).__name__ for part in list(quick)[1:] if not in_order(part)]
        if self.reproducible and others:
            raise ValueError(
                f"{' and '.join(others)} of {self.model} is computed by torch, whose bits depend on the processor:"
                " leave out reproducible"
            )
        return quick

    @cached_property
    def dimension(self) -> int:
        return int(self.encode_batch(["a"]).shape[1])

    @property
    def longest(self) -> int:
        """The length in tokens to which texts are truncated."""
        return self.loaded.processing.max_length

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that change the vectors, without the weights and the tokenizer; JSON-ready."""
        return {**compared(VectorSettings, self), **self.loaded.settings, "max_length": self.longest}

    def encode(self, texts: str | Sequence[str], progress: Callable[[Sequence[int]], None] = lambda _: None) -> Floats:
        """Return the vectors of texts, in their order: (texts, D), float32; for a single text, (D,).

        Args:
            progress: called after every batch with the numbers of the texts in it.

        Raises:
            TypeError: a text is not a string.
            ValueError: a text holds half of a surrogate pair.
        """
        if isinstance(texts, str):
            return self.encode([texts])[0]
        texts = check_texts(texts)
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        costs = [min(1 + len(text) // CHARACTERS_PER_TOKEN, self.longest) for text in texts]
        for rows, found in run_batches(texts, batches(costs, self.max_tokens), self.encode_batches):
            vectors[rows] = found
            progress(rows)
        return vectors

    def encode_batches(self, groups: Iterable[list[str]]) -> Iterator[Floats]:
        """Yield the vectors of each batch, in order; on a GPU texts are tokenized ahead and vectors are read late."""
        device, encoder = torch.device(self.device), self.encoder
        if device.type == "cpu":
            yield from map(self.encode_batch, groups)
            return
        prompt = self.loaded.processing.prompt() if self.prompt is None else self.prompt

        def run(texts: list[str], features: dict[str, Any]) -> torch.Tensor:
            try:
                with own_context(), torch.inference_mode():
                    vectors: torch.Tensor = encoder(features)["sentence_embedding"][:, : self.dimension].float()
                    return torch.nn.functional.normalize(vectors) if self.normalize else vectors
            except torch.OutOfMemoryError:
                pass  # outside the handler: its traceback keeps the memory of the whole batch
            return torch.from_numpy(self.encode_batch(texts))

        yield from run_ahead(lambda texts: encoder.preprocess(texts, prompt=prompt), run, groups, device)

    @own_context()
    def encode_batch(self, texts: list[str]) -> Floats:
        """Return the vectors of one batch; split it in halves if it does not fit into memory.

        Raises:
            torch.OutOfMemoryError: a single text does not fit.
        """
        try:
            encoder, options = self.encoder, self.loaded.options
            found: Floats = encoder.encode(texts, prompt=self.prompt, prompt_name=self.prompt_name, **options)
            vectors = found[:, : self.truncate_dim]
            return normalize_rows(vectors) if self.normalize and not options.get("normalize_embeddings") else vectors

        # Libraries report full memory in several ways.  A single text cannot be halved, so that is an error.
        except (RuntimeError, MemoryError) as error:
            known = isinstance(error, MEMORY_ERRORS) or "can't allocate memory" in str(error)  # torch's on the CPU
            if not known and (len(texts) == 1 or NO_PRIMITIVE not in str(error)):
                raise
            if len(texts) == 1:
                advice = "lower max_length, or use a smaller dtype"
                message = f"one text of {count_of(len(texts[0]), 'character')} does not fit into memory: {advice}"
                raise torch.OutOfMemoryError(message) from None
        half = len(texts) // 2  # outside the handler: its traceback keeps the memory of the whole batch
        return np.concatenate([self.encode_batch(part) for part in (texts[:half], texts[half:])])

    def __call__(self, batch: Any) -> Any:
        """Return the vectors of a batch of texts, or a batch of columns with the vectors as one more column.

        One text, alone or as the value of its column, gets one vector.

        Raises:
            ValueError: the columns do not hold the texts.
        """
        if not isinstance(batch, Mapping):
            return self.encode(to_texts(batch))
        if self.text not in batch:
            raise ValueError(f"there is no column {self.text!r}; have: {', '.join(batch)}. Name it with text=")
        return {**batch, self.vector: self.encode(to_texts(batch[self.text]))}

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if FORKS:  # torch's operators would wait for threads that a fork does not copy
            torch.set_num_threads(1)


def find_model(model: str | PathLike[str], hub: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint of a model; a name without a slash is looked up in sentence-transformers' account first.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    given = Checkpoint.of(model, hub.get("revision")) if isinstance(model, Checkpoint) else Checkpoint(model, **hub)
    bare = "/" not in str(given) and not Path(given).exists()
    for each in (replace(given, name=f"sentence-transformers/{given}"), given) if bare else (given,):
        try:
            first_existing(each.place, (MODULES, *CONFIG_FILES, ADAPTER))
            break
        except (OSError, ValueError):
            if each is given:
                raise
    return each


def to_texts(column: Any) -> Any:
    """Return a column of numpy, pandas or pyarrow as a list, and anything else unchanged."""
    for method in ("to_pylist", "tolist"):
        if hasattr(column, method):
            return getattr(column, method)()
    return column


def replace_pooling_(model: Any, mode: str) -> None:
    """Give a SentenceTransformer another pooling.

    Raises:
        ValueError: sentence-transformers has no such pooling, or the model pools by itself.
    """
    for name, part in model.named_children():
        if type(part).__name__ == POOLING:
            model._modules[name] = type(part)(part.embedding_dimension, mode, part.include_prompt)
            return
    raise ValueError(f"the model has no Pooling to replace, only {', '.join(type(part).__name__ for part in model)}")


def fingerprint(model: Any) -> str:
    """Return the SHA-256 of a SentenceTransformer's tensors and tokenizer."""
    digest = sha256()
    for name, x in sorted(model.state_dict().items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\0".encode())
        digest.update(x.cpu().flatten().view(torch.uint8).numpy().tobytes())
    tokenizer = model.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)  # a slow one of transformers 4 has none
    digest.update((str(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()).encode())
    return digest.hexdigest()


def hashes_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return a hash of the values in each JSON file that changes vectors, without weights and tokens."""
    folders, place = dict.fromkeys(["", *(str(module["path"]) for module in checkpoint.modules)]), checkpoint.place
    names = [f"{folder}/{name}".lstrip("/") for folder in folders for name in SETTINGS]
    found = {name: path for name in names if (path := place.get(name)) is not None}
    return {name: sha256_of(json.dumps(json.loads(place.read(path)), sort_keys=True)) for name, path in found.items()}


def check_folder(checkpoint: Checkpoint) -> None:
    """Raise ValueError for the damaged folder of a BERT: transformers would make up missing tensors."""
    place = checkpoint.place
    kind = place.values(CONFIG_FILES[0]).get("model_type") if isinstance(place, Folder) else None
    if kind in FAMILIES and not place.get(ADAPTER):
        fit = checkpoint.fit(BertModel, read_tensors(checkpoint.files), add_pooling_layer=False)
        raise_faults(f"{checkpoint.files.weights} cannot be used:", fit.faults)


def check_length(max_length: int, positions: int) -> None:
    """Raise ValueError for a length that leaves no room for a word, or that a model does not take."""
    if not 3 <= max_length <= positions:
        raise ValueError(f"max_length is {max_length}; this model takes 3 to {positions} tokens")


def check_fit_(encoder: Any, max_length: int | None) -> None:
    """Limit texts to the positions of an encoder, or to `max_length`.

    Raises:
        ValueError: it has fewer positions than `max_length` or fewer words than its tokenizer, or that has no words.
    """
    bodies = [part.model.config for part in encoder.modules() if isinstance(part, OptimizedBody)]
    positions = min((config.max_position_embeddings for config in bodies), default=sys.maxsize)
    if max_length is not None:
        check_length(max_length, positions)
    if bodies or max_length is not None:
        encoder.max_seq_length = min(max_length or encoder.max_seq_length or sys.maxsize, positions)

    # Padding on the left would shift positions, so that vectors depended on their batch.
    if bodies:
        encoder.tokenizer.padding_side = "right"

    # A wrong tokenizer gives vectors without an error: its ids must be rows of the model's table.
    vocab = encoder.tokenizer.get_vocab()
    if len(vocab.keys() - {*encoder.tokenizer.all_special_tokens}) < 2:  # transformers 5 makes up [UNK], [CLS], …
        raise ValueError("the model has no tokenizer, only special tokens: put its tokenizer.json or vocab.txt there")
    last = max(vocab.values())
    if words := [config.vocab_size for config in bodies if last >= config.vocab_size]:
        raise ValueError(
            f"the tokenizer has ids up to {last}, but the model's vocab_size is {words[0]}: they belong to different"
            " checkpoints"
        )
