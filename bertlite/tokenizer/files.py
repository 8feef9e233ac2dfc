"""Read and write a tokenizer's files: vocab.txt, tokenizer.json, tokenizer_config.json and special_tokens_map.json.

Any of these files are read into the content of a tokenizer.json and its settings.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index, itemgetter
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertlite.checkpoint.files import Place
from bertlite.checkpoint.folders import check_output, replacing
from bertlite.support.files import read_json_object
from bertlite.tokenizer.encoding import explained_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from bertlite.checkpoint.families import Family

BERT_ROLES = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "SEP", "PAD", "CLS", "MASK")}
ROBERTA_ROLES = {f"{name}_token": f"<{name}>" for name in ("unk", "pad", "mask")}
ROBERTA_ROLES |= {"cls_token": "<s>", "sep_token": "</s>", "bos_token": "<s>", "eos_token": "</s>"}
DEBERTA_ROLES = {**BERT_ROLES, "bos_token": "[CLS]", "eos_token": "[SEP]"}
ROLES = ("bos_token", "eos_token", *BERT_ROLES)
SIDES = ("padding_side", "truncation_side")
ARGUMENTS = (*ROLES, *SIDES, "model_max_length")  # every tokenizer takes these
NORMALIZER = {"do_lower_case": "lowercase", "strip_accents": "strip_accents"}  # {setting of BERT's parts: its key}
NORMALIZER |= {"tokenize_chinese_chars": "handle_chinese_chars"}
EXTRA = ("additional_special_tokens", "extra_special_tokens")  # the second is the name in transformers 5
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")  # each makes its parts from a vocabulary
ROBERTA_CLASSES = ("RobertaTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer", "MPNetTokenizer")
SEGMENTED = ("BertTokenizer", "ElectraTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer")  # they give token types
PYTHON_CLASSES = ("BertJapaneseTokenizer", "BertweetTokenizer", "PhobertTokenizer", "TapasTokenizer")  # in part
# Flags of an added token that a file does not state.
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": True, "special": False}
NO_LIMIT = 10**30  # transformers' value for an unknown model_max_length
LOCAL = ("name_or_path", "_name_or_path", "tokenizer_file", "special_tokens_map_file")  # paths of another machine
NOT_KEPT = (*EXTRA, *LOCAL, "max_len", "added_tokens_decoder")  # keys of a tokenizer_config.json
SUPERSEDED = re.compile(  # old files that a save removes
    r"vocab\.(txt|json)|merges\.txt|(sentencepiece\.bpe|spiece|spm)\.model|special_tokens_map\.json|added_tokens\.json"
)


def read_files(place: Place, found: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Read a checkpoint's tokenizer.

    Args:
        found: its tokenizer.json, or else its vocab.txt.

    Returns:
        The content of tokenizer.json, or one made of vocab.txt; arguments of `BertTokenizer`; and the content of
        special_tokens_map.json and tokenizer_config.json, which override tokenizer.json.  Settings of BERT's parts
        are among the arguments only if all parts are BERT's.  If no file limits the length, the model's positions do.

    Raises:
        ValueError: a file is damaged, or part of the tokenizer is not in the files.
    """
    path = place.get("tokenizer_config.json")
    tokens, config = place.values("special_tokens_map.json"), place.values("tokenizer_config.json")

    # The files do not hold the rules of a tokenizer with Python code of its own, so it is refused.
    kind = (config.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast")
    is_bert, is_json = kind in BERT_CLASSES, found.suffix == ".json"
    if kind in PYTHON_CLASSES or config.get("auto_map") or not (is_bert or is_json):
        raise ValueError(
            f"{path} is for a {kind}, and {found.name} does not hold all of it: load it with transformers"
        )
    if config.get("do_basic_tokenize") is False:
        raise ValueError(f"{path} has do_basic_tokenize false, which only transformers 4's slow tokenizer honours")

    # As in transformers both files go before tokenizer.json, and the map first if the config has no added tokens.
    config = {**tokens, **config} if "added_tokens_decoder" in config else {**config, **tokens}
    content = read_json_object(found) if is_json else word_pieces(number_tokens(found))
    add_tokens_(content, place, config, numbered=not is_json)
    padding, truncation = (content.get(name) or {} for name in ("padding", "truncation"))

    stated = {
        "padding_side": padding.get("direction", "Right").lower(),
        "truncation_side": truncation.get("direction", "Right").lower(),  # before 2022 always right
        **({"pad_token": padding["pad_token"]} if padding else {}),
        **{name: config[name] for name in SIDES if name in config},
        **{role: token_content(config[role]) for role in ROLES if config.get(role)},
    }

    # Settings of BERT's parts: by their names in the config, else as the parts state them.
    alone = path is None and place.get("config.json") is None  # then transformers uses the parts as they are
    parts = {**word_pieces({})["normalizer"], **((alone and content.get("normalizer")) or {})}
    own = {ours: config.get(ours, parts.get(theirs)) for ours, theirs in NORMALIZER.items()}
    if kind == "MPNetTokenizer" and has_berts_parts(content):  # with its own special tokens
        content["normalizer"] |= {theirs: own[ours] for ours, theirs in NORMALIZER.items()}

    # Roles of special tokens have defaults, which differ by family, for tokens that the vocabulary has.
    if is_bert and has_berts_parts(content):
        stated = {**BERT_ROLES, "unk_token": content["model"]["unk_token"], **own, **stated}
    else:
        vocab, added = content["model"].get("vocab"), content.get("added_tokens") or ()
        names = {*(vocab if isinstance(vocab, dict) else ()), *(token["content"] for token in added)}
        unnamed = not config.get("tokenizer_class") and "[CLS]" not in names
        roles = ROBERTA_ROLES if unnamed or kind in ROBERTA_CLASSES else BERT_ROLES if is_bert else {}
        roles = DEBERTA_ROLES if kind == "DebertaV2Tokenizer" else roles
        stated = {**{role: token for role, token in roles.items() if token in names}, **stated}

    # Without a limit of its own a text is cut at the model's positions.
    limit = config.get("model_max_length", config.get("max_len"))
    limit = read_positions(place) if limit is None or limit >= NO_LIMIT else limit
    return content, {**stated, "model_max_length": int(limit or NO_LIMIT)}, config


def has_berts_parts(content: Mapping[str, Any]) -> bool:
    """Return whether all parts of a tokenizer.json are BERT's; raise ValueError if they lack a vocabulary."""
    model, normalizer, splitter = ((content.get(name) or {}) for name in ("model", "normalizer", "pre_tokenizer"))
    # Before 2021 a model did not state its type; WordPiece's is the only one with a longest word.
    kind = model.get("type") or ("WordPiece" if "max_input_chars_per_word" in model else None)
    parts = (kind, model.get("continuing_subword_prefix", "##"), normalizer.get("type"), splitter.get("type"))
    if parts != ("WordPiece", "##", "BertNormalizer", "BertPreTokenizer"):
        return False
    if not isinstance(model.get("vocab"), dict) or not model["vocab"]:
        raise ValueError("there is no vocabulary")
    return True


def read_model(place: Place) -> tuple[dict[str, Any], "Family | None"]:
    """Return the config.json of a checkpoint's model, and its family; None if that is unknown."""
    from bertlite.checkpoint.families import FAMILIES

    values = place.values("config.json")
    return values, FAMILIES.get(str(values.get("model_type", "bert")))


def read_positions(place: Place) -> int | None:
    """Return how many positions a checkpoint's model has; None if its family is unknown."""
    values, family = read_model(place)
    positions = values.get("max_position_embeddings")
    if family is None or not isinstance(positions, int):
        return None
    pad = {**family.defaults, **values}.get("pad_token_id")
    return positions - (pad + 1 if "positions_skip_padding" in family.fixed and isinstance(pad, int) else 0)


def input_names(place: Place, config: Mapping[str, Any]) -> list[str]:
    """Return the inputs that a tokenizer makes: its tokenizer_config.json lists them, or they follow from its class.

    As in transformers 5.24, only some classes make token types; in 4.57.6 PreTrainedTokenizerFast does too.
    """
    values, family = read_model(place)
    kind = config.get("tokenizer_class") or values.get("tokenizer_class")
    if kind is None:
        segmented = family is None or "positions_skip_padding" not in family.fixed
    else:
        segmented = kind.removesuffix("Fast") in SEGMENTED
    names = ["input_ids", *(["token_type_ids"] if segmented else []), "attention_mask"]
    return list(config.get("model_input_names", names))


def extra_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the special tokens of a tokenizer_config.json that have no role of their own."""
    found = [config.get(name) or () for name in EXTRA]
    return [token_content(token) for each in found for token in (each.values() if isinstance(each, dict) else each)]


def token_content(token: str | Mapping[str, Any]) -> str:
    """Return the string of a token, which the files write as a string or as an object."""
    return token if isinstance(token, str) else token["content"]


@contextmanager
def errors_with_path(path: Path) -> Iterator[None]:
    """Turn errors in a tokenizer's files into a ValueError that names the file."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        raise ValueError(message if str(path.parent) in message else f"{path}: {message}") from None
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        what = f"is damaged ({type(error).__name__}: {error}): fetch it again"
        raise ValueError(f"{path}, or another file in its folder, {what}") from None


def number_tokens(vocab: Sequence[str] | PathLike[str] | str) -> dict[str, int]:
    """Return {token: id} for a vocab.txt, one token per line, or for a list; the last of equal tokens counts."""
    if isinstance(vocab, str | PathLike):
        try:
            lines = Path(vocab).expanduser().read_bytes().decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{vocab} is not a vocabulary: it is not UTF-8 ({error})") from None
        vocab = [line.rstrip() for line in lines]
    if not any(vocab):
        raise ValueError("the vocabulary is empty")
    return {token: number for number, token in enumerate(vocab)}


def word_pieces(vocab: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of a tokenizer.json with BERT's parts."""
    model = {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    settings = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    return {
        "model": {**model, "unk_token": BERT_ROLES["unk_token"], "vocab": dict(vocab)},
        "normalizer": {"type": "BertNormalizer", **settings},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }


def add_tokens_(content: dict[str, Any], place: Place, config: Mapping[str, Any], numbered: bool) -> None:
    """Add the tokens of tokenizer_config.json or added_tokens.json that the content of a tokenizer.json lacks.

    Args:
        numbered: the ids that these files state count; else, as in transformers, only their order.
    """
    added = {index(number): {"content": token} for token, number in place.values("added_tokens.json").items()}
    added |= {int(number): token for number, token in (config.get("added_tokens_decoder") or {}).items()}
    tokens = [*(content.get("added_tokens") or ())]
    known = {token["content"] for token in tokens}
    missing = [(i, token) for i, token in sorted(added.items()) if token["content"] not in known]

    # A token of the vocabulary keeps its id, and others follow the last one.
    vocab = content["model"]["vocab"] if missing else {}
    ids = vocab if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)}
    following = max([len(ids), *(token["id"] + 1 for token in tokens if missing)])
    for stated, token in missing:
        own = ids.get(token["content"], following)
        tokens.append({**FLAGS, **token, "id": stated if numbered else own})
        following += own == following
    content["added_tokens"] = tokens


def make_backend(content: Mapping[str, Any], given: Mapping[str, Any], roles: Mapping[str, str]) -> "Tokenizer":
    """Make a Rust tokenizer, without truncation and padding, of the content of a tokenizer.json.

    Args:
        given: arguments of `BertTokenizer`; if `do_lower_case` is among them, BERT's parts are made with them.
        roles: the special tokens among them.
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    # Padding and truncation belong to a call, so the backend has none.
    own, added = "do_lower_case" in given, content.get("added_tokens") or []
    content = {"version": "1.0", **content, "truncation": None, "padding": None, "added_tokens": added}

    if own:
        content["model"] = {**content["model"], "unk_token": given["unk_token"]}
        content["normalizer"] = {**content["normalizer"], **{key: given[name] for name, key in NORMALIZER.items()}}
    with explained_errors("this is not a tokenizer.json that this version of tokenizers reads"):
        backend = Tokenizer.from_str(json.dumps(content))

    # tokenizers numbers added tokens itself, and says nothing if they get other ids than the model was trained with.
    for token in added:
        if (number := backend.token_to_id(token["content"])) != token["id"]:
            what = f"added token {token['content']!r} cannot have the id {token['id']}: it would be {number}"
            raise ValueError(f"{what}, as added ids follow the vocabulary's")

    for role, token in roles.items():
        if backend.token_to_id(token) is None:
            count = backend.get_vocab_size()
            raise ValueError(f"the vocabulary of {count} tokens has no {token!r}: pass {role}=, or add the token")

    known = {token["content"] for token in added}
    backend.add_special_tokens([token for token in dict.fromkeys(roles.values()) if token not in known])

    # BERT's frame around one text and around a pair; the second text is segment 1.
    if own:
        cls, sep = given["cls_token"], given["sep_token"]
        backend.post_processor = TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)],
        )
    return backend


def write_files(folder: Path, backend: "Tokenizer", config: Mapping[str, Any]) -> tuple[str, ...]:
    """Write a tokenizer's files into a folder, in one step, and return their paths; other files are kept.

    Raises:
        ValueError: it is a packed folder, whose tokenizer belongs to its weights.
    """
    from tokenizers.models import WordPiece

    check_output(folder, re.compile(r"runtime\.json"), own=False)

    vocab = sorted(backend.get_vocab(with_added_tokens=False).items(), key=itemgetter(1))
    texts = {
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }

    # vocab.txt tells an id by the line, so it can only hold ids without gaps.
    if isinstance(backend.model, WordPiece) and [i for _, i in vocab] == list(range(len(vocab))):
        texts["vocab.txt"] = "".join(f"{token}\n" for token, _ in vocab)

    with replacing(folder, superseded=SUPERSEDED) as new:
        for name, text in texts.items():  # the folder's name need not be UTF-8, as for the library's own `save`
            (new / name).write_text(text, encoding="utf-8", newline="\n")
        written = sorted(path.name for path in new.iterdir())
    return tuple(str(folder / name) for name in written)
