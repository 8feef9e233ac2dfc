"""Remove heads in many ways from one dense model: each way is a cell, and writes a run's folder.

data = {name: DataSource(f"{name}.tsv") for name in ("train", "dev")}
setting = Setting(model="runs/sst2/model", task="classification", **data)
prune_run(Experiment(setting), grid(["michel", "random"], [0.3, 0.5]), "runs/sst2/prune")
"""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertlite import head_importance, prune_heads
from bertlite.checkpoint.folders import EVERYTHING, check_output
from bertlite.config import check_known
from bertlite.experiments.data import DataSource, EncodedExamples, batch_indices
from bertlite.experiments.evaluate import TASKS, DivergedError, Task, predict
from bertlite.experiments.files import MODEL, finish_run, mask_of, model_key, model_sha256, record_of
from bertlite.experiments.finetune import Recipe, finetune_
from bertlite.experiments.statistics import Array
from bertlite.opened.checkpoint import Checkpoint
from bertlite.pruning import METHODS, NORMALISERS, REDUCTIONS, TARGETS, macs, rank_heads, repair_
from bertlite.pruning.criteria import CRITERIA
from bertlite.pruning.importance.allocation import Choice, kept_sizes
from bertlite.pruning.importance.batches import Batch, inputs_of
from bertlite.pruning.importance.structures import HEADS
from bertlite.support.files import lock_folder, sha256_of
from bertlite.support.process import door
from bertlite.support.progress import Progress
from bertlite.support.runs import Record, Run, read_runs, run_is_finished

MASKS, SCORES = "masks.json", "scores.json"
REPAIRS = ("none", *METHODS)
INVERTED = "inverted"  # remove the heads with the highest scores
RESCORED = "rescored"  # remove the heads in ROUNDS rounds, and score the rest anew before each
ROUNDS = 10
SEEDED = "random"  # the criterion that has seeds of its own
COUNTED = 128  # multiply-accumulates are counted for a sequence of so many tokens


@dataclass(frozen=True)
class Setting:
    """The settings that all cells of an experiment share.

    Args:
        model: the dense model: a folder or a hub id with its tokenizer.
        train: source of the examples for calibration and retraining.
        dev: source of the examples for evaluation.
        max_length: the number of tokens to truncate texts to; by default as for `read_tokenizer`.
        calibration: number of training examples for criteria and repair.
        retrain: number of training examples for retraining; None is all.
        recipe: settings of the retraining.
    """

    model: str
    task: str
    train: DataSource
    dev: DataSource
    max_length: int | None = None
    calibration: int = 512
    retrain: int | None = None
    recipe: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class Cell:
    """One way of pruning.

    Args:
        criterion: a name of `bertlite.pruning.criteria.CRITERIA`, followed by options such as "fisher/batch/layer_l2",
            "michel/kl/inverted" or "michel/rescored".
        fraction: share of the heads to remove, those with the lowest scores.
        at_least: heads that every layer keeps.
        repair: "none", or a name of `bertlite.pruning.METHODS`.
        epochs: passes of retraining after repair.
        seed: seed of the calibration sample, of random scores and of retraining.
    """

    criterion: str = "michel"
    fraction: float = 0.5
    at_least: int = 1
    repair: str = "refit"
    epochs: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        parse_criterion(self.criterion)
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}; it must be a share, 0 to 1")
        check_known("repair", self.repair, REPAIRS)
        if not 0 <= self.epochs < math.inf:
            raise ValueError(f"epochs is {self.epochs}; it must be a finite number of 0 or more")


def parse_criterion(criterion: str) -> dict[str, Any]:
    """Return the keywords of `head_importance` for a name like "michel/batch/layer_l2"; and INVERTED and RESCORED.

    Raises:
        ValueError: a part is not a criterion, reduction, target or normaliser.
    """
    name, *parts = criterion.split("/")
    check_known("criterion", name, CRITERIA)
    found: dict[str, Any] = {"criterion": name, INVERTED: False, RESCORED: False}
    kinds = {"reduction": REDUCTIONS, "target": TARGETS, "normaliser": NORMALISERS}
    for part in parts:
        kind = next((kind for kind, names in kinds.items() if part in names), None)
        if part in (INVERTED, RESCORED):
            found[part] = True
        elif kind is None:
            have = ", ".join((*(name for names in kinds.values() for name in names), INVERTED, RESCORED))
            raise ValueError(f"criterion {criterion!r}: there is no option {part!r}; have: {have}")
        else:
            found[kind] = part
    return found


def grid(
    criteria: Sequence[str],
    fractions: Sequence[float],
    *,
    repairs: Sequence[str] = (Cell.repair,),
    epochs: Sequence[float] = (0.0,),
    seeds: Sequence[int] = (0,),
    random_seeds: Sequence[int] = range(5),
    at_least: int = Cell.at_least,
) -> list[Cell]:
    """Return every combination; "random" over `random_seeds`, the other criteria over `seeds`."""
    return [
        Cell(criterion, fraction, at_least, repair, length, seed)
        for criterion, fraction, repair, length in product(criteria, fractions, repairs, epochs)
        for seed in (random_seeds if parse_criterion(criterion)["criterion"] == SEEDED else seeds)
    ]


def task_named(name: str) -> Task:
    """Return a task; raise ValueError if there is none of this name."""
    check_known("task", name, TASKS)
    return TASKS[name]


def rescored(model: Any, score: Callable[[Any], Tensor], at_least: int) -> Tensor:
    """Return the order in which heads go if the rest is scored anew in every round, (layers, heads); nan if pruned.

    Michel et al. 2019 (arXiv:1905.10650) remove heads by scores of the whole model.  Their code can also score again
    before each step, `--exact_pruning`.

    Args:
        score: computes the scores of a model, (layers, heads).
        at_least: heads that every layer keeps; they come last.
    """
    present = HEADS.present(model)
    total, removable = int(present.sum()), int((present.sum(1) - at_least).clamp(min=0).sum())
    order = torch.full(present.shape, float(total), dtype=torch.float64, device="cpu").masked_fill(~present, math.nan)

    step = math.ceil(total / ROUNDS)
    for gone in range(0, removable, step):
        scores = score(model)
        choice = rank_heads(scores, count=min(step, removable - gone), at_least=at_least)
        heads = [(layer, head) for layer, heads in choice.items() for head in heads]
        for place, head in enumerate(sorted(heads, key=lambda head: float(scores[head])), gone):
            order[head] = place
        model = prune_heads(model, choice)
    return order


class Experiment:
    """A dense model with its data, read once for all cells.

    Raises:
        ValueError, FileNotFoundError: the data or the model cannot be read, or labels do not fit the model.
    """

    def __init__(self, setting: Setting, device: str = "cpu") -> None:
        # The files to write with a model are held now: a run may take hours, and a folder may change meanwhile.
        self.setting, self.device = setting, device
        self.task = task_named(setting.task)
        self.source = Checkpoint.of(setting.model)
        self.source.hold()
        self.dense = self.source.load(self.task.model_class, device=device)
        self.task = self.task.of_checkpoint(self.source)

        # Labels are numbered by the model's classes, so that its outputs need no other order.
        self.train, self.dev = (self.task.read(each, self.dense.config) for each in (setting.train, setting.dev))

        # Faults of the data are errors here, before the first cell.
        for option, count in (("calibration", setting.calibration), ("train-examples", setting.retrain)):
            if count is not None and not 0 < count <= len(self.train):
                raise ValueError(f"--{option} is {count}; {self.train.name} has {len(self.train)}: take fewer")
        self.task.check_both(self.train, self.dev)

        # Runs are told apart by the length that the setting comes to, given or not.
        self.tokenizer = self.task.read_tokenizer(self.source, setting.max_length)
        self.setting = replace(setting, max_length=self.tokenizer.model_max_length)
        self.known_scores: dict[tuple[str, int, int | None], Tensor] = {}

    @cached_property
    def hashes(self) -> dict[str, dict[str, str]]:
        """Hashes of the model, of its weights and of everything that determines its outputs; and of the data."""
        key = model_key(self.dense, self.tokenizer, self.task.head if self.task.apart else None)
        data = {"train": self.train.sha256, "dev": self.dev.sha256}
        return {"model": {"dense": model_sha256(self.dense), "key": key}, "data": data}

    @cached_property
    def dev_data(self) -> EncodedExamples:
        """Examples for evaluation, as token ids."""
        return self.task.encode(self.dev, self.tokenizer)

    @cached_property
    def dense_outputs(self) -> Array:
        """Outputs of the dense model on `dev_data`."""
        return predict(self.dense, self.dev_data, self.task)

    def sample(self, count: int | None, seed: int) -> EncodedExamples:
        """Draw training examples."""
        return self.task.encode(self.train.sample(count, seed), self.tokenizer)

    def calibration(self, seed: int, size: int = 32) -> list[Batch]:
        """Return batches for criteria and repair; without labels for texts that are embedded separately."""
        data = self.sample(self.setting.calibration, seed)
        batches = [data.batch(indices, self.task.labels, self.device) for indices in batch_indices(data, size)]
        return [inputs_of(batch) for batch in batches] if self.task.apart else [*batches]

    def folder(self, cell: Cell, root: str | Path) -> Path:
        """Return the folder of the cell's run, whose name has a hash of everything that determines the result."""
        paths = ("model", "train", "dev")  # their contents count
        setting = {name: value for name, value in asdict(self.setting).items() if name not in paths}
        what = [asdict(cell), setting, self.hashes, self.train.classes]
        key = sha256_of(json.dumps(what, sort_keys=True))[:16]
        return Path(root) / f"{cell.criterion.replace('/', '-')}-{100 * cell.fraction:g}-{key}"

    def check(self, cell: Cell) -> None:
        """Check that a cell can be run, before any work.

        Raises:
            ValueError: so many heads cannot be removed, or the cell needs a loss that the task does not have.
        """
        present = HEADS.present(self.dense)
        self.choose(cell, torch.zeros(present.shape, dtype=torch.float32, device="cpu").where(present, math.nan))
        options = parse_criterion(cell.criterion)
        if self.task.apart and CRITERIA[options["criterion"]].measurement.needs_loss and options.get("target") != "kl":
            raise ValueError(f"{self.task.name} has no loss for one text: use {cell.criterion}/kl")
        if self.task.apart and cell.epochs:
            raise ValueError(f"{self.task.name} has no retraining: epochs must be 0")

    def choose(self, cell: Cell, scores: Tensor) -> Choice:
        """Return the heads that a cell removes by these scores, (layers, heads)."""
        count = round(cell.fraction * int(HEADS.present(self.dense).sum()))
        return rank_heads(scores, count=count, at_least=cell.at_least)

    def scores(self, cell: Cell) -> Tensor:
        """Return the dense model's scores, (layers, heads), computed once for all cells; the lowest go first."""
        options = parse_criterion(cell.criterion)
        inverted, again = options.pop(INVERTED), options.pop(RESCORED)
        key = cell.criterion, cell.seed, cell.at_least if again else None
        if key not in self.known_scores:
            batches = self.calibration(cell.seed) if CRITERIA[options["criterion"]].measurement.needs_data else []

            def score(model: Any) -> Tensor:
                teacher = self.dense if options.get("target") == "kl" and model is not self.dense else None
                found = head_importance(model, batches, seed=cell.seed, teacher=teacher, **options)
                return -found if inverted else found

            self.known_scores[key] = rescored(self.dense, score, cell.at_least) if again else score(self.dense)
        return self.known_scores[key]

    def pruned(self, cell: Cell, log: Any = None) -> Any:
        """Return the model of a cell: pruned, repaired and retrained."""
        model = prune_heads(self.dense, self.choose(cell, self.scores(cell)))
        if cell.repair != "none":
            repair_(model, self.dense, self.calibration(cell.seed), cell.repair)
        if cell.epochs:
            recipe = replace(self.setting.recipe, epochs=cell.epochs, seed=cell.seed)
            data = self.sample(self.setting.retrain, cell.seed)
            finetune_(model, data, self.task, recipe, teacher=self.dense, log=log, device=self.device)
        return model

    def run(self, cell: Cell, root: str | Path, *, save_model: bool = False) -> Path:
        """Run the cell unless it is finished, and return its folder.

        Args:
            save_model: keep the pruned model and its tokenizer in the folder, as `model`.

        Raises:
            FileExistsError: the cell is finished and did not keep the model that is asked for.
            ValueError: the cell cannot be run.
        """
        # The name of the folder tells the whole cell, so a finished one is this cell's.
        folder = self.folder(cell, root)
        if run_is_finished(folder):
            if save_model and not (folder / MODEL).exists():
                raise FileExistsError(f"{folder} is finished and did not keep its model: name another folder")
            return folder

        self.check(cell)
        config = {"cell": asdict(cell), "setting": asdict(self.setting)}
        with Run("prune", config, folder=folder, seed=cell.seed, device=self.device, **self.hashes) as run:
            pruned = self.pruned(cell, run.log)
            run.save(SCORES, {"criterion": cell.criterion, "scores": self.scores(cell).tolist()})
            run.save(MASKS, mask_of(pruned.config, self.hashes["model"]["dense"]))

            run.results = {
                "heads_kept": [heads for heads, _ in kept_sizes(pruned.config)],
                "parameters": pruned.num_parameters(),
                "macs": macs(pruned.config, COUNTED) / macs(self.dense.config, COUNTED),
            }

            finish_run(
                run,
                pruned,
                self.dev_data,
                self.task,
                data_name=self.dev.name,
                dense=self.dense_outputs,
                source=self.source if save_model else None,
                how=self.describe(cell),
                classes=self.setting.train.classes if self.task.name == "classification" else (),
            )
        return folder

    def describe(self, cell: Cell) -> list[str]:
        """Return sentences on how a cell prunes its model."""
        heads = f"{100 * cell.fraction:g} % of the heads"
        found = [f"{heads} were removed by the criterion {cell.criterion}, on {self.setting.calibration} examples."]
        if cell.repair != "none":
            found.append(f"The remaining weights were repaired ({cell.repair}).")
        if cell.epochs:
            found.append(f"It was retrained for {cell.epochs:g} epochs.")
        return found


@door
def prune_run(
    experiment: Experiment,
    cells: Sequence[Cell],
    folder: str | PathLike[str],
    *,
    save_model: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Score, prune, repair, retrain and evaluate in many ways, each in a folder; finished ones are not done again.

    A cell whose training diverges is reported at once and left out; its folder says that it failed.

    Args:
        cells: the ways, such as from `grid`.
        folder: the folders of the runs are made in it.
        save_model: keep the pruned models.
        progress: show the number of finished ones.

    Returns:
        The record: as "runs" the facts of each run with its folder and results, in the order of the cells.

    Raises:
        ValueError: a cell cannot be run; raised before any work.
        BlockingIOError: another process is writing to the folder.
        DivergedError: all cells diverged.
    """
    root = Path(folder).expanduser()
    setting = experiment.setting

    # All cells are checked before the first runs, which may take hours.
    for cell in cells:
        experiment.check(cell)
        inputs = setting.model, setting.train.path, setting.dev.path
        check_output(experiment.folder(cell, root), EVERYTHING, *inputs, own=True)

    before = sum(run_is_finished(experiment.folder(cell, root)) for cell in cells)
    with lock_folder(root), Progress(len(cells), "cells", what="run", done=before, shown=progress) as bar:
        runs: list[Record] = []
        for cell in cells:
            # A cell that diverges must not cost the results of all other cells.
            known = run_is_finished(experiment.folder(cell, root))
            try:
                runs += read_runs(experiment.run(cell, root, save_model=save_model))
            except DivergedError as error:
                warnings.warn(f"{experiment.folder(cell, root).name} failed and is left out: {error}", stacklevel=2)
            bar.advance(0 if known else 1)

    if not runs:
        raise DivergedError(f"all {len(cells)} runs diverged: give a smaller --lr")
    return record_of("run", runs)
