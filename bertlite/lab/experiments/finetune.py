"""Fine-tuning through accelerate: one process, or several under torchrun, on whatever device they find."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from bertlite.lab.experiments.data import Encoded, order
from bertlite.lab.experiments.evaluate import Task


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Args:
        epochs: passes over the examples; a fraction is a part of one.
        lr: at its height; it rises over the first `warmup` of the steps and falls to 0, both in straight lines.
        distil: share of the loss that is the distance to a teacher's logits, 0 to 1; the rest is that to the labels.
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
    data: Encoded,
    task: Task,
    recipe: Recipe,
    *,
    teacher: nn.Module | None = None,
    log: Callable[..., None] | None = None,
    device: str = "cpu",
    progress: bool = False,
) -> None:
    """Train all weights of a model on labelled examples; under torchrun, every process a share of each step's batches.

    The model ends on the device it came from, in eval mode.

    Args:
        teacher: for `recipe.distil`; not changed.
        log: called as log(step=, loss=, lr=) about twenty times.

    Raises:
        ValueError: no steps come of it, or the recipe distils and there is no teacher.
    """
    from accelerate import Accelerator
    from tqdm import tqdm

    from bertlite.importance import distillation_loss

    if recipe.distil and teacher is None:
        raise ValueError(f"distil is {recipe.distil}; that needs a teacher")
    home = next(model.parameters()).device
    torch.manual_seed(recipe.seed)
    accelerator = Accelerator(cpu=device == "cpu")
    batches = plan(data, recipe)
    share, rank = accelerator.num_processes, accelerator.process_index
    steps = len(batches) // share  # what is left over would leave some processes waiting
    if not steps:
        raise ValueError(f"{len(data)} examples, {recipe.epochs:g} epochs and {share} processes make no step")
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, slope(steps, recipe.warmup))
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    if teacher is not None:
        teacher = teacher.to(accelerator.device).eval()
    wrapped.train()
    every = max(1, steps // 20)
    bar = tqdm(range(steps), unit="step", leave=False, disable=not progress or not accelerator.is_local_main_process)
    for step in bar:
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
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    model.to(home).eval()
    model.zero_grad(set_to_none=True)


def plan(data: Encoded, recipe: Recipe) -> list[list[int]]:
    """The batches of all epochs, each epoch shuffled anew."""
    whole = math.ceil(recipe.epochs)
    batches = [batch for epoch in range(whole) for batch in order(data, recipe.batch_size, recipe.seed * 1000 + epoch)]
    return batches[: round(recipe.epochs * len(order(data, recipe.batch_size)))]


def slope(steps: int, warmup: float) -> Callable[[int], float]:
    rise = max(1, round(warmup * steps))
    return lambda step: min((step + 1) / rise, (steps - step) / max(1, steps - rise))


def is_main(device: str) -> bool:
    """Whether this process is the only one, or the one of torchrun's that writes."""
    from accelerate import PartialState

    return PartialState(cpu=device == "cpu").is_main_process
