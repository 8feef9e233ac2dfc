"""One vector per text: tokens in batches of similar length, BERT, pooling.

Shapes:  B sequences · T tokens, of all sequences together · D hidden
"""

import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.checkpoint.families import read_config
from bertlite.checkpoint.files import Source, find_checkpoint, locate
from bertlite.checkpoint.saving import dtype_name
from bertlite.inference import InferenceModel, optimize_for_inference
from bertlite.inference.optimize import check_backend, parse_compute_dtype
from bertlite.inference.pooling import POOLINGS, pool, read_settings
from bertlite.models.base import BertModel
from bertlite.support.batching import token_budget_batches
from bertlite.support.records import sha256_of
from bertlite.tokenizer import BertTokenizer

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

MAX_TOKENS = 4096  # in a batch
MEMORY_ERRORS = (torch.OutOfMemoryError, MemoryError)
NO_PRIMITIVE = "could not create a primitive"  # oneDNN's message if memory runs out, or a matmul is unsupported


log = logging.getLogger("bertlite")


class Embedder:
    """Texts to vectors, with one checkpoint and one pooling.

    An embedder can be pickled: it finds the checkpoint and reads its settings when it is made, and loads the model
    when a process first uses it.  Called with a batch of columns, it adds a column of vectors; called with texts, it
    returns their vectors.  So it can be passed directly to

        datasets:  dataset.map(embedder, batched=True)
        Ray Data:  dataset.map_batches(Embedder, fn_constructor_args=(model,), compute=ActorPoolStrategy(size=2))
        Spark:     predict_batch_udf(lambda: embedder, return_type=ArrayType(FloatType()), batch_size=1024)

    Padding is not computed, and on the CPU `optimize_for_inference` takes the native kernels.  Where there are none,
    or not for this dtype (float16, float64), a warning says so when the model is loaded.

    Args:
        model: a hub id or a folder.
        pooling: "cls", "mean" or "max"; by default that of the checkpoint, in sentence-transformers' format, else
            "mean".
        normalize: give vectors length 1; by default as the checkpoint states, else not.
        prompt: put before each text; or `prompt_name`, one of the checkpoint's `prompts`.  By default that of its
            `default_prompt_name`, else none.
        truncate_dim: keep only so many numbers of each vector; by default as the checkpoint states, else all.  As in
            sentence-transformers, vectors that the checkpoint normalises are truncated after that, and with
            `normalize=True` before.
        dtype: what the model computes in; by default the checkpoint's own dtype.  "int8" rounds the layers' matrices
            and their inputs to 8 bits, only on the CPU.
        device: "cpu", "cuda" or "cuda:1".
        backend: of `optimize_for_inference`.  "auto" takes the native kernels if possible; "native" raises if it is
            not, when the model is loaded, as does "int8"; "plain" is the model itself.
        max_length: in tokens; longer texts are truncated.  By default the checkpoint's, at most the number of the
            model's positions.
        max_tokens: tokens in a batch; a longer text is a batch of its own.
        text, vector: names of the column to read and of the column to add.
        revision, cache_dir, token, local_files_only: as for `huggingface_hub`.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: a setting that is not one of those above, or a checkpoint that does more than pool and normalise.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate_dim: int | None = None,
        dtype: torch.dtype | str | None = None,
        device: str = "cpu",
        backend: str = "auto",
        max_length: int | None = None,
        max_tokens: int = MAX_TOKENS,
        text: str = "text",
        vector: str = "vector",
        revision: str | None = None,
        cache_dir: str | PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> None:
        if pooling is not None and pooling not in POOLINGS:
            raise ValueError(f"pooling {pooling!r} is unknown; have: {', '.join(POOLINGS)}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be 1 or more")
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {device!r}: this torch ({torch.__version__}) sees no CUDA device")
        self.dtype = parse_compute_dtype(dtype)
        check_backend(backend)
        self.backend = backend
        self.source = Source(model, revision, None, None, cache_dir, token, local_files_only)
        self.device, self.max_tokens, self.text, self.vector = device, max_tokens, text, vector
        stated = read_settings(self.source)
        self.pooling = pooling or stated.get("pooling") or "mean"
        self.normalize = bool(stated.get("normalize")) if normalize is None else normalize
        if self.pooling not in POOLINGS:
            raise ValueError(f"{model} pools by {self.pooling!r}; choose pooling={' or '.join(map(repr, POOLINGS))}")
        self.include_prompt, self.do_lower_case = (
            stated.get("include_prompt", True),
            stated.get("do_lower_case", False),
        )
        self.prompt, self.prompts = "", stated.get("prompts", {})
        if prompt is None and prompt_name is None:
            prompt_name = stated.get("default_prompt_name")
        self.prompt = self.find_prompt(prompt, prompt_name)
        config = read_config(self.source)
        kept = stated.get("truncate_dim") if truncate_dim is None else truncate_dim
        if kept is not None and (not isinstance(kept, int) or kept < 1):
            raise ValueError(f"truncate_dim is {kept!r}; it must be 1 or more")
        self.dimension, positions = min(config.hidden_size, kept or sys.maxsize), config.max_position_embeddings
        self.truncate_first = normalize is True or self.dimension == config.hidden_size
        if max_length is not None and not 3 <= max_length <= positions:
            raise ValueError(f"max_length is {max_length}; this model takes 3 to {positions} tokens")
        self.max_length = max_length or int(min(stated.get("max_length") or positions, positions))
        self._loaded: tuple[BertTokenizer, BertModel | InferenceModel] | None = None

    @property
    def settings(self) -> dict[str, str | int | None]:
        """All that the vectors depend on beside the checkpoint; JSON-ready."""
        dtype = None if self.dtype is None else dtype_name(self.dtype)
        return {
            "dtype": dtype,
            "pooling": self.pooling,
            "normalize": self.normalize if self.truncate_first or not self.normalize else "before truncation",
            "max_length": self.max_length,
            "prompt": self.prompt,
            "include_prompt": self.include_prompt,
            "do_lower_case": self.do_lower_case,
        }

    def fingerprint(self) -> str:
        """Return the SHA-256 of the checkpoint's files: weights, config and tokenizer."""
        files, place = find_checkpoint(self.source), locate(self.source)
        paths = [files.config, *(sorted(files.shards) or [files.weights])]
        names = (
            "tokenizer.json",
            "vocab.txt",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
        )
        found = (place.get(name) for name in names)
        return sha256_of(*paths, *(path for path in found if path is not None))

    def load(self) -> tuple[BertTokenizer, BertModel | InferenceModel]:
        """Return the tokenizer and the model, loaded once in a process."""
        if self._loaded is None:
            source = self.source
            hub: dict[str, Any] = {
                "revision": source.revision,
                "cache_dir": source.cache_dir,
                "token": source.token,
                "local_files_only": source.local_files_only,
            }
            tokenizer = BertTokenizer.from_pretrained(source.name, **hub)
            stored = torch.float32 if self.dtype == torch.int8 else self.dtype
            plain: dict[str, Any] = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}
            model = BertModel.from_pretrained(
                source.name, dtype=stored, device=self.device, add_pooling_layer=False, **hub, **plain
            )
            last, words = max(tokenizer.get_vocab().values()), model.config.vocab_size
            if last >= words:
                raise ValueError(
                    f"{source.name}: the tokenizer has ids up to {last}, but the model's vocab_size is {words}:"
                    " they are of different checkpoints"
                )
            if self.do_lower_case:
                lower_case_(tokenizer)
            self._loaded = tokenizer, pack_weights(model, self.dtype, self.backend)
        return self._loaded

    def find_prompt(self, prompt: str | None = None, prompt_name: str | None = None) -> str:
        """Return a prompt, by default the embedder's own.

        Raises:
            ValueError: the checkpoint has no prompt of this name, or both were given.
        """
        if prompt is not None and prompt_name is not None:
            raise ValueError(f"prompt {prompt!r:.80} and prompt_name {prompt_name!r} were given: pass one of them")
        if prompt_name is not None:
            if prompt_name not in self.prompts:
                have = ", ".join(self.prompts) or "none"
                raise ValueError(f"{self.source.name} has no prompt {prompt_name!r}; have: {have}. Or pass prompt=")
            prompt = self.prompts[prompt_name]
        prompt = self.prompt if prompt is None else prompt
        if not isinstance(prompt, str):
            raise ValueError(f"the prompt is {prompt!r:.80}; it must be a string")
        return prompt

    def encode(
        self, texts: str | Sequence[str], *, prompt: str | None = None, prompt_name: str | None = None
    ) -> "NDArray[float32]":
        """Return the vectors of texts, in their order: (texts, D), float32; for a single text, (D,).

        Args:
            prompt, prompt_name: instead of the embedder's own; "" is no prompt.

        Raises:
            ValueError: a text that is not a string, or a prompt that the checkpoint does not have.
        """
        if isinstance(texts, str):
            vector: NDArray[float32] = self.encode([texts], prompt=prompt, prompt_name=prompt_name)[0]
            return vector
        prompt = self.find_prompt(prompt, prompt_name)
        return self.encode_ids(self.tokenize(texts, prompt), prompt=prompt)

    def tokenize(self, texts: Sequence[str], prompt: str | None = None) -> list[list[int]]:
        """Return the token ids of texts, special ones included, with a prompt before each.

        Raises:
            ValueError: a text that is not a string, or one text that is not in a list.
        """
        if isinstance(texts, str):
            raise ValueError(f"texts is the string {texts!r:.80}; pass a list, such as [text]")
        tokenizer, prompt = self.load()[0], self.find_prompt(prompt)
        encoded = tokenizer(
            [prompt + text if isinstance(text, str) else text for text in texts],
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return list(encoded["input_ids"])

    def count_skipped(self, prompt: str) -> int:
        """Return how many tokens pooling skips: those of the prompt and [CLS], if the checkpoint says so; else 0."""
        if self.include_prompt or not prompt:
            return 0
        (ids,) = self.tokenize([""], prompt)
        return len(ids) - (ids[-1] in self.load()[0].all_special_ids)

    def encode_ids(
        self,
        ids: Sequence[Sequence[int]],
        progress: Callable[[Sequence[int]], None] = lambda _: None,
        *,
        prompt: str | None = None,
    ) -> "NDArray[float32]":
        """Return the vectors of token ids, in their order: (texts, D), float32.

        Args:
            progress: called after every batch with the numbers of the texts in it.
            prompt: the prompt at the start of the ids.

        Raises:
            ValueError: a text is only the prompt, and pooling skips that.
        """
        import numpy as np

        vectors = np.empty((len(ids), self.dimension), dtype=np.float32)
        if not ids:
            return vectors
        skipped = self.count_skipped(self.find_prompt(prompt))
        alone = next((i for i, row in enumerate(ids) if len(row) <= skipped), None)
        if alone is not None:
            raise ValueError(f"text {alone} has no token beside the {skipped} of the prompt, which are not pooled")
        costs = [min(len(row), self.max_tokens) for row in ids]
        batches = list(token_budget_batches(costs, self.max_tokens, packed=True))
        random.Random(0).shuffle(batches)  # so that the rate so far predicts the time left
        for rows in batches:
            vectors[list(rows)] = self.embed_within_memory([ids[row] for row in rows], skipped).numpy()
            progress(rows)
        return vectors

    def embed_within_memory(self, ids: Sequence[Sequence[int]], skipped: int = 0) -> Tensor:
        """Return the result of `embed` on the CPU; split the batch in halves if it does not fit into memory.

        Raises:
            torch.OutOfMemoryError: a single text does not fit.
        """
        try:
            return self.embed(ids, skipped).cpu()
        except (RuntimeError, MemoryError) as error:
            known = isinstance(error, MEMORY_ERRORS) or "can't allocate memory" in str(error)  # torch's on the CPU
            if not known and (len(ids) == 1 or NO_PRIMITIVE not in str(error)):
                raise
            if len(ids) == 1:
                advice = "lower max_length, or use a smaller dtype"
                message = f"one text of {len(ids[0])} tokens does not fit into memory: {advice}"
                raise torch.OutOfMemoryError(message) from None
        half = len(ids) // 2  # outside the handler, whose traceback keeps the memory of the whole batch
        return torch.cat([self.embed_within_memory(part, skipped) for part in (ids[:half], ids[half:])])

    @torch.inference_mode()
    def embed(self, ids: Sequence[Sequence[int]], skipped: int = 0) -> Tensor:
        """Return the vectors of one batch of token ids: (B, D), float32, on the device.  No padding is computed.

        Args:
            skipped: tokens at the start of each text that are not pooled.
        """
        _, model = self.load()
        lengths, first_only = [len(row) for row in ids], self.pooling == "cls" and not skipped
        tokens = torch.tensor([token for row in ids for token in row], dtype=torch.long, device=self.device)
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)
        states = model(tokens, cu_seqlens=ends, first_token_only=first_only).last_hidden_state
        if skipped:
            states = torch.cat([part[skipped:] for part in states.split(lengths)])
        lengths = [1 if first_only else length - skipped for length in lengths]
        vectors = pool(states, lengths, self.pooling)
        if self.normalize and not self.truncate_first:
            vectors = F.normalize(vectors, dim=-1)
        vectors = vectors[:, : self.dimension]
        return (F.normalize(vectors, dim=-1) if self.normalize and self.truncate_first else vectors).float()

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
        return {**vars(self), "_loaded": None}


def to_texts(column: Any) -> str | list[str]:
    """Return a column of texts (numpy, pandas, pyarrow or any sequence) as a list; a single text unchanged."""
    if isinstance(column, str):
        return column
    for method in ("to_pylist", "tolist"):
        if hasattr(column, method):
            return list(getattr(column, method)())
    return list(column)


def lower_case_(tokenizer: BertTokenizer) -> None:
    """Let a tokenizer lower-case texts before its own normalizer, as sentence-transformers does."""
    from tokenizers import normalizers

    backend = tokenizer.backend_tokenizer
    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])


def pack_weights(
    model: BertModel, dtype: torch.dtype | None = None, backend: str = "auto"
) -> BertModel | InferenceModel:
    """Return a model that `optimize_for_inference` made, in its own dtype if none is named.

    With "auto" it is the model itself on a GPU and, with a warning in the log, if that raises; int8 raises.
    """
    if backend != "auto":
        return optimize_for_inference(model, dtype=dtype, backend=backend)
    if model.device.type != "cpu" and dtype != torch.int8:
        return model
    try:
        return optimize_for_inference(model, dtype=dtype)
    except (ValueError, RuntimeError) as error:  # for this device or dtype; for this torch or processor
        if dtype == torch.int8:
            raise
        log.warning("embedding runs the plain model: %s", str(error).partition(";")[0])
        return model
