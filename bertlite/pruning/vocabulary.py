"""Prune the vocabulary of a model and its tokenizer to the tokens that texts use.

Tokens are kept in the order of their ids and renumbered.  A tokenizer cuts the texts as before: WordPiece takes the
longest piece, Unigram the path with the highest score, and BPE the merge with the lowest rank.  The best choice among
all tokens is still the best among fewer, if it is one of them.
"""

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import torch

from bertlite.config import BertConfig
from bertlite.models.base import BertPreTrainedModel
from bertlite.models.resizing import change_tokens_
from bertlite.support.kinds import checked
from bertlite.tokenizer import BertTokenizer

Model = TypeVar("Model", bound=BertPreTrainedModel)
Text = str | tuple[str, str]
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token for a byte of a character that the vocabulary lacks
UNUSED = re.compile(r"\[unused\d+\]")  # free places in BERT's vocabulary
TEXTS = 1000  # texts that are tokenized at once


@checked
def keep_used_tokens(
    model: Model, tokenizer: BertTokenizer, texts: Iterable[Text], *, at_least: int = 0
) -> tuple[Model, BertTokenizer]:
    """Return copies of a model and its tokenizer that have only the tokens of these texts, and a few more.

    The texts are tokenized as before, also after each prompt of `tokenizer.sentences`, and the outputs for them are
    the same.  Special and added tokens, single characters and bytes are kept too.  So other texts can be tokenized: a
    removed token becomes several pieces.

    Args:
        texts: all texts of the kind that the model will see, or pairs of them; they are not truncated.
        at_least: keep this many tokens, by adding tokens with the lowest ids, so that fewer other texts change.  In
            most vocabularies these are the most frequent.

    Raises:
        TypeError: the model is not one of bertlite's, or its embeddings or decoder are not plain modules.
        ValueError: there are no texts; the tokenizer is not WordPiece, BPE or Unigram, or has more tokens than the
            model; or it would tokenize one of the texts in another way.
    """
    if not isinstance(model, BertPreTrainedModel):
        raise TypeError(f"{type(model).__name__} is not a model of bertlite; load the checkpoint with bertlite")
    texts = list(texts)
    if not texts:
        raise ValueError("there are no texts to prune the vocabulary to")

    # Texts are used with every prompt, and with none.
    prompts = {"", *tokenizer.sentences.prompts.values()}
    ids, content = tokenizer.get_vocab(), json.loads(tokenizer.backend_tokenizer.to_str())
    names = {number: token for token, number in ids.items()}

    # Tokens to keep: the texts' own, all that files name, and the pieces that build them.
    used = {names[number] for row in ids_of(tokenizer, [("", ""), *texts], prompts) for number in row}
    used |= {*tokenizer.all_special_tokens, *(token["content"] for token in content["added_tokens"])}
    stated = {names[number] for number in token_ids(model.config).values() if number in names}
    tokens = tokens_to_keep(content["model"], used | stated)

    # And the lowest ids, if more are wanted; most vocabularies are sorted by frequency.
    spare = [token for _, token in sorted(names.items()) if token not in tokens and not UNUSED.fullmatch(token)]
    tokens = tokens_to_keep(content["model"], tokens | {*spare[: max(0, at_least - len(tokens))]})
    kept = sorted(ids[token] for token in tokens)
    if kept[-1] >= model.config.vocab_size:
        raise ValueError(f"the tokenizer has a token {kept[-1]}; the model has 0 to {model.config.vocab_size - 1}")

    # The proof: each text is cut as before.
    new_ids = {old: new for new, old in enumerate(kept)}
    small = with_ids(tokenizer, content, new_ids)
    both = (ids_of(each, texts, prompts) for each in (tokenizer, small))
    for text, before, after in zip(texts * len(prompts), *both, strict=True):
        if [new_ids.get(number) for number in before] != after:
            raise ValueError(f"with fewer tokens the text {text!r:.80} would be cut in another way: leave it out")

    result, rows = copy.deepcopy(model), torch.tensor(kept, dtype=torch.long, device=model.device)
    change_tokens_(result, with_token_ids(model.config, new_ids), lambda table: table[rows])
    return result, small


def ids_of(tokenizer: BertTokenizer, texts: Sequence[Text], prompts: Iterable[str]) -> Iterator[list[int]]:
    """Yield the token ids of each text after each prompt, special ones included."""
    for prompt, start in product(sorted(prompts), range(0, len(texts), TEXTS)):
        yield from tokenizer.encode_texts(texts[start : start + TEXTS], prompt=prompt)["input_ids"]


def tokens_to_keep(model: dict[str, Any], used: set[str]) -> set[str]:
    """Return the tokens that keep the cuts of texts as they are, and let other texts be tokenized.

    Args:
        model: the part "model" of a tokenizer.json.

    Raises:
        ValueError: it is of an unknown type.
    """
    kind, vocab = model["type"], model["vocab"]
    if kind not in ("WordPiece", "BPE", "Unigram"):
        raise ValueError(f"the tokenizer is a {kind}; the vocabulary of WordPiece, BPE and Unigram can be pruned")
    names = [token for token, _ in vocab] if kind == "Unigram" else list(vocab)
    prefix, suffix = (model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    single = {t for t in names if len(t.removeprefix(prefix).removesuffix(suffix)) == 1 or BYTE.fullmatch(t)}
    unknown = model.get("unk_token") if model.get("unk_id") is None else names[model["unk_id"]]
    kept = used | single | {name for name in names if name == unknown}
    if kind == "Unigram":  # the lowest score, less a constant, is an unknown character's
        kept.add(min(vocab, key=lambda piece: piece[1])[0])
    return with_parts(kept, model["merges"], prefix) if kind == "BPE" else kept


def with_parts(tokens: set[str], merges: Sequence[Sequence[str]], prefix: str) -> set[str]:
    """Return tokens of BPE with all tokens that they are merged from."""
    parts: defaultdict[str, set[str]] = defaultdict(set)
    for left, right in merges:
        parts[left + right.removeprefix(prefix)] |= {left, right}
    found, todo = set[str](), [*tokens]
    while todo:
        token = todo.pop()
        if token not in found:
            found.add(token)
            todo += parts[token]
    return found


def with_ids(tokenizer: BertTokenizer, content: dict[str, Any], ids: Mapping[int, int]) -> BertTokenizer:
    """Return a tokenizer with fewer tokens.

    Args:
        content: the content of its tokenizer.json, which is changed.
        ids: {old id: new id} of the tokens that are kept.

    Raises:
        ValueError: the Rust tokenizer gives a token another id.
    """
    from tokenizers import Tokenizer

    model, before = content["model"], tokenizer.get_vocab()
    wanted = {token: ids[number] for token, number in before.items() if number in ids}

    # Unigram's ids are places in a list; other models write theirs out.
    if model["type"] == "Unigram":
        unknown = model["unk_id"]
        model["vocab"] = [piece for i, piece in enumerate(model["vocab"]) if i in ids]
        model["unk_id"] = None if unknown is None else ids[unknown]
    else:
        model["vocab"] = {token: wanted[token] for token in model["vocab"] if token in wanted}

    # A merge needs both of its parts, and the token that it makes.
    if model["type"] == "BPE":
        prefix = model["continuing_subword_prefix"] or ""
        parts = ((left, right, left + right.removeprefix(prefix)) for left, right in model["merges"])
        model["merges"] = [each[:2] for each in parts if wanted.keys() >= {*each}]

    for token in content["added_tokens"]:
        token["id"] = ids[token["id"]]
    renumber_frame_(content["post_processor"] or {}, ids)

    # tokenizers may number added tokens in its own way, so the ids are compared.
    backend = Tokenizer.from_str(json.dumps(content))
    backend.encode_special_tokens = tokenizer.backend_tokenizer.encode_special_tokens
    if backend.get_vocab() != wanted:
        raise ValueError("the tokenizer gives its added tokens other ids: they do not follow the vocabulary's")
    small = copy.copy(tokenizer)
    small.backend_tokenizer = backend
    return small


def renumber_frame_(part: dict[str, Any], ids: Mapping[int, int]) -> None:
    """Renumber the special tokens that a post-processor of a tokenizer.json adds."""
    for inner in part.get("processors", ()):
        renumber_frame_(inner, ids)
    for token in part.get("special_tokens", {}).values():  # a template
        token["ids"] = [ids[number] for number in token["ids"]]
    for role in {"cls", "sep"} & part.keys():  # BERT's and RoBERTa's post-processors
        part[role] = [part[role][0], ids[part[role][1]]]


def token_ids(config: BertConfig) -> dict[str, int]:
    """Return the fields of a config that are the id of a token."""
    return {name: n for name, n in config.to_dict().items() if name.endswith("_token_id") and isinstance(n, int)}


def with_token_ids(config: BertConfig, ids: Mapping[int, int]) -> BertConfig:
    """Return the config of a model with fewer tokens; an id without a token becomes None.

    Args:
        ids: {old id: new id}.
    """
    new = {name: ids.get(number) for name, number in token_ids(config).items()}
    pad = new.pop("pad_token_id", None)
    return replace(config, vocab_size=len(ids), pad_token_id=pad, extra={**config.extra, **new})
