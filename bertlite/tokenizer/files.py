"""Read and write a tokenizer's files: vocab.txt, tokenizer.json, tokenizer_config.json and special_tokens_map.json."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertlite.checkpoint.files import Folder, Repository, Source, first_existing, locate
from bertlite.checkpoint.folders import replacing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROLES = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CLASSES = (  # each tokenizer_class that tokenizes as BERT does, or leaves it to its tokenizer.json
    "BertTokenizer",
    "BertTokenizerFast",
    "DistilBertTokenizer",
    "DistilBertTokenizerFast",
    "ElectraTokenizer",
    "ElectraTokenizerFast",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)
SETTINGS = (  # keys of tokenizer_config.json that are arguments of BertTokenizer
    "do_lower_case",
    "strip_accents",
    "tokenize_chinese_chars",
    "padding_side",
    "truncation_side",
    "clean_up_tokenization_spaces",
)
NORMALIZER = {  # key of the normalizer in tokenizer.json: argument of BertTokenizer
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
    "clean_text": "clean_text",
}
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")  # of an added token
SUPERSEDED = re.compile(r"vocab\.txt|special_tokens_map\.json|added_tokens\.json")  # old files that a save removes


# Reading -------------------------------------------------------------------------------------------------------------


def find_tokenizer(source: Source) -> tuple[Folder | Repository, Path]:
    """Return the place of a checkpoint's files, and its tokenizer.json or else its vocab.txt.

    Raises:
        FileNotFoundError: there is no such checkpoint, or it has neither.
    """
    path = Path(source.name).expanduser()
    place = locate(source)
    return place, first_existing(place, [path.name] if path.is_file() else ["tokenizer.json", "vocab.txt"])


def read_arguments(place: Folder | Repository, found: Path) -> dict[str, Any]:
    """Return the arguments of BertTokenizer that a checkpoint's files state; tokenizer_config.json comes first.

    Args:
        found: the tokenizer.json or vocab.txt of `find_tokenizer`.

    Raises:
        ValueError: a file is damaged, or belongs to another kind of tokenizer.
    """
    config = read_config(place)
    read = read_tokenizer(found) if found.suffix == ".json" else read_vocabulary(found, place)
    return {**read, **config, "added_tokens": {**read["added_tokens"], **config["added_tokens"]}}


@contextmanager
def errors_with_path(path: Path) -> Iterator[None]:
    """Raise the errors that a tokenizer's files cause, as a ValueError that names the file."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        raise ValueError(message if str(path.parent) in message else f"{path}: {message}") from None
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        kind = type(error).__name__
        raise ValueError(f"{path}, or a file beside it, is damaged ({kind}: {error}): fetch it again") from None


def number_tokens(vocab: Sequence[str] | PathLike[str] | str) -> dict[str, int]:
    """Return {token: id} for a vocab.txt, one token per line, or for a list; the last of equal tokens counts.

    Raises:
        ValueError: the file is not UTF-8, or empty.
    """
    if isinstance(vocab, str | PathLike):
        try:
            lines = Path(vocab).expanduser().read_bytes().decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{vocab} is no vocabulary: it is not UTF-8 ({error})") from None
        vocab = [line.rstrip() for line in lines]
    if not any(vocab):
        raise ValueError("the vocabulary is empty")
    return {token: number for number, token in enumerate(vocab)}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: the file holds none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON, or cut short ({error}): fetch it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}, not an object")
    return values


def read_vocabulary(path: Path, place: Folder | Repository) -> dict[str, Any]:
    """Read a vocab.txt, and the added_tokens.json that transformers 4 writes beside it."""
    beside = place.get("added_tokens.json")
    added = {} if beside is None else {index(number): {"content": t} for t, number in read_json(beside).items()}
    return {"vocab": number_tokens(path), "added_tokens": added}


def read_tokenizer(path: Path) -> dict[str, Any]:
    """Read a tokenizer.json, except its padding and truncation.

    Raises:
        ValueError: it is damaged, or does not tokenize as BERT does.
    """
    values = read_json(path)
    model, normalizer, splitter = ((values.get(key) or {}) for key in ("model", "normalizer", "pre_tokenizer"))
    # Before 2021 a model did not state its type; WordPiece's is the only one with a longest word.
    parts = {
        "model": (model.get("type") or ("WordPiece" if "max_input_chars_per_word" in model else None), "WordPiece"),
        "prefix": (model.get("continuing_subword_prefix", "##"), "##"),
        "normalizer": (normalizer.get("type"), "BertNormalizer"),
        "pre_tokenizer": (splitter.get("type"), "BertPreTokenizer"),
    }
    for part, (found, wanted) in parts.items():
        if found != wanted:
            raise ValueError(f"{path} is not for BERT: its {part} is {found}, not {wanted}; transformers may load it")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise ValueError(f"{path} has no vocabulary")
    return {
        "vocab": vocab,
        "added_tokens": {token["id"]: token for token in values.get("added_tokens") or ()},
        "unk_token": model["unk_token"],
        "max_input_chars_per_word": model.get("max_input_chars_per_word", 100),
        **{ours: normalizer[theirs] for theirs, ours in NORMALIZER.items() if theirs in normalizer},
    }


def read_config(place: Folder | Repository) -> dict[str, Any]:
    """Read tokenizer_config.json and the special tokens of special_tokens_map.json.

    Raises:
        ValueError: they belong to another kind of tokenizer.
    """
    paths = [place.get(name) for name in ("special_tokens_map.json", "tokenizer_config.json")]
    tokens, config = (read_json(path) if path is not None else {} for path in paths)
    kind = config.get("tokenizer_class") or "BertTokenizer"
    if kind not in CLASSES:
        raise ValueError(f"{paths[1]} is for a {kind}; bertlite has BertTokenizer alone: load it with transformers")
    if config.get("do_basic_tokenize") is False:
        raise ValueError(f"{paths[1]} has do_basic_tokenize false, which only transformers 4's slow tokenizer honours")
    named = {role: token_content(values[role]) for values in (tokens, config) for role in ROLES if values.get(role)}
    limit = config.get("model_max_length", config.get("max_len"))
    return {
        **{name: config[name] for name in SETTINGS if name in config},
        **named,
        **({} if limit is None else {"model_max_length": int(limit)}),
        "added_tokens": {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()},
    }


def token_content(token: str | Mapping[str, Any]) -> str:
    """Return the string of a token, which the files write as a string or as an object."""
    return token if isinstance(token, str) else token["content"]


# Writing -------------------------------------------------------------------------------------------------------------


def write_files(folder: Path, backend: "Tokenizer", config: Mapping[str, Any]) -> tuple[str, ...]:
    """Replace a folder in one step by one with a tokenizer's files; other files in it are kept.

    Args:
        config: the content of tokenizer_config.json.

    Returns:
        The paths of the files.  A vocabulary whose ids have gaps has no vocab.txt.
    """
    words = sorted(backend.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    with replacing(folder, superseded=SUPERSEDED) as new:
        backend.save(str(new / "tokenizer.json"))
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (new / "tokenizer_config.json").write_text(text, encoding="utf-8")
        if [number for _, number in words] == list(range(len(words))):
            (new / "vocab.txt").write_text("".join(f"{word}\n" for word, _ in words), encoding="utf-8", newline="\n")
        written = sorted(path.name for path in new.iterdir())
    return tuple(str(folder / name) for name in written)
