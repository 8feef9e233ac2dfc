"""Options of the calls of a packed folder, and answers to arguments of sentence-transformers that it lacks."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

Progress = Callable[[int, int], None]
ARRAYS = "results are numpy arrays; torch.from_numpy makes tensors of them"
ACTIVATION = "the folder has the activation of its checkpoint: change that and pack it again"
THREADS = "one object uses all processors; threads= of load limits them"
HABITS: dict[str, tuple[Any, str]] = {  # {argument of sentence-transformers: (the value that holds here, the way out)}
    "convert_to_numpy": (True, ARRAYS),
    "convert_to_tensor": (False, ARRAYS),
    "output_value": (
        "sentence_embedding",
        "the folder gives vectors of texts; BertModel of bertlite gives all tokens'",
    ),
    "precision": ("float32", "vectors are float32; quantize_embeddings of sentence-transformers makes them smaller"),
    "truncate_dim": (None, "take vectors[:, :n], or state truncate_dim before you pack the model"),
    "activation_fn": (None, ACTIVATION),
    "apply_softmax": (False, ACTIVATION),
    "device": ("cpu", "the runtime computes on the CPU"),
    "dtype": (None, "the folder keeps the dtype that it was packed in: pack the checkpoint again"),
    "pool": (None, THREADS),
    "num_workers": (0, THREADS),
    "chunk_size": (None, "batch_size= limits the texts that run at once"),
}
PROMPT = "encode(texts, prompt_name={!r}) does it, if the folder has that prompt"
NAMES = {  # {method or attribute of sentence-transformers: the way to it here}
    "encode_query": PROMPT.format("query"),
    "encode_document": PROMPT.format("document"),
    "get_sentence_embedding_dimension": "it is dimension",
    "prompts": "it is processing.prompts",
    "tokenizer": "it is texts.tokenizer",
}


class RunOptions(TypedDict, total=False):
    """Options of `encode`, `predict`, `rank` and `tag`, which change no result.

    Args:
        batch_size: the most texts that run at once, which saves memory; by default only `batch_tokens` limits them.
        show_progress_bar: write the number of texts done to standard error.
        progress: called after every batch with the number of texts done and the number of all texts.
    """

    batch_size: int | None
    show_progress_bar: bool | None
    progress: Progress | None


def check_options(call: str, given: Mapping[str, Any]) -> None:
    """Raise TypeError, with the way out, for an argument that only another library's call has."""
    for name, value in given.items():
        if name not in HABITS:
            raise TypeError(f"{call}() has no argument {name!r}")
        done, way_out = HABITS[name]
        if value is not None and str(value) != str(done):  # a device of torch has the name of ours
            raise TypeError(f"{call}() has no {name}={value!r:.80}: {way_out}")


def print_progress(done: int, total: int) -> None:
    """Write the number of texts done on standard error, over the number before."""
    print(f"\r{done:,} of {total:,} texts", end="\n" if done == total else "", file=sys.stderr, flush=True)
