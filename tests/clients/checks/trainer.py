"""transformers.Trainer."""

import itertools
from pathlib import Path
from typing import Any

import torch

from tests.clients.checks.common import (
    CHECKPOINTING,
    ROUNDING32,
    SIZES,
    Observed,
    Side,
    check,
    counted,
    dense_and_pruned,
    differ,
    equal,
    seed,
    state,
    tiny,
    tiny_batch,
)

CLIENT = "Trainer"
DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def rows(cls: str, count: int = 8) -> list[dict[str, Any]]:
    """Return a data set; its rows differ in their numbers of tokens, and of labels where each token may have one."""
    batch = tiny_batch(count)
    ids = batch["input_ids"]
    if cls == "BertForSequenceClassification":
        batch["labels"] = torch.arange(count) % 2
    elif cls == "BertForTokenClassification":
        batch["labels"] = torch.where(batch["attention_mask"] == 1, ids % 2, -100)
    else:
        keep = (torch.arange(ids.shape[1]) + torch.arange(count)[:, None]) % 4 == 0
        keep[0] |= True  # one row has most of the labels, so a mean of means is not the mean
        batch["labels"] = torch.where(keep & (batch["attention_mask"] == 1), ids % SIZES["vocab_size"], -100)
    return [{name: x[i] for name, x in batch.items()} for i in range(count)]


def trainer(model: Any, folder: Path, data: Any, **options: Any) -> Any:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    given = {name: options.pop(name) for name in ("eval_dataset", "compute_metrics") if name in options}
    settings = {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,  # measured, never clipped
    }
    run = Trainer(model, TrainingArguments(**{**settings, **options}), train_dataset=data, **given)
    run.remove_callback(PrinterCallback)
    return run


def logged(run: Any, name: str) -> list[float]:
    return [float(line[name]) for line in run.state.log_history if name in line]


@dense_and_pruned(CLIENT, "trains, saves and loads again", "accelerate")
def trains(side: Side, folder: Path, pruned: bool = False) -> Observed:
    cls = "BertForSequenceClassification"
    model = side.load(cls, tiny(folder, cls, pruned, **DROPOUT))
    before = state(model)
    run = trainer(model, folder, rows(cls), max_steps=6)
    run.train()
    differ(state(model), before, "training")
    run.save_model(str(folder / "trained"))
    again = side.load(cls, folder / "trained")
    side.owns(again)
    equal(state(again), state(model), what="the trained model and its copy on disk")
    return {"loss": logged(run, "loss"), "weights": state(model)}


@check(CLIENT, "a resumed run ends where an unbroken one does, bit for bit", "accelerate")
def resumes(side: Side, folder: Path) -> Observed:
    cls = "BertForMaskedLM"
    checkpoint, data = tiny(folder, cls, **DROPOUT), rows("BertForMaskedLM")

    def run(name: str, **options: Any) -> Any:
        seed()
        return trainer(
            side.load(cls, checkpoint),
            folder / name,
            data,
            max_steps=6,
            optim="adamw_torch",
            learning_rate=0.01,
            **options,
        )

    whole = run("whole", save_strategy="steps", save_steps=3)
    whole.train()
    rest = run("rest")
    rest.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    if rest.state.global_step != 6 or len(logged(rest, "loss")) != 6:
        raise AssertionError(f"resumed to step {rest.state.global_step} with {len(logged(rest, 'loss'))} losses")
    equal(state(rest.model), state(whole.model), what="the resumed and the unbroken run")
    return {"loss": logged(whole, "loss"), "weights": state(whole.model)}


@check(CLIENT, "load_best_model_at_end brings the best weights back", "accelerate")
def best(side: Side, folder: Path) -> Observed:
    cls = "BertForSequenceClassification"
    data, scores = rows(cls), itertools.chain([0.9], itertools.repeat(0.1))
    run = trainer(
        side.load(cls, tiny(folder, cls)),
        folder,
        data,
        max_steps=3,
        eval_dataset=data,
        compute_metrics=lambda _: {"score": next(scores)},
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
    )
    run.train()
    first = side.load(cls, folder / "checkpoint-1")
    equal(state(run.model), state(first), what="the model and its best checkpoint")
    differ(state(first), state(side.load(cls, folder / "checkpoint-3")), "training on")
    return {"eval_loss": logged(run, "eval_loss")}


@dense_and_pruned(CLIENT, "checkpointed layers run twice and give the same weights", "accelerate")
def checkpointing(side: Side, folder: Path, pruned: bool = False) -> Observed:
    cls = "BertForMaskedLM"
    checkpoint, found = tiny(folder, cls, pruned), []
    for times, options in ((1, {}), (2, {CHECKPOINTING: True})):
        model = side.load(cls, checkpoint)
        with counted(model) as ran:
            trainer(model, folder, rows(cls), **options).train()
        if len(ran) != times * SIZES["num_hidden_layers"]:
            raise AssertionError(f"{len(ran)} layers ran with {options or 'no options'}")
        found.append(state(model))
    equal(found[0], found[1], what="checkpointed and plain training")
    return {"weights": found[0]}


@check(CLIENT, "4 accumulated batches of 2 equal one of 8: masked words", "accelerate", cls="BertForMaskedLM")
@check(CLIENT, "4 accumulated batches of 2 equal one of 8: tokens", "accelerate", cls="BertForTokenClassification")
@check(CLIENT, "4 accumulated batches of 2 equal one of 8: texts", "accelerate", cls="BertForSequenceClassification")
def accumulation(side: Side, folder: Path, cls: str) -> Observed:
    checkpoint = tiny(folder, cls)
    found: list[Observed] = []
    for size, steps in ((8, 1), (2, 4)):
        seed()
        model = side.load(cls, checkpoint)
        run = trainer(model, folder, rows(cls), per_device_train_batch_size=size, gradient_accumulation_steps=steps)
        run.train()
        found.append({"loss": logged(run, "loss"), "grad_norm": logged(run, "grad_norm"), "weights": state(model)})
    one, many = found
    for name in ("loss", "grad_norm"):
        (wanted,), (got,) = one[name], many[name]
        if abs(got - wanted) > ROUNDING32 * abs(wanted):
            raise AssertionError(f"{name} is {got:.5g}, and {wanted:.5g} for the same 8 rows in one batch")
    equal(many["weights"], one["weights"], within=ROUNDING32, what="the weights after one step")
    return one


@check(CLIENT, "eval_loss is that of one batch, whatever the batch size", "accelerate")
def evaluates(side: Side, folder: Path) -> Observed:
    cls = "BertForSequenceClassification"
    model, data, found = side.load(cls, tiny(folder, cls)), rows(cls, 6), []
    for size in (6, 4):  # the last batch is smaller
        run = trainer(model, folder, data, eval_dataset=data, per_device_eval_batch_size=size)
        found.append(run.evaluate()["eval_loss"])
    if abs(found[1] - found[0]) > ROUNDING32 * found[0]:
        raise AssertionError(f"eval_loss is {found[1]:.6g} in batches of 4 and {found[0]:.6g} in one of 6")
    return {"eval_loss": found[0]}


@check(CLIENT, "label smoothing and NEFTune noise reach the loss", "accelerate")
def smoothing(side: Side, folder: Path) -> Observed:
    cls, losses = "BertForTokenClassification", {}
    checkpoint = tiny(folder, cls)
    settings = {"plain": {}, "smooth": {"label_smoothing_factor": 0.2}, "noisy": {"neftune_noise_alpha": 5.0}}
    for name, options in settings.items():
        seed()
        run = trainer(side.load(cls, checkpoint), folder, rows(cls), **options)
        run.train()
        losses[name] = logged(run, "loss")
    differ(losses["smooth"], losses["plain"], "label smoothing")
    differ(losses["noisy"], losses["plain"], "NEFTune")
    return losses
