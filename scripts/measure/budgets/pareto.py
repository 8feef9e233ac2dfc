"""Which encoder to take: quality against measured speed, of sentence encoders pruned, mapped, distilled and in int8.

    python -m scripts.measure.budgets.pareto models CHECKPOINT … --data FOLDER --out runs/pareto,FILE.json
    python -m scripts.measure.budgets.pareto quality CHECKPOINT … --data FOLDER --out runs/pareto,FILE.json
    python -m scripts.measure.budgets.pareto speed CHECKPOINT … --data FOLDER --out runs/pareto,FILE.json,FILE.png

Each given model is pruned by `bertlite prune to`, without a map and with one, and distilled.  For comparison whole
layers are left out of it, and the rest is distilled and mapped in the same way.  No model reads a label.
`scripts/measure/budgets/encoders.py` has the tasks.

"models" makes the models in the folder; "quality" makes their vectors there, and judges the models that there are.
Other work on the machine does not matter, and nothing is made again: after a kill give the same command again.
"speed" times the models of that record in turn, on the native kernels, with the layer of a map, on a quiet machine.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bertlite import BertModel, BertTokenizer, Embedder, optimize_for_inference, prune_to
from bertlite.cli.parts import FOLDER, RECORD, count, names, paths
from bertlite.commands import PruneSettings
from bertlite.experiments.budget.distil import LR, STATES, RecordedTeacher
from bertlite.experiments.budget.mapping import fit_map
from bertlite.experiments.budget.target import quantiles
from bertlite.experiments.budget.texts import HELD_OUT, TEXTS_TO_FIT, batches_of, split
from bertlite.experiments.budget.work import Work
from bertlite.experiments.data import Examples, batch_indices, encode_examples
from bertlite.experiments.evaluate import TASKS
from bertlite.experiments.finetune import Recipe, finetune_
from bertlite.experiments.statistics import Array
from bertlite.opened.checkpoint import Checkpoint
from bertlite.shipping.folder import write_model
from bertlite.shipping.original import NEIGHBOURS, what_is_kept
from bertlite.shipping.vectors import read_head, with_map
from bertlite.support.environment import environment
from bertlite.support.files import write_json
from bertlite.support.timing import Timings, alternate, quartiles, ratios
from scripts.measure.budgets import tasks
from scripts.measure.budgets.encoders import JUDGED, MEAN, Judge, difference, texts_to_fit
from scripts.measure.budgets.methods import OfLayers, Subject, with_fewer_layers
from scripts.measure.curves import COLOURS, pyplot

PICTURE = ".png"
LENGTH, BATCH, ROUNDS = 32, 32, 41  # tokens to truncate texts to; texts of a step, and of what is timed
SETTINGS = PruneSettings(max_length=LENGTH, at=(8, 16), mapping=False)  # short texts, as those of the tasks
PIECE = 1000  # texts whose vectors are a file
DTYPES = ("float32", "int8")
SEARCHED = "Banking77"  # the task whose texts are searched for neighbours
GIVEN, PLAIN = ("given", "100%"), "plain"
WAYS = {
    PLAIN: "`prune to`, no map",
    "mapped": "`prune to`",
    "distilled": "`prune to`, distilled",
    "layers mapped": "whole layers left out",
    "layers": "whole layers left out, distilled alike",
}
ALIKE = {"mapped": "layers mapped", "distilled": "layers"}  # made alike, but for what is pruned


class Key(NamedTuple):
    """A model in a dtype."""

    model: str
    way: str
    target: str
    dtype: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("models", "quality", "speed"))
    text = "folders of sentence encoders, named for them; the first is what others are timed beside"
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help=text)
    parser.add_argument("--data", required=True, type=Path, metavar="FOLDER", help="folder of the data sets")
    parser.add_argument("--targets", type=names, default="50%,30%,20%", help="shares of the MACs")
    parser.add_argument("--distilled", type=names, default="30%,20%", help="those of them that are also distilled")
    parser.add_argument("--steps", type=count, default=100, help="of distillation, each of 32 texts")
    parser.add_argument("--rounds", type=count, default=ROUNDS, help="of timing")
    kinds = (RECORD, PICTURE, FOLDER)
    parser.add_argument("--out", type=paths(kinds), required=True, metavar="FOLDER,FILE.json[,FILE.png]")
    args = parser.parse_args(argv)
    given = {
        each.name: Encoder(each, args.data, args.out[FOLDER] / each.name, args.steps) for each in args.checkpoints
    }
    if args.stage == "models":
        for encoder in given.values():
            encoder.make(args.targets, args.distilled)
        return 0
    if args.stage == "quality":
        record = {"what": "sentence encoders, pruned, mapped, distilled, in int8", "steps": args.steps}
        record |= {"texts": len(texts_to_fit(args.data)), "rows": judge(given, args.data)}
        record["environment"] = environment()
    else:
        record = json.loads(args.out[RECORD].read_text(encoding="utf-8"))
        record["speed"] = {"rounds": args.rounds, "environment": environment()}
        record["commits"] = [record["speed"]["environment"]["git"]["commit"]]
        keys = [key_of(row) for row in record["rows"]]
        for row, found in zip(record["rows"], time_models(given, keys, args.data, args.rounds), strict=True):
            row |= found
        if PICTURE in args.out:
            draw(record["rows"], args.out[PICTURE])
    write_json(args.out[RECORD], record)
    return 0


def key_of(row: Mapping[str, Any]) -> Key:
    return Key(*(row[name] for name in Key._fields))


# Models and their vectors --------------------------------------------------------------------------------------------


class Encoder:
    """A given sentence encoder, with the models made from it in a folder: FOLDER/WAY/TARGET, and their vectors."""

    def __init__(self, place: Path, data: Path, folder: Path, steps: int) -> None:
        self.place, self.data, self.folder, self.steps = place, data, folder, steps

    def make(self, targets: Sequence[str], distilled: Sequence[str]) -> None:
        """Write the models that are not there yet."""
        options: dict[str, Any] = {"settings": SETTINGS, "progress": True}
        texts = [text for (text,) in self.texts.texts]
        for target in targets:
            prune_to(self.place, target, texts, self.path(PLAIN, target), keep=self.folder / "curves", **options)
            for way in ("mapped", "layers mapped"):
                self.write(way, target)
        for target in distilled:
            for way in ("distilled", "layers"):
                self.write(way, target)

    def write(self, way: str, target: str) -> None:
        """Write a model with its map, unless it is there."""
        if (folder := self.path(way, target)).exists():
            return
        if way.startswith("layers"):
            model = with_fewer_layers(Subject(self.model, [], LENGTH), float(target.rstrip("%")) / 100)
        else:
            model = Checkpoint.of(self.path(PLAIN, target)).load(BertModel)
        if way in ("distilled", "layers"):
            self.distil_(model)
        unseen = batches_of(self.rest.chosen(range(TEXTS_TO_FIT, len(self.rest))), self.tokenizer, self.model, LENGTH)
        mapped = with_map(self.head, fit_map(model, LastStates(self.recorded), unseen, self.head))
        write_model(folder, model, self.place, mapped=mapped)
        print(folder, flush=True)

    def distil_(self, model: Any) -> None:
        """Train a model towards the vectors and hidden states of the given one."""
        layers = model.config.num_hidden_layers
        fewer = layers < self.model.config.num_hidden_layers
        teacher = OfLayers(self.model, self.recorded, layers) if fewer else self.recorded
        model.embeddings.requires_grad_(False)
        epochs, lr = self.steps / len(batch_indices(self.encoded, BATCH)), LR / model.config.hidden_size
        recipe = Recipe(epochs=epochs, lr=lr, batch_size=BATCH, distil=1, hidden=1)
        finetune_(model, self.encoded, TASKS["classification"], recipe, teacher=teacher, progress=True)

    def path(self, way: str, target: str) -> Path:
        return self.place if (way, target) == GIVEN else self.folder / way / target

    def vectors(self, key: Key, texts: Sequence[str]) -> Array:
        """Return the vectors of texts; those that are pooled are kept in files, before the layers that follow."""
        way = "mapped" if key.way == PLAIN else key.way
        place, folder = self.path(way, key.target), self.folder / "vectors" / f"{way} {key.target} {key.dtype}"
        pieces = {folder / f"{first}.npy": texts[first : first + PIECE] for first in range(0, len(texts), PIECE)}
        if missing := [path for path in pieces if not path.exists()]:
            embedder = Embedder(place, dtype=key.dtype, backend="native")
            for name in list(embedder.encoder._modules)[2:]:  # after the encoder and its pooling
                del embedder.encoder._modules[name]
            folder.mkdir(parents=True, exist_ok=True)
            for path in missing:
                np.save(path, embedder.encode(pieces[path]))
                print(path, flush=True)
        x = torch.from_numpy(np.concatenate([np.load(path) for path in pieces]))
        for module in read_head(Checkpoint.of(self.place if key.way == PLAIN else place)).modules:
            x = module(x)
        return x.numpy()

    @cached_property
    def texts(self) -> Examples:
        return Examples("texts", tuple((text,) for text in texts_to_fit(self.data)), ())

    @cached_property
    def rest(self) -> Examples:
        """The texts that `prune_to` does not hold out, those that it is fitted to first."""
        return split(self.texts, HELD_OUT, 0)[0]

    @cached_property
    def model(self) -> Any:
        return Checkpoint.of(self.place).load(BertModel)

    @cached_property
    def tokenizer(self) -> BertTokenizer:
        return BertTokenizer.from_pretrained(self.place)

    @cached_property
    def head(self) -> Any:
        return read_head(Checkpoint.of(self.place))

    @cached_property
    def encoded(self) -> Any:
        return encode_examples(self.rest, self.tokenizer, LENGTH)

    @cached_property
    def recorded(self) -> RecordedTeacher:
        return RecordedTeacher(self.model, self.encoded)


class LastStates(nn.Module):
    """The last hidden states of a recorded model."""

    def __init__(self, recorded: RecordedTeacher) -> None:
        super().__init__()
        self.recorded = recorded

    def forward(self, return_dict: bool = True, **inputs: Any) -> Any:
        batch = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        return SimpleNamespace(last_hidden_state=self.recorded.known_outputs(batch)[STATES][:, :, -1].float())


# Quality -------------------------------------------------------------------------------------------------------------


def judge(given: Mapping[str, Encoder], data: Path) -> list[dict[str, Any]]:
    """Return a row for each model and dtype: scores, and paired differences of the mean from others.

    These are the given model in float32, the whole layers left out and made alike, and every other given model in the
    same dtype.
    """
    judges, found, kept = Judge(data), dict[Key, dict[str, Array]](), dict[Key, Array]()
    for key in keys(given):
        vectors = given[key.model].vectors(key, judges.texts)
        found[key], kept[key] = judges(vectors), judges.searched(SEARCHED, vectors)
        print(*key, *(f"{name} {100 * scores[0]:.1f}" for name, scores in found[key].items()), flush=True)
    rows = []
    for key, scores in found.items():
        own = found[Key(key.model, *GIVEN, "float32")]
        rivals = {name: Key(name, *GIVEN, key.dtype) for name in given if name != key.model}
        if key.way in ALIKE:
            rivals["layers"] = key._replace(way=ALIKE[key.way])
        row: dict[str, Any] = key._asdict()
        row["scores"] = {name: {"score": float(x[0]), **difference(x, own[name])} for name, x in scores.items()}
        row["more than"] = {name: difference(scores[MEAN], found[rival][MEAN]) for name, rival in rivals.items()}
        if key.dtype == "int8":
            row["neighbours"] = what_is_kept("encoder", kept[key], kept[key._replace(dtype="float32")])[NEIGHBOURS]
        rows.append(row)
    return rows


def keys(given: Mapping[str, Encoder]) -> list[Key]:
    """Return the models that there are, in both dtypes."""
    found = []
    for name, encoder in given.items():
        made = {(path.parent.name, path.name) for path in encoder.folder.glob("*/*%")}
        targets = sorted({target for _, target in made}, key=lambda text: -float(text.rstrip("%")))
        ways = [GIVEN, *((way, target) for target in targets for way in WAYS if (way, target) in made)]
        found += [Key(name, *each, dtype) for each in ways for dtype in DTYPES]
    return found


# Speed ---------------------------------------------------------------------------------------------------------------


def time_models(
    given: Mapping[str, Encoder], keys: Sequence[Key], data: Path, rounds: int
) -> list[dict[str, dict[str, float]]]:
    """Return quartiles of the texts a second of each model, and of its speed over the first given one in float32.

    Ways whose models have the same sizes are timed once, with the layer of a map, which all but one of them have.
    """
    tokenizer = next(iter(given.values())).tokenizer
    lengths = [len(ids) for ids in tokenizer.encode_texts([row[0] for row in tasks.stsb(data, "test")])["input_ids"]]
    chosen = quantiles(lengths, BATCH)
    work, runs = Work("STS-B", chosen, max(chosen)), dict[str, Callable[[], Any]]()
    timed = [key._replace(way="layers mapped" if key.way.startswith("layers") else "mapped") for key in keys]
    timed = [same if key.way != GIVEN[0] else key for key, same in zip(keys, timed, strict=True)]
    for key in dict.fromkeys(timed):
        model = Checkpoint.of(given[key.model].path(key.way, key.target)).load(BertModel)
        inputs, pooled = work.inputs(model.config.vocab_size), torch.zeros(BATCH, model.config.hidden_size)
        after = nn.Linear(pooled.shape[1], pooled.shape[1]) if key.way != GIVEN[0] else nn.Identity()
        quick = optimize_for_inference(model, dtype=key.dtype, backend="native")
        runs[str(key)] = partial(run, partial(quick, **inputs), partial(after, pooled))
    with torch.inference_mode():
        times: Timings = alternate(runs, rounds)
    first = str(Key(next(iter(given)), *GIVEN, "float32"))
    return [
        {
            "texts a second": quartiles([BATCH / seconds for seconds in times[str(key)]]),
            "speedup": quartiles(ratios(times, first, str(key))),
        }
        for key in timed
    ]


def run(*steps: Callable[[], Any]) -> None:
    for step in steps:
        step()


# Picture -------------------------------------------------------------------------------------------------------------

STYLES = {"mapped": ("o", "-"), "distilled": ("D", "--"), "layers": ("s", ":")}  # the ways that are drawn


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the mean score against texts a second: a panel for each dtype, a colour for each given model."""
    plt = pyplot()
    figure, panels = plt.subplots(2, 1, figsize=(5, 7.6), sharex=True, sharey=True, layout="constrained")
    for panel, dtype in zip(panels, DTYPES, strict=True):
        for colour, model in zip(COLOURS, dict.fromkeys(row["model"] for row in rows), strict=False):
            own = [row for row in rows if (row["model"], row["dtype"]) == (model, dtype)]
            (whole,) = (place_of(row) for row in own if row["way"] == GIVEN[0])
            for way, (marker, line) in STYLES.items():
                if not (points := sorted(place_of(row) for row in own if row["way"] == way)):
                    continue
                start = [whole] if way == "mapped" else []  # the other ways may lack the first target
                panel.plot(*zip(*start, *points, strict=True), line, color=colour, linewidth=1.2)
                label = f"{model}: {WAYS[way].replace('`', '')}" if panel is panels[0] else None
                panel.plot(*zip(*points, strict=True), marker, color=colour, markersize=5.5, label=label)
            panel.plot(*whole, "*", color=colour, markersize=13)
            names = {whole: (model, (0, 9))}
            names |= {place_of(row): (row["target"], (8, -3)) for row in own if row["way"] == "mapped"}
            style = {"fontsize": 8, "color": colour, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.4}}
            for place, (text, aside) in names.items():
                panel.annotate(text, place, aside, textcoords="offset points", **style)
        panel.set(xscale="log", ylabel=f"mean of {len(JUDGED)} tasks, {dtype}")
        panel.margins(0.1)
        panel.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[1].set_xlabel("short texts a second, one thread")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    plt.close(figure)


def place_of(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["texts a second"]["median"], 100 * row["scores"][MEAN]["score"]


if __name__ == "__main__":
    raise SystemExit(main())
