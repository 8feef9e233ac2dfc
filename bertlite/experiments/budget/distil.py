"""Distillation after pruning: the remaining layers are trained with the given model as teacher, for minutes or steps.

Embeddings stay: they are the given model's own, and training them takes a third of a step's time.  The teacher runs
once on each text that the steps use, while its outputs fit in memory.  There is no dropout.  Teacher, forward and
gradients are in bfloat16 if the processor multiplies that fast.

The number of steps is fixed when the training begins, by the measured time of a step.  So a killed training that is
continued ends with the same weights.
"""

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bertlite.experiments.budget.search import State
from bertlite.experiments.data import EncodedExamples, batch_indices
from bertlite.experiments.evaluate import run_model, task_of_head
from bertlite.experiments.finetune import Best, Recipe, finetune_, plan_batches
from bertlite.experiments.settings import steps_of
from bertlite.inference.optimize import PLAIN, optimize_for_inference
from bertlite.models.base import BertPreTrainedModel
from bertlite.runtime.library import processor_flags
from bertlite.support.extras import import_optional
from bertlite.support.memory import peak_memory
from bertlite.support.progress import Progress, in_words

RECIPE = Recipe(epochs=1, distil=1.0, hidden=1.0)
LR = 0.1  # peak learning rate times the hidden size
LABELS = 0.5  # weight of the labels in the loss, if there are any
TIMED, TRIED = 12, 3  # steps to time, and before a search; the first does not count
TIMED_ON_A_GPU = 125  # there the first half does not count: steps are recorded in it
CHECKS = 5  # evaluations on the texts to judge by, in addition to the pruned model's
STATES, ENDS = "hidden_states", ("start_logits", "end_logits")
LOGITS = ("logits", "prediction_logits", "seq_relationship_logits", *ENDS)
MEMORY = 2**31  # the most bytes for the teacher's outputs
HALF = frozenset({"avx512_bf16", "amx_bf16"})  # flags of processors that multiply bfloat16 faster


class TooShortError(ValueError):
    """The minutes are too few for a step of training."""


@dataclass(frozen=True)
class Distillation:
    """A training with the given model as teacher.

    Args:
        data: the texts to learn from.
        labelled: their labels are learnt from too.
        amount: minutes, or steps such as "500steps".  Minutes are the time of running the teacher, timing, steps and
            checks; saving the state, once a minute, is extra.
        score: returns how good a model is on the texts to judge by; its last part is the points that it loses.
        clock: returns the seconds that are counted.

    Raises:
        ModuleNotFoundError: accelerate is not installed.
        TooShortError: the minutes are not above 0.
        ValueError: the model has a head that predicts neither classes nor numbers.
    """

    teacher: Any
    data: EncodedExamples
    labelled: bool
    amount: float | str
    score: Callable[[Any], Any]
    seed: int = 0
    device: str = "cpu"
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise TooShortError(f"--distil is {self.minutes:g}; give minutes above 0")
        kind = getattr(self.teacher, "label_kind", None)  # None for an encoder without a head
        if kind not in ("class", "number", None):
            name = type(self.teacher).__name__
            raise ValueError(f"{name} predicts {kind}; --distil takes heads for classes or numbers, or none")
        import_optional("accelerate", "--distil", "experiments")

    @property
    def minutes(self) -> float | None:
        """The minutes; None for a number of steps."""
        return self.amount if isinstance(self.amount, float | int) else None

    def train_(self, model: Any, state: State, progress: Progress) -> dict[str, Any]:
        """Train a model and return the report's entries on the training."""
        recipe = replace(RECIPE, lr=LR / model.config.hidden_size, distil=1 - LABELS * self.labelled, seed=self.seed)
        trained = [x for x in model.base_model.embeddings.parameters() if x.requires_grad]
        model.base_model.embeddings.requires_grad_(False)
        progress.stage("trial steps")

        # The number of steps is fixed once, so that a continued training ends with the same weights.
        kept = state.once("distillation", lambda: self.plan(model, recipe))
        recipe = replace(recipe, epochs=kept["steps"] / len(self.batches))
        began, peak = self.clock(), peak_memory()

        # The teacher's outputs are computed before, once for each text.
        self.recorded.record(progress.over("given model", self.batches[: kept["steps"]], "batches"))

        progress.stage("training", kept["steps"], "steps")
        progress.bar.close()  # the training has its own
        best = self.finetune_(
            model,
            recipe,
            progress=progress.shown,
            state=state.folder / "training",
            saves=max(1, round(self.minutes or kept["steps"] * kept["step_seconds"] / 60)),
            score=lambda: self.score(model),
            checks=CHECKS,
        )

        for parameter in trained:
            parameter.requires_grad_(True)
        facts = {"minutes": self.minutes, "texts": len(self.data), "labels": self.labelled, "epochs": recipe.epochs}
        found = {"best_step": best.step, "curve": [[step, *value] for step, value in best.curve]}
        memory = {"start_bytes": peak, "peak_bytes": peak_memory()}
        wall = round(self.clock() - began, 1)
        return {**facts, **kept, **found, **memory, "lr": recipe.lr, "hidden": recipe.hidden, "wall_seconds": wall}

    def check_time(self) -> None:
        """Raise TooShortError if the minutes are too few to train the given model, so that no search is in vain."""
        if self.minutes is None:
            return
        self.score(self.teacher)  # only the first check runs the teacher too
        others, teacher, step = self.seconds(self.teacher, RECIPE, TRIED)
        needed = others + teacher + step
        if 60 * self.minutes < needed:
            raise TooShortError(
                f"--distil {self.minutes:g} is too short: running the given model, timing and {CHECKS + 1} checks take"
                f" {in_words(needed - step)}, and a step {step:.2g} s; give {needed / 60:.2g} minutes or more"
            )

    def plan(self, model: Any, recipe: Recipe) -> dict[str, Any]:
        """Return the number of steps, 1 or more, and the seconds of a step without the teacher."""
        others, teacher, step = self.seconds(model, recipe)
        found = steps_of(self.amount)
        if self.minutes is not None:
            left, epoch = 60 * self.minutes - others, len(self.batches)
            first = epoch * (teacher + step)  # seconds of the first epoch
            kept = min(1.0, MEMORY * self.recorded.batches / (epoch * self.recorded.bytes))
            later = step + (1 - kept) * teacher  # seconds of a step in another epoch
            found = max(1, int(left / (teacher + step) if left < first else epoch + (left - first) / later))
        return {"steps": found, "step_seconds": step}

    def seconds(self, model: Any, recipe: Recipe, timed: int = TIMED) -> tuple[float, float, float]:
        """Return the seconds of preparing, timing and all checks, of the teacher on a batch, and of a step.

        Args:
            timed: the steps of a copy that are timed on the CPU.
        """
        gpu = self.device != "cpu"
        timed = TIMED_ON_A_GPU if gpu else timed
        model, stamps, began = copy.deepcopy(model), list[tuple[int, float]](), self.clock()
        model.base_model.embeddings.requires_grad_(False)
        some = replace(recipe, epochs=timed / len(self.batches))
        _, prepared = self.recorded, self.clock()
        teacher, ready = self.teacher_seconds, self.clock()
        self.finetune_(model, some, log=lambda step, **_: stamps.append((step, self.clock())))
        (first, before), (last, after) = stamps[len(stamps) // 2 if gpu else 0], stamps[-1]
        step = (after - before) / (last - first) * self.longer(timed)
        trained = self.clock()
        self.score(model)
        now = self.clock()
        return prepared - began + now - ready + (CHECKS + 1) * (now - trained), teacher, step

    def longer(self, timed: int) -> float:
        """Return the mean length of all texts, divided by the mean length in the first batches."""
        some = [self.data.length(i) for batch in self.batches[:timed] for i in batch]
        return mean(self.data.length(i) for i in range(len(self.data))) / mean(some)

    @cached_property
    def teacher_seconds(self) -> float:
        """The seconds of the teacher on a batch, from some that are recorded."""
        recorded, began = self.recorded, self.clock()
        recorded.record(self.batches[: TIMED if self.device == "cpu" else TIMED_ON_A_GPU])
        return (self.clock() - began) / recorded.batches * self.longer(recorded.batches)

    @cached_property
    def batches(self) -> list[list[int]]:
        """The batches of the first epoch."""
        return plan_batches(self.data, replace(RECIPE, seed=self.seed))

    @cached_property
    def recorded(self) -> "RecordedTeacher":
        """The teacher, in a faster form if there is one, with a record of its outputs."""
        model, dtype = self.teacher, torch.bfloat16 if self.half else torch.float32
        if isinstance(model, BertPreTrainedModel):
            model = optimize_for_inference(model, dtype=dtype, backend="auto" if self.device == "cpu" else PLAIN)
        return RecordedTeacher(model, self.data, [])

    @property
    def half(self) -> bool:
        """True where bfloat16 is faster."""
        return torch.cuda.is_bf16_supported() if self.device != "cpu" else not HALF.isdisjoint(processor_flags())

    def finetune_(self, model: Any, recipe: Recipe, **options: Any) -> Best:
        task = task_of_head(model.config.num_labels)
        how: Any = {"teacher": self.recorded, "device": self.device, "dropout": False, "half": self.half, **options}
        return finetune_(model, self.data, task, recipe, **how)


Outputs = dict[str, Tensor]


class RecordedTeacher(nn.Module):
    """The outputs of a model that a distillation needs, logits and hidden states, computed once for a recorded text.

    Args:
        batches: the batches of texts to record; by default all.
    """

    def __init__(self, model: Any, data: EncodedExamples, batches: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__()
        self.run, self.data = partial(outputs_of_texts, model), data
        self.known: dict[Any, Outputs] = {}  # {token ids and types: outputs}
        self.bytes = self.batches = 0  # recorded
        self.record(batch_indices(data, RECIPE.batch_size) if batches is None else batches)

    def record(self, batches: Iterable[Sequence[int]]) -> None:
        """Run the model on batches of texts, those that are new, and keep its outputs until MEMORY is full."""
        for indices in batches:
            keys = [self.data.rows[i] for i in indices]
            if self.bytes < MEMORY and not all(key in self.known for key in keys):
                found = self.run(self.data.batch(indices, torch.float32))
                self.known.update(zip(keys, found, strict=True))
                self.bytes += sum(x.nbytes for each in found for x in each.values())
                self.batches += 1

    def known_outputs(self, batch: Mapping[str, Tensor]) -> Outputs:
        """Return the outputs for a batch: logits, and the hidden states of all layers, (B, S, layers, D).

        The model runs on texts that are not recorded.
        """
        ids, segments = batch["input_ids"], batch.get("token_type_ids")
        types = [()] * len(ids) if segments is None else segments.tolist()
        rows = zip(ids.tolist(), types, batch["attention_mask"].sum(1).tolist(), strict=True)
        keys = [(tuple(ids[:n]), tuple(kinds[:n])) for ids, kinds, n in rows]
        new = [i for i, key in enumerate(keys) if key not in self.known]
        inputs = {name: x[new] for name, x in batch.items() if name != "labels"}
        others = dict(zip(new, self.run(inputs) if new else (), strict=True))
        found, values = [others.get(i) or self.known[key] for i, key in enumerate(keys)], {}
        for name, first in found[0].items():
            each = [text[name] for text in found]
            by_token = name in ENDS or first.dim() > 1
            values[name] = pad_sequence(each, batch_first=True) if by_token else torch.stack(each)
        return values


@torch.no_grad()
def outputs_of_texts(model: Any, batch: Mapping[str, Tensor]) -> list[Outputs]:
    """Return a model's outputs for each text of a batch: logits, and hidden states (S, layers, D) in bfloat16."""
    inputs = {name: x.to(model.device) for name, x in batch.items()}
    out = run_model(model, inputs, output_hidden_states=True)
    found = {name: getattr(out, name).cpu() for name in LOGITS if getattr(out, name, None) is not None}
    states = torch.stack(out.hidden_states, 2).to("cpu", torch.bfloat16)  # (B, S, layers, D)
    each = []
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        of_text = {name: x[row, :length] if x.dim() == 3 or name in ENDS else x[row] for name, x in found.items()}
        each.append({name: x.clone() for name, x in (*of_text.items(), (STATES, states[row, :length]))})
    return each
