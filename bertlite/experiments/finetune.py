"""Fine-tuning through accelerate, in one process or in several under torchrun."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.experiments.data import EncodedExamples, batch_indices
from bertlite.experiments.evaluate import DivergedError, Task
from bertlite.experiments.files import model_key
from bertlite.experiments.settings import Recipe as Recipe
from bertlite.inference.gpu.training import TrainingStep
from bertlite.support.files import read_json_lines, read_json_object, sha256_of, write_json, write_text
from bertlite.support.process import door
from bertlite.support.progress import Progress

STATE = "training"  # in the folder of a run that is not finished
FACTS = "facts.json"  # in the folder of a state
TEACHER = "teacher."  # begins the names of a teacher's outputs in a batch


@door
def finetune_(
    model: nn.Module,
    data: EncodedExamples,
    task: Task,
    recipe: Recipe,
    *,
    teacher: nn.Module | None = None,
    log: Callable[..., None] | None = None,
    describe: Callable[[], str] | None = None,
    device: str = "cpu",
    progress: bool = False,
    state: Path | None = None,
    saves: int = 20,
    score: Callable[[], Any] | None = None,
    checks: int = 5,
    dropout: bool = True,
    half: bool = False,
) -> "Best":
    """Train all weights of a model on labelled examples; under torchrun the processes share the batches of each step.

    The models end on the devices they came from, in eval mode.  Return the step whose weights it has, and the scores.

    Args:
        teacher: model for `recipe.distil`, or a module whose `known_outputs` looks up a model's; not changed.
        log: called as log(step=, loss=, lr=) about twenty times.
        describe: called after each epoch for a text to print with the epoch's mean loss; in one process.
        progress: show the number of finished steps.
        state: folder in which the state of the training is saved, `saves` times.  If it has a state, the training
            continues from it, and on the CPU ends with the weights of an uninterrupted one, bit for bit.
        score: returns how good the model is.  It is called before the first step and after each of `checks` equal
            parts of the training; the model ends with the weights of the highest score.
        dropout: train with the model's dropout.
        half: compute the forward and the gradients in bfloat16; weights, loss and optimizer stay as they are.

    Raises:
        ValueError: the examples and epochs make no step, the recipe distils without a teacher, or the state belongs to
            another training.
        DivergedError: the loss is nan or infinite.
    """
    if recipe.distil and teacher is None:
        raise ValueError(f"distil is {recipe.distil}; that needs a teacher")
    homes = [(each, x.device) for each in (model, teacher or nn.Module()) for x in islice(each.parameters(), 1)]
    torch.manual_seed(recipe.seed)

    # Under torchrun each process takes its share of every step's batches.
    accelerator = accelerator_on(device)
    share, rank = accelerator.num_processes, accelerator.process_index
    batches = plan_batches(data, recipe, share)
    steps = len(batches) // share  # a remainder would leave some processes waiting

    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(steps, recipe.warmup))

    # A state continues only the training that it came from, by a hash of all that decides the steps.
    best = Best(model, score, steps, checks)
    accelerator.register_for_checkpointing(schedule, best)
    what = "" if state is None else fingerprint(model, data, recipe, share, teacher)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    first = 0 if state is None else resume(accelerator, state, what)

    wrapped.train(dropout)
    train_on = training_step(accelerator, wrapped, optimizer, schedule, recipe, teacher, half)
    every, epoch = max(1, steps // 20), len(batch_indices(data, recipe.batch_size)) / share  # steps; may be a fraction
    losses: list[Tensor] = []  # in this epoch
    shown = progress and accelerator.is_local_main_process

    # Steps, with the loss watched, the best weights kept and the state saved on the way.
    with Progress(steps, "steps", what="training", done=first, shown=shown) as bar:
        for step in range(first, steps):
            loss = train_on(data.batch(batches[step * share + rank], task.labels))
            check_finite(loss, step + 1, steps, every, recipe.lr)
            if log is not None and accelerator.is_main_process and (step + 1) % every == 0:
                log(step=step + 1, loss=loss.item(), lr=float(schedule.get_last_lr()[0]))
            best.offer(step + 1)

            if state is not None and is_part(step + 1, steps, saves):
                save_state(accelerator, state, step + 1, what)
            bar.advance()
            losses.append(loss.detach())
            if int((step + 1) / epoch) > int(step / epoch) or step + 1 == steps:
                print_epoch(bar, (step + 1) / epoch, losses, describe)

    # The models go back to the devices they came from, the trained one with the best weights.
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    for each, home in homes:
        each.to(home)
    model.eval().zero_grad(set_to_none=True)
    best.restore_()
    return best


def accelerator_on(device: str) -> Any:
    """Return an Accelerator for a device; a GPU with a number becomes the current one, which accelerate takes."""
    from accelerate import Accelerator

    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    return Accelerator(cpu=device == "cpu")


def check_finite(loss: Tensor, step: int, steps: int, every: int, lr: float) -> None:
    """Raise DivergedError for a loss that is nan or infinite; on a GPU only now and then, since this waits for it."""
    if (loss.is_cpu or step % every == 0 or step == steps) and not loss.isfinite():
        place = f"{step} of {steps}"
        raise DivergedError(f"the loss is {loss.item()} at step {place}: give a smaller learning rate than {lr:g}")


def training_step(
    accelerator: Any, model: Any, optimizer: Any, schedule: Any, recipe: Recipe, teacher: nn.Module | None, half: bool
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Return the function that trains on a batch and returns its loss; on a single GPU it runs CUDA graphs."""
    if teacher is not None:
        teacher = teacher.to(accelerator.device).eval()
    known = getattr(teacher, "known_outputs", None)  # looks up a teacher's outputs, which are inputs of the loss then
    loss = partial(training_loss, recipe=recipe, teacher=teacher, half=half)

    def run_plainly(batch: Mapping[str, Tensor]) -> Tensor:
        found = loss(model, {name: x.to(accelerator.device) for name, x in batch.items()})
        accelerator.backward(found)
        accelerator.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return found

    # A step that can be recorded is launched at once on a GPU.
    run: Callable[[Mapping[str, Tensor]], Tensor] = run_plainly
    if records_steps(accelerator):
        casts = {"bf16": torch.bfloat16, "fp16": torch.float16}
        run = TrainingStep(
            accelerator.unwrap_model(model, keep_fp32_wrapper=False),  # without accelerate's autocast
            optimizer.optimizer,
            loss,
            clip=recipe.clip,
            schedule=schedule,
            # Mixed precision, which accelerate's configuration may ask for too.
            scaler=accelerator.scaler,
            autocast=torch.bfloat16 if half else casts.get(accelerator.mixed_precision),
            frozen=[] if teacher is None or known else [teacher],
        )

    # A teacher's stored outputs belong to the batch, as inputs of the loss.
    if known is None:
        return run
    return lambda batch: run({**batch, **{f"{TEACHER}{name}": x for name, x in known(batch).items()}})


def records_steps(accelerator: Any) -> bool:
    """Return whether steps are recorded as CUDA graphs."""
    return bool(accelerator.device.type == "cuda" and accelerator.num_processes == 1)


def print_epoch(bar: Progress, epoch: float, losses: list[Tensor], describe: Callable[[], str] | None) -> None:
    """Print the mean of the losses of an epoch with the text of `describe`, and clear them."""
    if describe is not None:
        bar.print(f"epoch {epoch:.3g}: loss {torch.stack(losses).mean():.4f}, {describe()}")
    losses.clear()


class Best:
    """The weights of a model at the check with the highest score; without a score, the last weights.

    `step` is their step, and `curve` has the step and the score of each check.
    """

    def __init__(self, model: nn.Module, score: Callable[[], Any] | None, steps: int, checks: int) -> None:
        self.model, self.score, self.steps, self.checks = model, score, steps, checks
        self.value: Any = None
        self.step, self.weights, self.curve = steps, dict[str, Tensor](), list[tuple[int, Any]]()
        self.offer(0)

    def offer(self, step: int) -> None:
        """Keep the model's current weights, if a check is due and their score is higher than all before."""
        if self.score is None or (step and not is_part(step, self.steps, self.checks)):
            return
        value = self.score()
        self.curve.append((step, value))
        if self.value is None or value > self.value:
            weights = {name: x.detach().clone() for name, x in self.model.state_dict().items()}
            self.step, self.value, self.weights = step, value, weights

    def restore_(self) -> None:
        """Give the model the kept weights."""
        if self.weights:
            self.model.load_state_dict(self.weights)
            self.weights = {}

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("step", "value", "weights", "curve")}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        vars(self).update(found)


def is_part(step: int, steps: int, parts: int) -> bool:
    """Return whether a step is the last of one of `parts` nearly equal parts of all steps."""
    return step * parts // steps > (step - 1) * parts // steps


def training_loss(
    model: nn.Module, batch: Mapping[str, Tensor], recipe: Recipe, teacher: nn.Module | None, half: bool = False
) -> Tensor:
    """Return the loss of a batch: for its labels, and with `recipe.distil` for the distance to the teacher."""
    from accelerate.utils import convert_outputs_to_fp32

    from bertlite.pruning import distillation_loss

    options: Any = {"return_dict": True, "output_hidden_states": recipe.hidden > 0}

    # Outputs of the teacher may be in the batch, recorded earlier; they are no inputs.
    known: dict[str, Any] = {name.removeprefix(TEACHER): x for name, x in batch.items() if name.startswith(TEACHER)}
    batch = {name: x for name, x in batch.items() if not name.startswith(TEACHER)}
    inputs = {name: x for name, x in batch.items() if name != "labels"}

    kind = next(iter(inputs.values())).device.type
    run: Any = convert_outputs_to_fp32(torch.autocast(kind, torch.bfloat16)(model.__call__)) if half else model
    out = run(**(inputs if recipe.distil == 1 else batch), **options)
    if teacher is None or not recipe.distil:
        return out.loss
    with torch.no_grad():
        if known:  # hidden states of all layers are one tensor, (B, S, layers, D)
            known["hidden_states"] = known["hidden_states"].float().unbind(2)
        wanted = SimpleNamespace(**known) if known else teacher(**inputs, **options)
    distance = distillation_loss(out, wanted, batch.get("attention_mask"), hidden_weight=recipe.hidden)
    return distance if recipe.distil == 1 else (1 - recipe.distil) * out.loss + recipe.distil * distance


def fingerprint(
    model: nn.Module, data: EncodedExamples, recipe: Recipe, processes: int, teacher: nn.Module | None
) -> str:
    """Return a hash of everything that determines a training."""
    models = [model_key(each) for each in (model, teacher) if each is not None]
    return sha256_of(json.dumps([models, asdict(recipe), processes, data.rows, data.labels]))


def save_state(accelerator: Any, state: Path, step: int, training: str) -> None:
    """Save the state of a training as a folder in `state`, and remove older ones."""
    folder = state / str(step)
    try:
        accelerator.save_state(str(folder), safe_serialization=False)  # safetensors drops all empty tensors but one
    except Exception as error:  # torch or safetensors raise their own kinds, as for a full disk
        raise OSError(f"the state of the training cannot be written to {folder}: {error}") from error
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(folder / FACTS, {"training": training})  # the last file: only a folder that has it is complete
        for other in state.iterdir():
            if other != folder:
                shutil.rmtree(other)
    accelerator.wait_for_everyone()


def resume(accelerator: Any, state: Path, training: str) -> int:
    """Restore a saved state, and return its step; 0 if there is none.

    Raises:
        ValueError: it belongs to another training.
    """
    check_state(state, training)
    if step := last_step(state):
        accelerator.load_state(str(state / str(step)))
    return step


def check_state(state: Path, training: str) -> None:
    """Raise ValueError if a state belongs to another training."""
    step = last_step(state)
    if step and read_json_object(state / str(step) / FACTS)["training"] != training:
        other = "the state of a training with other data, settings or weights"
        raise ValueError(f"{state} is {other}: give these again to continue it, or remove it to start again")


def last_step(state: Path) -> int:
    """Return the step of the last complete state, 0 if there is none."""
    return max((int(path.parent.name) for path in state.glob(f"*/{FACTS}")), default=0)


def keep_metrics(metrics: Path, state: Path) -> None:
    """Keep the lines of a killed training up to the step of its state; none without a state."""
    step = last_step(state)
    lines = [line for line in read_json_lines(metrics) if line["step"] <= step]
    if metrics.exists():
        write_text(metrics, "".join(json.dumps(line) + "\n" for line in lines))


def plan_batches(data: EncodedExamples, recipe: Recipe, processes: int = 1) -> list[list[int]]:
    """Return the batches of all epochs as indices, each epoch shuffled anew; raise ValueError if they make no step."""
    seeds = (recipe.seed * 1000 + epoch for epoch in range(math.ceil(recipe.epochs)))
    batches = [batch for seed in seeds for batch in batch_indices(data, recipe.batch_size, seed)]
    batches = batches[: round(recipe.epochs * len(batch_indices(data, recipe.batch_size)))]
    if len(batches) < processes:
        raise ValueError(f"{len(data)} examples, {recipe.epochs:g} epochs and {processes} processes make no step")
    return batches


def learning_rate_factor(steps: int, warmup: float) -> Callable[[int], float]:
    """Return the function from a step to its share of the peak learning rate."""
    rise = max(1, round(warmup * steps))
    return lambda step: min((step + 1) / rise, (steps - step) / max(1, steps - rise))
