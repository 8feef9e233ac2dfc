"""Write a checkpoint of another family as a BERT's, compared with transformers' own class before it is kept."""

import argparse
import copy
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from bertlite.checkpoint.families import Origin
from bertlite.checkpoint.files import Source, find_checkpoint
from bertlite.checkpoint.reading import read_tensors
from bertlite.config import BertConfig
from bertlite.inspection import bertlite_faults
from bertlite.model import BertModel, BertPreTrainedModel
from bertlite.parity import reference
from bertlite.pruning import densify
from bertlite.records import write_json
from bertlite.shipping.card import is_pruned, needs_code
from bertlite.shipping.export import choose_class
from bertlite.shipping.folder import write_model

ALLOWED = 1e-10  # difference in float64, of 1 or the largest output
LENGTH = 33
OF_TOKENS = ("last_hidden_state", "start_logits", "end_logits")
COMPARED = (*OF_TOKENS, "logits", "pooler_output")


def main(args: argparse.Namespace) -> int:
    """Convert a checkpoint, and print how far it is from transformers."""
    found = convert(args.checkpoint, args.folder, full=args.full)
    if args.record:
        write_json(args.record, found)
    print(f"{args.folder}: {found['class']}, from a {found['model_type']!r} checkpoint")
    for what, difference in found["differences"].items():
        print(f"  largest difference from {what}: {difference:.1e}, in float64")
    for note in found["notes"]:
        print(f"  {note}")
    return 0


def convert(checkpoint: str | PathLike[str], folder: str | PathLike[str], *, full: bool = False) -> dict[str, Any]:
    """Write a checkpoint of any family as a BERT's; see `write_model` for the files.

    Args:
        full: put pruned heads and neurons back, with weights of zero, for loaders that know none.

    Returns:
        The record: the model_type, the class, the largest differences, in float64, of the outputs from those of
        transformers' class of the family and of its BERT that loads the result, and notes on what was not compared.

    Raises:
        FileExistsError: the folder is the checkpoint's own.
        FileNotFoundError: there is no such checkpoint, or it has no tokenizer.
        ValueError: the outputs differ, in which case nothing is written; or the checkpoint is not a BERT by any name.
    """
    source, out = Source(checkpoint), Path(folder).expanduser()
    files = find_checkpoint(source)
    if out.exists() and out.samefile(files.config.parent):
        raise FileExistsError(f"{out} is the checkpoint's own folder: name another")
    origin, cls = Origin.read(files.config), choose_class(source, None)
    absent, _ = bertlite_faults(cls, origin, read_tensors(files))
    options: dict[str, Any] = {"add_pooling_layer": False} if cls is BertModel and "pooler" in absent else {}
    model = cls.from_pretrained(checkpoint, **options)
    differences, notes = compare(files.config.parent, origin, model)
    for what, difference in differences.items():
        if not difference <= ALLOWED:  # nan too
            raise ValueError(
                f"the outputs of {checkpoint} as a BERT differ by {difference:.1e} from {what}, more than"
                f" {ALLOWED:g}: nothing was written"
            )
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


def compare(source: Path, origin: Origin, model: BertPreTrainedModel) -> tuple[dict[str, float], list[str]]:
    """Return the largest differences of a model from transformers' of its source and of its copy, and notes."""
    if is_pruned(model.config):
        return {}, ["not compared: transformers has no pruned BERT"]
    if find_spec("transformers") is None:
        return {}, ["not compared: transformers is not installed"]
    ours = copy.deepcopy(model).double().eval()
    ours.set_attn_implementation("eager")
    name = type(model).__name__
    named = "AutoModel" if isinstance(model, BertModel) else origin.values["architectures"][0]
    found = {f"transformers' {origin.kind}": difference(ours, load(source, named), left=True)}
    if needs_code(model.config):
        return found, ["transformers' own BERT would compute something else, and refuses it: see the card"]
    with TemporaryDirectory(prefix="bertlite-convert-") as folder:
        model.save_pretrained(folder)
        stock = load(folder, name)
    skips = model.config.positions_skip_padding
    found["transformers' BERT that loads the result"] = difference(ours, stock, left=not skips)
    return found, ["transformers' BERT needs padding on the right"] if skips else []


@reference.silent()
def load(folder: str | Path, name: str) -> tuple[Any, bool]:
    """Return transformers' model in float64, and whether the checkpoint has its pooler if it has one."""
    model, info = reference.stock_class(name).from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )
    return model.eval(), not any("pooler" in key for key in info["missing_keys"])


@torch.inference_mode()
def difference(ours: BertPreTrainedModel, loaded: tuple[Any, bool], left: bool) -> float:
    """Return the largest difference of the outputs at real tokens, relative to 1 or the largest output."""
    theirs, pooler = loaded
    batch = sample(ours.config, padded_left=left and type(ours).__name__ != "BertForMultipleChoice")
    mask = batch["attention_mask"].bool()
    if type(ours).__name__ == "BertForMultipleChoice":
        batch = {name: x[None] for name, x in batch.items()}
    got, wanted = ours(**batch), theirs(**batch)
    found = [0.0]
    for name in COMPARED:
        a, b = (getattr(out, name, None) for out in (got, wanted))
        if a is None or b is None or (name == "pooler_output" and not pooler):
            continue
        a, b = (x[mask] if name in OF_TOKENS or x.dim() == 3 else x[:2] for x in (a, b))  # of left padding no logits
        found.append(((a - b).abs().max() / b.abs().max().clamp(min=1)).item())
    return float(torch.tensor(found).max())  # nan if one is


def sample(config: BertConfig, padded_left: bool) -> dict[str, Tensor]:
    """Return random tokens: a row without padding, one with padding on the right, and perhaps one on the left."""
    length, pad = min(LENGTH, config.max_position_embeddings), config.pad_token_id or 0
    ids = torch.randint(config.vocab_size - 1, (3, length), generator=torch.Generator().manual_seed(0))
    ids += ids >= pad
    mask = torch.ones_like(ids)
    mask[1, length - length // 3 :] = mask[2, : length // 3] = 0
    rows = 3 if padded_left else 2
    return {"input_ids": ids.masked_fill(mask == 0, pad)[:rows], "attention_mask": mask[:rows]}
