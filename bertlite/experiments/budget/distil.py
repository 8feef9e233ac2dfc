"""Distillation after pruning: the remaining layers are trained with the given model as teacher, within a time.

Embeddings stay: they are the given model's own, and training them takes a third of a step's time.  The teacher runs
once on each text if its outputs fit in memory: a step then takes only the small model's time.

The number of steps is fixed when the training begins, by the measured time of a step.  So a killed training that is
continued ends with the same weights.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bertlite.experiments.budget.search import State
from bertlite.experiments.data import EncodedExamples, batch_indices
from bertlite.experiments.evaluate import run_model, task_of_head
from bertlite.experiments.finetune import Recipe, finetune_
from bertlite.support.extras import import_optional
from bertlite.support.progress import Progress, in_words

RECIPE = Recipe(epochs=1, distil=1.0, hidden=1.0)
LR = 0.1  # peak learning rate times the hidden size
LABELS = 0.5  # weight of the labels in the loss, if there are any
TIMED = 12  # steps to time; the first does not count
CHECKS = 5  # evaluations on the texts to judge by, in addition to the pruned model's
STATES, ENDS = "hidden_states", ("start_logits", "end_logits")
LOGITS = ("logits", "prediction_logits", "seq_relationship_logits", *ENDS)
MEMORY = 2**31  # the most bytes for the teacher's outputs


class TooShortError(ValueError):
    """The minutes are too few for a step of training."""


@dataclass(frozen=True)
class Distillation:
    """A training with the given model as teacher.

    Args:
        data: the texts to learn from.
        labelled: their labels are learnt from too.
        minutes: the time of running the teacher, timing, steps and checks; saving the state, once a minute, is extra.
        score: returns how good a model is on the texts to judge by.
        clock: returns the seconds that are counted.

    Raises:
        ModuleNotFoundError: accelerate is not installed.
        TooShortError: the minutes are not above 0.
        ValueError: the model has a head that predicts neither classes nor numbers.
    """

    teacher: Any
    data: EncodedExamples
    labelled: bool
    minutes: float
    score: Callable[[Any], Any]
    seed: int = 0
    device: str = "cpu"
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise TooShortError(f"--distil is {self.minutes:g}; give minutes above 0")
        kind = getattr(self.teacher, "label_kind", None)  # None for an encoder without a head
        if kind not in ("class", "number", None):
            raise ValueError(
                f"{type(self.teacher).__name__} predicts {kind}; --distil takes heads for classes or numbers, or none"
            )
        import_optional("accelerate", "--distil", "experiments")

    def train_(self, model: Any, state: State, progress: Progress) -> dict[str, Any]:
        """Train a model and return the report's entries on the training.

        Raises:
            TooShortError: the time is too short for a step.
        """
        recipe = replace(RECIPE, lr=LR / model.config.hidden_size, distil=1 - LABELS * self.labelled, seed=self.seed)
        model.base_model.embeddings.requires_grad_(False)
        if self.output_bytes > MEMORY:
            warnings.warn(
                "the given model runs in every step of training, not once: its outputs for all texts would take"
                f" {self.output_bytes / 1e9:.2g} GB",
                stacklevel=2,
            )
        progress.stage("trial steps")
        kept = state.once("distillation", lambda: self.plan(model, recipe))
        epochs = kept["steps"] / len(batch_indices(self.data, recipe.batch_size))
        progress.stage("training", kept["steps"], "steps")
        progress.bar.close()  # the training has its own
        began = self.clock()
        best = self.finetune_(
            model,
            replace(recipe, epochs=epochs),
            progress=progress.shown,
            state=state.folder / "training",
            saves=max(1, round(self.minutes)),
            score=lambda: self.score(model),
            checks=CHECKS,
        )
        model.base_model.embeddings.requires_grad_(True)
        facts = {"minutes": self.minutes, "texts": len(self.data), "labels": self.labelled, "epochs": epochs}
        wall = round(self.clock() - began, 1)
        return {**facts, **kept, "best_step": best, "lr": recipe.lr, "hidden": recipe.hidden, "wall_seconds": wall}

    def check_time(self) -> None:
        """Raise TooShortError if the minutes are too few to train the given model, so that no search is in vain."""
        some = min(len(self.data), TIMED * RECIPE.batch_size)
        trial = replace(self, data=EncodedExamples(self.data.rows[:some], self.data.labels[:some]))
        self.score(self.teacher)  # only the first check runs the teacher too
        recording, others, step = trial.seconds(self.teacher, RECIPE)
        needed = recording * len(self.data) / some + others + step
        if 60 * self.minutes < needed:
            raise TooShortError(
                f"--distil {self.minutes:g} is too short: running the given model, timing and {CHECKS + 1} checks take"
                f" {in_words(needed - step)}, and a step {step:.2g} s; give {needed / 60:.2g} minutes or more"
            )

    def plan(self, model: Any, recipe: Recipe) -> dict[str, Any]:
        """Return the number of steps that the time is enough for, 1 or more, and the seconds of a step."""
        recording, others, step = self.seconds(model, recipe)
        return {"steps": max(1, int((60 * self.minutes - recording - others) / step)), "step_seconds": step}

    def seconds(self, model: Any, recipe: Recipe) -> tuple[float, float, float]:
        """Return the seconds of recording the teacher, of timing and all checks, and of a step."""
        model, stamps, began = copy.deepcopy(model), list[float](), self.clock()
        model.base_model.embeddings.requires_grad_(False)
        _ = self.recorded
        recorded = self.clock()
        some = replace(recipe, epochs=TIMED / len(batch_indices(self.data, recipe.batch_size)))
        self.finetune_(model, some, log=lambda **_: stamps.append(self.clock()))
        step = mean(after - before for before, after in pairwise(stamps))
        last = self.clock()
        self.score(model)
        now = self.clock()
        return recorded - began, now - recorded + (CHECKS + 1) * (now - last), step

    @cached_property
    def output_bytes(self) -> int:
        """The size of the teacher's hidden states, and of its predictions for single tokens, for all texts."""
        tokens = [self.data.length(i) for i in range(len(self.data))]
        shortest = tokens.index(min(tokens))
        [found], of_tokens = computed_outputs(self.teacher, self.data, [shortest])
        of_one = sum(found[name].nbytes for name in of_tokens)
        return of_one * sum(tokens) // tokens[shortest]

    @cached_property
    def recorded(self) -> Any:
        """A record of the teacher if that fits in MEMORY, else the teacher."""
        return RecordedTeacher(self.teacher, self.data) if self.output_bytes <= MEMORY else self.teacher

    def finetune_(self, model: Any, recipe: Recipe, **options: Any) -> int:
        task = task_of_head(model.config.num_labels)
        return finetune_(model, self.data, task, recipe, teacher=self.recorded, device=self.device, **options)


def computed_outputs(
    model: Any, data: EncodedExamples, indices: Sequence[int]
) -> tuple[list[dict[str, Tensor]], set[str]]:
    """Return a model's outputs for each text, logits and hidden states (S, layers, D), and which are for tokens."""
    out = run_model(model, data.batch(indices, torch.float32, model.device), output_hidden_states=True)
    found = {name: out[name].cpu() for name in LOGITS if out.get(name) is not None}
    of_tokens = {name for name, x in found.items() if x.dim() == 3 or name in ENDS} | {STATES}
    found[STATES] = torch.stack(out.hidden_states, 2).cpu()  # (B, S, layers, D)
    each = []
    for row, index in enumerate(indices):
        ends = {name: data.length(index) for name in of_tokens}
        each.append({name: x[row, : ends[name]].clone() if name in ends else x[row] for name, x in found.items()})
    return each, of_tokens


class RecordedTeacher(nn.Module):
    """The outputs of a model that a distillation needs, computed once and kept in memory: logits, hidden states."""

    def __init__(self, model: Any, data: EncodedExamples) -> None:
        super().__init__()
        self.known: dict[Any, dict[str, Tensor]] = {}  # {token ids and types: outputs}
        self.of_tokens = {STATES}
        for indices in batch_indices(data, RECIPE.batch_size):
            each, self.of_tokens = computed_outputs(model, data, indices)
            self.known.update((data.rows[i], found) for i, found in zip(indices, each, strict=True))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None, **_: bool
    ) -> Any:
        types = [()] * len(input_ids) if token_type_ids is None else token_type_ids.tolist()
        rows = zip(input_ids.tolist(), types, attention_mask.sum(1).tolist(), strict=True)
        found = [self.known[tuple(ids[:n]), tuple(types[:n])] for ids, types, n in rows]
        values = {}
        for name in found[0]:
            each = [text[name] for text in found]
            whole = pad_sequence(each, batch_first=True) if name in self.of_tokens else torch.stack(each)
            values[name] = whole.to(input_ids.device)
        return SimpleNamespace(**{**values, STATES: values[STATES].unbind(2)})
