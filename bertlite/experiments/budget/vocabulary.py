"""Fewer tokens, and the changes in texts that use removed ones: `prune vocabulary`, and `prune to --vocabulary`."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from bertlite.checkpoint.saving import file_size
from bertlite.experiments.budget.texts import Texts, examples_of, split
from bertlite.experiments.data import Examples, read_length
from bertlite.experiments.files import as_checkpoint
from bertlite.inference.checks import parse_device
from bertlite.models.base import BertPreTrainedModel
from bertlite.pruning.importance.predictions import divergence, predictions, sum_terms
from bertlite.pruning.vocabulary import Text, keep_used_tokens
from bertlite.shipping.card import Figure
from bertlite.shipping.folder import write_model
from bertlite.support.environment import environment
from bertlite.support.process import door
from bertlite.tokenizer import BertTokenizer

HELD_OUT, BATCH = 1024, 32  # the most texts without --dev; texts in a forward
Pair = tuple[Any, BertTokenizer]  # a model and its tokenizer


@door
def prune_vocabulary(
    checkpoint: str | PathLike[str] | BertPreTrainedModel,
    texts: Texts,
    folder: str | PathLike[str],
    *,
    tokenizer: BertTokenizer | None = None,
    dev: Texts | None = None,
    text: tuple[str, ...] = ("text",),
    columns: tuple[str, ...] = (),
    tokens: int | None = None,
    max_length: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Write a checkpoint with only the tokens that texts use, its tokenizer, a card and its report.

    `bertlite.pruning.keep_used_tokens` returns a model and a tokenizer instead, and writes nothing.

    Args:
        checkpoint: a folder or a hub id; or a loaded model, which is not changed.
        texts: a file, or the texts: strings, or pairs of them; they are not truncated.
        tokenizer: the tokenizer of a loaded model, or another one for a checkpoint; by default the checkpoint's.
        dev: other texts, to measure changes on; by default a held-out fifth of the texts.
        text: names of the columns with the text: one, or two for pairs.
        columns: names of all columns, for a .csv or .tsv file without a header.
        tokens: keep this many or more, by adding the most frequent ones; by default only the ones that texts need.
        max_length: the number of tokens to truncate compared texts to.

    Returns:
        The record: the texts, and as "vocabulary" the tokens and bytes, and the changes of other texts.

    Raises:
        FileExistsError: there is something in the folder.
        FileNotFoundError: there is no such checkpoint or file.
        ValueError: a text cannot be read, or there are too few.
    """
    # The folder and the device are checked before the model is loaded.
    folder = Path(folder).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is there already: name another folder")
    parse_device(device)

    with as_checkpoint(checkpoint, tokenizer) as (source, named):
        every = examples_of(texts, text, None, columns, source.config)
        judged = None if dev is None else examples_of(dev, text, None, columns, source.config)
        model = source.load(source.model_class, device=device)
        options = every, judged, tokens or 0, max_length
        small, fewer, facts = with_fewer_tokens(model, source.tokenizer, *options)

        report = {
            "what": "bertlite prune vocabulary",
            "checkpoint": named,
            "texts": {"of": every.name, "sha256": every.sha256},
            "vocabulary": facts,
            "environment": environment(device),
        }
        figures = [Figure("megabytes of the weights", facts["bytes"] / 1e6, dense=facts["dense_bytes"] / 1e6)]
        write_model(folder, small, source, tokenizer=fewer, figures=figures, how=describe(facts), report=report)
    return report


def summary_lines(record: Mapping[str, Any], out: Mapping[str, Path]) -> list[str]:
    """Return sentences on the tokens, and the folder."""
    return [*describe(record["vocabulary"]), f"model: {out['FOLDER']}"]


def with_fewer_tokens(
    model: Any, tokenizer: BertTokenizer, texts: Examples, dev: Examples | None, at_least: int, max_length: int | None
) -> tuple[Any, BertTokenizer, dict[str, Any]]:
    """Prune a vocabulary to texts; return the model, its tokenizer, and the changes of other texts.

    Other texts are `dev`, or else a fifth of the texts, with the vocabulary pruned to the remaining four fifths.
    """
    most, judged = (texts, dev) if dev else split(texts, HELD_OUT, 0)
    longest = min(read_length(max_length, tokenizer), model.config.max_position_embeddings)
    small, fewer = keep_used_tokens(model, tokenizer, most.inputs, at_least=at_least)
    changes = compare((model, tokenizer), (small, fewer), judged.inputs, longest)
    if dev is None:
        small, fewer = keep_used_tokens(model, tokenizer, texts.inputs, at_least=at_least)
    kept = {"tokens": len(fewer), "dense_tokens": len(tokenizer), "texts": len(texts), "of": texts.name}
    sizes = {"bytes": file_size(small), "dense_bytes": file_size(model)}
    judged_on = f"{len(judged)} texts {'' if dev else 'held out '}of {judged.name}"
    return small, fewer, {**kept, **sizes, "judged on": judged_on, **changes}


@torch.inference_mode()
def compare(dense: Pair, small: Pair, texts: list[Text], longest: int) -> dict[str, Any]:
    """Compare a model and its tokenizer with the given ones on texts that may need other tokens.

    Returns:
        "changed", the share of texts that are cut into other tokens.  If there are any, these texts also give "kl",
        the divergence from the given model's predictions in nats (of the mean hidden state if the model predicts for
        each token), and for a classifier "agreement", the share of predictions with the same class.
    """
    before, after = (tokenizer.encode_texts(texts, longest).encodings for _, tokenizer in (dense, small))
    changed = [text for text, old, new in zip(texts, before, after, strict=True) if old.tokens != new.tokens]

    # Texts that are cut as before have the same outputs, so only changed ones are run.
    found: dict[str, Any] = {"changed": len(changed) / len(texts)}
    of_texts = not (getattr(dense[0], "needs_tokens", True) or dense[0].takes_choices)
    kl, differ = [], []
    for start in range(0, len(changed), BATCH):
        both = []
        for model, tokenizer in (dense, small):
            inputs = tokenizer.encode_texts(changed[start : start + BATCH], longest, padding=True, return_tensors="pt")
            batch = {name: x.to(model.device) for name, x in inputs.items()}
            judged = model if of_texts else model.base_model
            both.append(predictions(judged, judged(**batch, return_dict=True), batch))
        kl.append(divergence(*both))
        differ.append(sum_terms(p.disagreement(q) for p, q in zip(*both, strict=True)))

    if changed:
        found["kl"] = float(torch.cat(kl).mean())
        if of_texts and model.config.num_labels > 1:
            found["agreement"] = 1 - float(torch.cat(differ).mean())
    return found


def describe(facts: dict[str, Any]) -> list[str]:
    """Return sentences on a pruned vocabulary, for the terminal and the card."""
    return [
        f"The vocabulary has {facts['tokens']:,} of {facts['dense_tokens']:,} tokens: all that the {facts['texts']:,}"
        f" texts of {facts['of']} use, so that they are tokenized as before, and some more.",
        f"The weights have {facts['bytes'] / 1e6:.4g} MB; before, they had {facts['dense_bytes'] / 1e6:.4g} MB.",
        f"{100 * facts['changed']:.1f} % of {facts['judged on']} are cut into other tokens"
        + (f": {facts['kl']:.4f} nats from the given model there" if "kl" in facts else "")
        + (f", the same class for {100 * facts['agreement']:.1f} %" if "agreement" in facts else "")
        + ".",
    ]
