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
from bertlite.config import read_json_object
from bertlite.tokenizer.encoding import explained_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BERT_ROLES = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "SEP", "PAD", "CLS", "MASK")}
ROBERTA_ROLES = {
    "cls_token": "<s>",
    "sep_token": "</s>",
    **{f"{name}_token": f"<{name}>" for name in ("unk", "pad", "mask")},
    "bos_token": "<s>",
    "eos_token": "</s>",
}
ROLES = ("bos_token", "eos_token", *BERT_ROLES)
EXTRA = ("additional_special_tokens", "extra_special_tokens")  # the second is the name in transformers 5
SETTINGS = ("padding_side", "truncation_side", "clean_up_tokenization_spaces")  # of any tokenizer
BERT_SETTINGS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")  # of BERT's normalizer
NORMALIZER = {  # key of that normalizer in tokenizer.json: argument of BertTokenizer
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
    "clean_text": "clean_text",
}
ARGUMENTS = (*ROLES, *SETTINGS, "model_max_length", "added_tokens")  # of a tokenizer of other parts
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")  # each makes its parts from a vocabulary
ROBERTA_CLASSES = ("RobertaTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer", "MPNetTokenizer")
# These work in Python, beyond what a tokenizer.json can hold.
PYTHON_CLASSES = ("BertJapaneseTokenizer", "BertweetTokenizer", "PhobertTokenizer", "TapasTokenizer")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")  # of an added token
NO_LIMIT = 10**30  # transformers' value for an unknown model_max_length
LOCAL = ("name_or_path", "_name_or_path", "tokenizer_file", "special_tokens_map_file")  # paths of another machine
SUPERSEDED = re.compile(  # old files that a save removes
    r"vocab\.(txt|json)|merges\.txt|(sentencepiece\.bpe|spiece)\.model|special_tokens_map\.json|added_tokens\.json"
)


# Reading -------------------------------------------------------------------------------------------------------------


def find_tokenizer(source: Source) -> tuple[Folder | Repository, Path]:
    """Return the place of a checkpoint's files, and its tokenizer.json or else its vocab.txt.

    Raises:
        FileNotFoundError: there is no such checkpoint, or it has neither.
    """
    path = Path(source.name).expanduser()
    place = locate(source)
    return place, first_existing(place, [path.name] if path.is_file() else ["tokenizer.json", "vocab.txt"])


def read_arguments(
    place: Folder | Repository, found: Path
) -> tuple[dict[str, Any], dict[str, Any], "Tokenizer | None"]:
    """Return the settings of a checkpoint's tokenizer.

    Args:
        found: the tokenizer.json or vocab.txt of `find_tokenizer`.

    Returns:
        Arguments of `BertTokenizer`; the content of special_tokens_map.json and tokenizer_config.json, which override
        tokenizer.json; and the Rust tokenizer, if it has other parts than BERT's.  If no file limits the length, the
        positions of the model beside them do.

    Raises:
        ValueError: a file is damaged, or part of the tokenizer is not in the files.
    """
    from tokenizers import Tokenizer

    paths = [place.get(name) for name in ("special_tokens_map.json", "tokenizer_config.json")]
    tokens, config = (read_json_object(path) if path is not None else {} for path in paths)
    kind = (config.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast")
    is_bert, is_json = kind in BERT_CLASSES, found.suffix == ".json"
    if kind in PYTHON_CLASSES or config.get("auto_map") or not (is_bert or is_json):
        raise ValueError(
            f"{paths[1]} is for a {kind}, and {found.name} does not hold all of it: load it with transformers"
        )
    if config.get("do_basic_tokenize") is False:
        raise ValueError(f"{paths[1]} has do_basic_tokenize false, which only transformers 4's slow tokenizer honours")
    read = read_tokenizer(found) if is_json else read_vocabulary(found, place)
    config = {**tokens, **config}
    stated = {name: config[name] for name in (*SETTINGS, *BERT_SETTINGS, "never_split") if name in config}
    stated |= {role: token_content(config[role]) for role in ROLES if config.get(role)}
    limit = config.get("model_max_length", config.get("max_len"))
    limit = read_positions(place) if limit is None or limit >= NO_LIMIT else limit
    if limit is not None:
        stated["model_max_length"] = int(limit)
    more = {int(number): token for number, token in (config.get("added_tokens_decoder") or {}).items()}
    added = {**read.pop("added_tokens"), **more}
    extra = extra_tokens(config)
    stated["added_tokens"] = {i: {**t, "special": t.get("special") or t["content"] in extra} for i, t in added.items()}
    if is_bert and "vocab" in read:
        return {**read, **stated}, config, None
    with explained_errors((), f"{found} is not a tokenizer.json that this version of tokenizers reads"):
        backend = Tokenizer.from_file(str(found))
    unnamed = not config.get("tokenizer_class") and backend.token_to_id("[CLS]") is None
    roles = ROBERTA_ROLES if unnamed or kind in ROBERTA_CLASSES else BERT_ROLES if is_bert else {}
    named = {role: token for role, token in roles.items() if backend.token_to_id(token) is not None}
    arguments = {**named, **read, **stated}
    return {name: arguments[name] for name in ARGUMENTS if name in arguments}, config, backend


def read_positions(place: Folder | Repository) -> int | None:
    """Return how many tokens a checkpoint's model has positions for; None if it is of no known family."""
    path = place.get("config.json")
    if path is None:
        return None
    from bertlite.checkpoint.families import FAMILIES

    values = read_json_object(path)
    family = FAMILIES.get(str(values.get("model_type", "bert")))
    positions = values.get("max_position_embeddings")
    if family is None or not isinstance(positions, int):
        return None
    pad = {**family.defaults, **values}.get("pad_token_id")
    return positions - (pad + 1 if "positions_skip_padding" in family.fixed and isinstance(pad, int) else 0)


def extra_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the special tokens of a tokenizer_config.json that have no role of their own."""
    found = [config.get(name) or () for name in EXTRA]
    return [token_content(token) for each in found for token in (each.values() if isinstance(each, dict) else each)]


@contextmanager
def errors_with_path(path: Path) -> Iterator[None]:
    """Turn errors in a tokenizer's files into a ValueError that names the file."""
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
            raise ValueError(f"{vocab} is not a vocabulary: it is not UTF-8 ({error})") from None
        vocab = [line.rstrip() for line in lines]
    if not any(vocab):
        raise ValueError("the vocabulary is empty")
    return {token: number for number, token in enumerate(vocab)}


def read_vocabulary(path: Path, place: Folder | Repository) -> dict[str, Any]:
    """Read a vocab.txt, and the added_tokens.json that transformers 4 writes beside it."""
    beside = place.get("added_tokens.json")
    added = {} if beside is None else {index(number): {"content": t} for t, number in read_json_object(beside).items()}
    return {"vocab": number_tokens(path), "added_tokens": added}


def read_tokenizer(path: Path) -> dict[str, Any]:
    """Read a tokenizer.json: its vocabulary and the settings of its parts only if all parts are BERT's."""
    values = read_json_object(path)
    names = ("model", "normalizer", "pre_tokenizer", "padding", "truncation")
    model, normalizer, splitter, padding, truncation = ((values.get(name) or {}) for name in names)
    read = {"added_tokens": {token["id"]: token for token in values.get("added_tokens") or ()}}
    if padding:
        read |= {"padding_side": padding["direction"].lower(), "pad_token": padding["pad_token"]}
    if truncation:
        read["truncation_side"] = truncation.get("direction", "Right").lower()  # before 2022 always right
    # Before 2021 a model did not state its type; WordPiece's is the only one with a longest word.
    kind = model.get("type") or ("WordPiece" if "max_input_chars_per_word" in model else None)
    parts = (kind, model.get("continuing_subword_prefix", "##"), normalizer.get("type"), splitter.get("type"))
    if parts != ("WordPiece", "##", "BertNormalizer", "BertPreTokenizer"):
        return read
    if not isinstance(model.get("vocab"), dict) or not model["vocab"]:
        raise ValueError(f"{path} has no vocabulary")
    return {
        **read,
        "vocab": model["vocab"],
        "unk_token": model["unk_token"],
        "max_input_chars_per_word": model.get("max_input_chars_per_word", 100),
        **{ours: normalizer[theirs] for theirs, ours in NORMALIZER.items() if theirs in normalizer},
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
        The paths of the files.  Only WordPiece has a vocab.txt, and none whose ids have gaps.
    """
    from tokenizers.models import WordPiece

    words = sorted(backend.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    with replacing(folder, superseded=SUPERSEDED) as new:
        backend.save(str(new / "tokenizer.json"))
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (new / "tokenizer_config.json").write_text(text, encoding="utf-8")
        if isinstance(backend.model, WordPiece) and [number for _, number in words] == list(range(len(words))):
            (new / "vocab.txt").write_text("".join(f"{word}\n" for word, _ in words), encoding="utf-8", newline="\n")
        written = sorted(path.name for path in new.iterdir())
    return tuple(str(folder / name) for name in written)
