"""An experiment scores, prunes, repairs, retrains and evaluates, and records each cell in a run's folder.

data = {name: DataSource(f"{name}.tsv") for name in ("train", "dev")}
setting = Setting(model="runs/sst2/model", task="classification", **data)
Experiment(setting).run(Cell(criterion="michel", fraction=0.5, repair="refit"), root="runs/sst2/prune")
"""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertlite import prune_heads, prune_neurons
from bertlite.experiments.cell import (
    GATES,
    INVERTED,
    KNOWN,
    Cell,
    Setting,
    cell_facts,
    choose_units,
    parse_criterion,
    trained_gates,
)
from bertlite.experiments.data import (
    EncodedExamples,
    Examples,
    batch_indices,
    read_examples,
    read_tokenizer,
)
from bertlite.experiments.evaluate import TASKS, Task, evaluate, predict
from bertlite.experiments.files import (
    Given,
    ScoreFiles,
    class_names,
    mask_of,
    model_sha256,
    prediction_lines,
    read_scores,
    units_kept,
    write_scores,
)
from bertlite.experiments.finetune import finetune_
from bertlite.experiments.ship import write_run
from bertlite.experiments.statistics import Array
from bertlite.importance import (
    head_importance,
    iterative,
    macs,
    neuron_importance,
    rank_heads,
    repair_,
)
from bertlite.importance.allocation import Choice
from bertlite.importance.batches import Batch
from bertlite.importance.structures import HEADS
from bertlite.records import Record, Run, is_finished, read_runs, sha256_of

NO_SCORES = ScoreFiles()
MASKS, SCORES, MODEL = "masks.json", "scores.json", "model"
REPEATED = 1e-3  # allowed difference of a repeated run's outputs from those recorded
COUNTED = 128  # tokens of a sequence to count multiply-accumulates for
OPTIONS = {"calibration": "calibration", "retrain": "train-examples"}  # of the command, for fields of a Setting


def warn_of_overlap(train: Examples, dev: Examples) -> None:
    """Warn if examples for evaluation are also used for training."""
    known = set(train.texts)
    shared = sum(texts in known for texts in dev.texts)
    if shared:
        warnings.warn(
            f"{shared} of the {len(dev)} examples of {dev.name} are also in {train.name}, so they are not held out",
            stacklevel=3,
        )


class Experiment:
    """A dense model with its data, read once for all cells.

    Args:
        progress: show the progress of retraining.

    Raises:
        ValueError, FileNotFoundError: the data or the model cannot be read, or labels do not fit the model.
    """

    def __init__(self, setting: Setting, device: str = "cpu", progress: bool = False) -> None:
        if setting.task not in TASKS:
            raise ValueError(f"there is no task {setting.task!r}; have: {', '.join(TASKS)}")
        self.setting, self.device, self.progress = setting, device, progress
        self.task: Task = TASKS[setting.task]
        self.dense = self.task.load(setting.model, device=device)
        self.task = self.task.of_checkpoint(setting.model)
        classes = class_names(self.dense.config) if self.task.labels is torch.long else ()
        read = partial(read_examples, words=self.task.words, classes=classes)
        self.train, self.dev = read(setting.train), read(setting.dev)
        for name, count in (("calibration", setting.calibration), ("retrain", setting.retrain)):
            if count is not None and not 0 < count <= len(self.train):
                raise ValueError(
                    f"{name} is {count}; {self.train.name} has {len(self.train)} examples:"
                    f" say --{OPTIONS[name]} {len(self.train)}, or fewer"
                )
        for examples in (self.train, self.dev):
            self.task.check(examples, self.dense.config)
        self.tokenizer = read_tokenizer(setting.model, setting.max_length)
        if setting.dev != setting.train:  # `score` evaluates nothing
            warn_of_overlap(self.train, self.dev)

    @cached_property
    def hashes(self) -> dict[str, dict[str, str]]:
        """Hashes of the model and of the data."""
        return {
            "model": {"dense": model_sha256(self.dense)},
            "data": {"train": self.train.sha256, "dev": self.dev.sha256},
        }

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
        batches = [data.batch(indices, self.task.labels) for indices in batch_indices(data, size)]
        wanted = [name for name in batches[0] if name != "labels" or not self.task.apart]
        return [{name: batch[name].to(self.device) for name in wanted} for batch in batches]

    def key(self, cell: Cell, scores: ScoreFiles = NO_SCORES) -> str:
        """Return a hash of everything that determines the cell's result, files of scores included."""
        setting = {
            name: value for name, value in asdict(self.setting).items() if name not in ("model", "train", "dev")
        }
        if self.task.pooling != Task.pooling:
            setting["pooling"] = self.task.pooling
        parts = [json.dumps([cell_facts(cell), setting, self.hashes], sort_keys=True)]
        return sha256_of(*parts, *scores.contents())[:16]

    def folder(self, cell: Cell, root: str | Path, scores: ScoreFiles = NO_SCORES) -> Path:
        """Return the folder of the cell's run."""
        return Path(root) / f"{cell.criterion.replace('/', '-')}-{100 * cell.fraction:g}-{self.key(cell, scores)}"

    def check(self, cell: Cell) -> None:
        """Check that a cell can be run, before any work.

        Raises:
            ValueError: so many heads cannot be removed, or the cell needs a loss that the task does not have.
        """
        present = HEADS.present(self.dense)
        self.choose(cell)(torch.zeros(present.shape).where(present, math.nan), self.heads(cell))
        for name in {cell.criterion, cell.of_neurons}:
            asked = parse_criterion(name)
            if self.task.apart and KNOWN[asked["criterion"]].needs_loss and asked.get("target") != "kl":
                way = "another criterion" if asked["criterion"] == GATES.name else f"{name}/kl"
                raise ValueError(f"{self.task.name} has no loss for one text: use {way}")
        if self.task.apart and cell.epochs:
            raise ValueError(f"{self.task.name} has no retraining: epochs must be 0")

    def heads(self, cell: Cell) -> int:
        """Return the number of heads to remove."""
        return round(cell.fraction * int(HEADS.present(self.dense).sum()))

    def choose(self, cell: Cell) -> Callable[[Tensor, int], Choice]:
        """Return the function that chooses heads: (scores, number to remove) -> {layer: heads}."""
        return partial(rank_heads, uniform=cell.uniform, at_least=cell.at_least)

    def run(
        self,
        cell: Cell,
        root: str | Path,
        *,
        scores: str | Path | None = None,
        neuron_scores: str | Path | None = None,
        save_model: bool = False,
    ) -> Path:
        """Run the cell unless it is finished, and return its folder.

        Args:
            scores: a file of head scores (`bertlite prune score`), used in place of scoring.
            neuron_scores: a file of neuron scores, likewise.
            save_model: keep the pruned model and its tokenizer in the folder, as `model`; a finished run makes them
                again.

        Raises:
            ValueError: the cell cannot be run, the scores belong to another model, or the repeated model of a finished
                run gives other outputs.
        """
        dense = self.hashes["model"]["dense"]
        files = ScoreFiles(scores, neuron_scores)
        given = files.read(cell, self.dense, dense)
        folder = self.folder(cell, root, files)
        if is_finished(folder):
            if save_model and not (folder / MODEL).exists():
                self.save_model_again(cell, Path(root) / "scores", given, folder)
            return folder
        self.check(cell)
        config = {"cell": cell_facts(cell), "setting": asdict(self.setting)}
        data, model = self.hashes["data"], self.hashes["model"]
        with Run("prune", config, folder=folder, seed=cell.seed, data=data, model=model, device=self.device) as run:
            labels = self.dev_data.targets()
            for pruned, used in self.pruned(cell, Path(root) / "scores", given, run.log):
                outputs = predict(pruned, self.dev_data, self.task)
                found = evaluate(outputs, labels, self.task, self.dense_outputs)
                heads, neurons = units_kept(pruned.config)
                run.log(heads=sum(heads), **found)
                write_scores(folder / SCORES, used, cell.criterion, dense)
            run.save(MASKS, mask_of(pruned.config, dense))
            run.save_predictions(prediction_lines(labels, outputs=outputs, dense=self.dense_outputs))
            run.results = {
                **found,
                "dense": evaluate(self.dense_outputs, labels, self.task),
                "heads_kept": heads,
                "neurons_kept": neurons,
                "parameters": pruned.num_parameters(),
                "macs": macs(pruned.config, COUNTED) / macs(self.dense.config, COUNTED),
                **({"pooling": self.task.pooling} if self.task.apart else {}),
            }
            if save_model:
                self.save_model(pruned, Record(folder, {**run.facts, "results": run.results}))
        return folder

    def save_model(self, pruned: Any, record: Record) -> None:
        """Save the pruned model of a run in its folder as `model`, with all files needed to run it."""
        write_run(record.folder / MODEL, pruned, record, self.task, self.setting.model)

    def save_model_again(self, cell: Cell, cache: Path, given: Given, folder: Path) -> None:
        """Make and save the model of a finished run that did not keep it.

        Raises:
            ValueError: its outputs differ from those that the run recorded.
        """
        *_, (pruned, _) = self.pruned(cell, cache, given, lambda **_: None)
        (record,) = read_runs(folder)
        outputs = predict(pruned, self.dev_data, self.task)
        now = [line["outputs"] for line in prediction_lines(self.dev_data.targets(), outputs=outputs)]
        recorded = [line["outputs"] for line in record.predictions]
        difference = max(float(np.abs(np.subtract(a, b)).max(initial=0)) for a, b in zip(now, recorded, strict=True))
        if not difference <= REPEATED:
            raise ValueError(
                f"{folder} cannot be repeated here: its outputs differ by {difference:.1e}, more than {REPEATED:g};"
                " remove the folder to run it anew"
            )
        self.save_model(pruned, record)

    def pruned(self, cell: Cell, cache: Path, given: Given, log: Callable[..., None]) -> Iterator[tuple[Any, Tensor]]:
        """Yield the model after each step, pruned, repaired and retrained, with the scores of that step."""
        heads, choose = self.heads(cell), self.choose(cell)
        if cell.steps > 1:
            tune = partial(self.repair_and_retrain_, cell=cell, epochs=cell.epochs / cell.steps, log=log)
            score = partial(self.score, cell=cell)
            for step in iterative(self.dense, score, heads, steps=cell.steps, choose=choose, tune=tune):
                yield step.model, step.scores
            return
        scores, others = given
        if scores is None:
            scores = self.scores(cell, cache)
        if others is None and cell.prunes_neurons:
            others = self.scores(cell, cache, neurons=True)
        chosen, neurons = choose_units(self.dense.config, cell, heads, scores, others)
        model = prune_neurons(prune_heads(self.dense, chosen), neurons)
        self.repair_and_retrain_(model, cell, cell.epochs, log)
        yield model, scores

    def repair_and_retrain_(self, model: Any, cell: Cell, epochs: float, log: Callable[..., None]) -> None:
        """Repair and retrain a pruned model by the settings of the cell."""
        if cell.repair != "none":
            repair_(model, self.dense, self.calibration(cell.seed), cell.repair)
        if epochs:
            recipe = replace(self.setting.recipe, epochs=epochs, seed=cell.seed)
            data = self.sample(self.setting.retrain, cell.seed)
            finetune_(
                model,
                data,
                self.task,
                recipe,
                teacher=self.dense,
                log=log,
                device=self.device,
                progress=self.progress,
            )

    def scores(self, cell: Cell, cache: Path, neurons: bool = False) -> Tensor:
        """Return the dense model's scores, (layers, heads) or (layers, neurons); cells share them through a folder."""
        criterion = cell.of_neurons if neurons else cell.criterion
        what: list[Any] = ["neurons" if neurons else "heads", criterion, cell.seed, self.setting.calibration]
        if parse_criterion(criterion)["criterion"] == GATES.name:
            what += [cell.fraction, cell.gate_steps]
        dense = self.hashes["model"]["dense"]
        key = sha256_of(json.dumps([what, self.setting.max_length, self.hashes["data"]["train"], dense]))[:16]
        path = cache / f"{criterion.replace('/', '-')}-{key}.json"
        if path.exists():
            return read_scores(path, dense)
        found = self.score(self.dense, cell, neurons)
        write_scores(path, found, criterion, dense)
        return found

    def score(self, model: Any, cell: Cell, neurons: bool = False) -> Tensor:
        """Score a model's units, (layers, heads) or (layers, neurons); the lowest are removed first."""
        asked = parse_criterion(cell.of_neurons if neurons else cell.criterion)
        inverted = asked.pop(INVERTED)
        batches = self.calibration(cell.seed) if KNOWN[asked["criterion"]].needs_data else []
        if asked["criterion"] == GATES.name:
            return trained_gates(model, batches, self.heads(cell), cell.gate_steps, cell.seed)
        found = (neuron_importance if neurons else head_importance)(model, batches, seed=cell.seed, **asked)
        return -found if inverted else found
