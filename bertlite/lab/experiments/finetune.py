"""Fine-tuning through accelerate, in one process or in several under torchrun."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from bertlite.lab.experiments.data import EncodedExamples, batch_indices
from bertlite.lab.experiments.evaluate import Task
from bertlite.progress import Progress


@dataclass(frozen=True)
class Recipe:
    """The settings of training.

    Args:
        epochs: passes over the examples; a fraction is a part of one.
        lr: peak learning rate; it rises linearly over the first `warmup` of the steps and falls linearly to 0.
        warmup: share of the steps.
        clip: largest norm of the gradients.
        distil: weight of the distance to a teacher's logits in the loss, 0 to 1; the rest is the labels' loss.
    """

    epochs: float = 3
    lr: float = 5e-5
    batch_size: int = 32
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    distil: float = 0.0


def finetune_(
    model: nn.Module,
    data: EncodedExamples,
    task: Task,
    recipe: Recipe,
    *,
    teacher: nn.Module | None = None,
    log: Callable[..., None] | None = None,
    device: str = "cpu",
    progress: bool = False,
) -> None:
    """Train all weights of a model on labelled examples; under torchrun the processes share the batches of each step.

    The model ends on the device it came from, in eval mode.

    Args:
        teacher: model for `recipe.distil`; not changed.
        log: called as log(step=, loss=, lr=) about twenty times.
        progress: show how many steps are done.

    Raises:
        ValueError: the examples and epochs make no step, or the recipe distils and there is no teacher.
    """
    from accelerate import Accelerator

    from bertlite.importance import distillation_loss

    if recipe.distil and teacher is None:
        raise ValueError(f"distil is {recipe.distil}; that needs a teacher")
    home = next(model.parameters()).device
    torch.manual_seed(recipe.seed)
    accelerator = Accelerator(cpu=device == "cpu")
    batches = plan_batches(data, recipe)
    share, rank = accelerator.num_processes, accelerator.process_index
    steps = len(batches) // share  # a remainder would leave some processes waiting
    if not steps:
        raise ValueError(f"{len(data)} examples, {recipe.epochs:g} epochs and {share} processes make no step")
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(steps, recipe.warmup))
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    if teacher is not None:
        teacher = teacher.to(accelerator.device).eval()
    wrapped.train()
    every = max(1, steps // 20)
    shown = progress and accelerator.is_local_main_process
    with Progress(steps, "steps", what="training", shown=shown) as bar:
        for step in range(steps):
            batch = data.batch(batches[step * share + rank], task.labels)
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            out = wrapped(**batch)
            loss = out.loss
            if recipe.distil and teacher is not None:
                with torch.no_grad():
                    wanted = teacher(**{name: value for name, value in batch.items() if name != "labels"})
                loss = (1 - recipe.distil) * loss + recipe.distil * distillation_loss(out, wanted)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), recipe.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if log is not None and accelerator.is_main_process and (step + 1) % every == 0:
                log(step=step + 1, loss=loss.item(), lr=schedule.get_last_lr()[0])
            bar.advance()
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    model.to(home).eval()
    model.zero_grad(set_to_none=True)


def plan_batches(data: EncodedExamples, recipe: Recipe) -> list[list[int]]:
    """Return the batches of all epochs as indices, each epoch shuffled anew."""
    whole = math.ceil(recipe.epochs)
    batches = [
        batch for epoch in range(whole) for batch in batch_indices(data, recipe.batch_size, recipe.seed * 1000 + epoch)
    ]
    return batches[: round(recipe.epochs * len(batch_indices(data, recipe.batch_size)))]


def learning_rate_factor(steps: int, warmup: float) -> Callable[[int], float]:
    """Return the function from a step to its share of the peak learning rate."""
    rise = max(1, round(warmup * steps))
    return lambda step: min((step + 1) / rise, (steps - step) / max(1, steps - rise))


def is_main_process(device: str) -> bool:
    """Tell whether this process is the only one, or the one under torchrun that writes files."""
    from accelerate import PartialState

    return PartialState(cpu=device == "cpu").is_main_process
