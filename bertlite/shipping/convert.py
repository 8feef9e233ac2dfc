"""Write a checkpoint of another family as a BERT checkpoint, after a comparison with transformers' own class."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bertlite.config import POSITIONS
from bertlite.models.base import BertPreTrainedModel
from bertlite.models.structure import densify
from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity.cases import Case
from bertlite.parity.check import check_all
from bertlite.parity.reference import stock
from bertlite.shipping.card import is_pruned, needs_code
from bertlite.shipping.folder import check_model_folder, write_model
from bertlite.support.contexts import own_context
from bertlite.support.process import door

ALLOWED = 1e-10  # the largest difference in float64


@door
@own_context()
def convert(checkpoint: str | PathLike[str], folder: str | PathLike[str], *, full: bool = False) -> dict[str, Any]:
    """Write a checkpoint of any family as a BERT checkpoint; see `write_model` for the files.

    Args:
        full: put pruned heads and neurons back, with zero weights, for loaders that do not support pruning.

    Returns:
        The record: the model_type, the class, notes on comparisons that were left out, and the largest differences of
        outputs in float64: from transformers' class of the family, and from transformers' BERT with the result.

    Raises:
        FileNotFoundError: there is no such checkpoint, or it has no tokenizer.
        ValueError: the outputs differ, and then nothing is written; or the checkpoint is not a BERT by any name; or
            the folder is the checkpoint's own or holds something else.
    """
    source, out = Checkpoint.of(checkpoint), Path(folder).expanduser()
    check_model_folder(out, source)

    # The result is compared before anything is written: a family that is read wrongly must not leave a folder.
    origin, cls = source.origin, source.model_class
    model = source.load(cls)
    differences, notes = transformers_differences(source, model)
    for what, difference in differences.items():
        if not difference <= ALLOWED:  # nan too
            error = f"differ by {difference:.1e} from {what}, more than {ALLOWED:g}"
            raise ValueError(f"the outputs of {checkpoint} as a BERT {error}: nothing was written")

    becomes = f" ({origin.family.becomes})" if origin.family.becomes else ""
    how = [f"Its source is a {origin.kind} checkpoint{becomes}."]
    if full:
        how.append("Pruned heads and neurons are back in place, with weights of zero.")
    write_model(out, densify(model) if full else model, source, how=how, pruned=model.config)
    return {
        "what": "bertlite convert",
        "model_type": origin.kind,
        "class": cls.__name__,
        "differences": differences,
        "notes": notes,
    }


def summary_lines(record: Mapping[str, Any], out: Mapping[str, Path]) -> Iterator[str]:
    """Yield the folder and its differences from transformers, in words."""
    yield f"{out['FOLDER']}: {record['class']}, from a {record['model_type']!r} checkpoint"
    for what, error in record["differences"].items():
        yield f"  largest difference from {what}: {error:.1e}, in float64"
    yield from (f"  {note}" for note in record["notes"])


def transformers_differences(source: Checkpoint, model: BertPreTrainedModel) -> tuple[dict[str, float], list[str]]:
    """Return the largest differences of a model from transformers' models of its source and of its copy, and notes."""
    if is_pruned(model.config):
        return {}, ["not compared: transformers has no pruned BERT"]
    if find_spec("transformers") is None:
        return {}, ["not compared: transformers is not installed"]
    if (kind := source.origin.kind) not in stock().CONFIG_MAPPING:
        return {}, [f"not compared: this transformers has no {kind!r} model of its own"]
    refused = ["transformers' own BERT would compute something else, and refuses it: see the card"]
    if kind == "bert" and needs_code(model.config):
        return {}, refused

    # The model is compared with its own family's, and then the copy with the BERT that loads it.
    found = {f"transformers' {kind}": difference(model, source.local, "left", kind)}
    if needs_code(model.config):
        return found, refused
    skips = model.config.positions_skip_padding
    with TemporaryDirectory(prefix="bertlite-convert-") as folder:
        model.save_pretrained(folder)
        found["transformers' BERT that loads the result"] = difference(model, folder, "padded" if skips else "left")
    return found, ["transformers' BERT needs padding on the right"] if skips else []


def difference(model: BertPreTrainedModel, folder: str | PathLike[str], batch: str, family: str = "bert") -> float:
    """Return the largest difference between the outputs of a model and of transformers' class for a folder."""
    batch = "padded" if getattr(model, "takes_choices", False) else batch
    if POSITIONS[model.config.position_embedding_type].has_windows:  # on the left padding may see no token
        batch = "full" if getattr(model, "padding_reader", None) else "padded"
    case = Case(type(model).__name__, "eager", batch, "float64", family=family)
    [report] = check_all([case], "cpu", folder)
    errors = torch.tensor([row.error for row in report.rows], dtype=torch.float64, device="cpu")
    return float(errors.max())  # nan if one is
