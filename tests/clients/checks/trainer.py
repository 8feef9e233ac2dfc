"""transformers.Trainer, and accelerate, on which it stands."""

import itertools
from pathlib import Path
from typing import Any

import torch

from tests.clients.checks import common

CLIENT, ACCELERATE = "Trainer", "accelerate"
TEXTS, TOKENS, WORDS = "BertForSequenceClassification", "BertForTokenClassification", "BertForMaskedLM"
DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
SETTINGS: dict[str, Any] = {
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


def rows(cls: str, count: int = 8) -> list[dict[str, Any]]:
    """Return a data set; its rows differ in their numbers of tokens, and of labels where each token may have one."""
    batch = common.tiny_batch(count)
    ids = batch["input_ids"]
    if cls == TEXTS:
        batch["labels"] = torch.arange(count) % 2
    elif cls == TOKENS:
        batch["labels"] = torch.where(batch["attention_mask"] == 1, ids % 2, -100)
    else:
        keep = (torch.arange(ids.shape[1]) + torch.arange(count)[:, None]) % 4 == 0
        keep[0] |= True  # one row has most of the labels, so a mean of means is not the mean
        batch["labels"] = torch.where(keep & (batch["attention_mask"] == 1), ids % common.SIZES["vocab_size"], -100)
    return [{name: x[i] for name, x in batch.items()} for i in range(count)]


def trainer(model: Any, folder: Path, data: Any, **options: Any) -> Any:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    given = {name: options.pop(name) for name in ("eval_dataset", "compute_metrics") if name in options}
    arguments = TrainingArguments(str(folder), **{**SETTINGS, **options})
    run = Trainer(model, arguments, train_dataset=data, **given)
    run.remove_callback(PrinterCallback)
    return run


def logged(run: Any, name: str) -> list[float]:
    return [float(line[name]) for line in run.state.log_history if name in line]


@common.dense_and_pruned(CLIENT, "trains, saves and loads again", "accelerate")
def trains(side: common.Side, folder: Path, pruned: bool = False) -> common.Observed:
    model = side.load(TEXTS, common.tiny(folder, TEXTS, pruned, **DROPOUT))
    before = common.state(model)
    run = trainer(model, folder, rows(TEXTS), max_steps=6)
    run.train()
    common.differ(common.state(model), before, "training")
    run.save_model(str(folder / "trained"))
    again = side.load(TEXTS, folder / "trained")
    side.owns(again)
    common.equal(common.state(again), common.state(model), what="the trained model and its copy on disk")
    return {"loss": logged(run, "loss"), "weights": common.state(model)}


@common.check(CLIENT, "a resumed run ends where an unbroken one does, bit for bit", "accelerate")
def resumes(side: common.Side, folder: Path) -> common.Observed:
    checkpoint, data = common.tiny(folder, WORDS, **DROPOUT), rows(WORDS)

    def run(name: str, **options: Any) -> Any:
        common.seed()
        adam = {"max_steps": 6, "optim": "adamw_torch", "learning_rate": 0.01}
        return trainer(side.load(WORDS, checkpoint), folder / name, data, **adam, **options)

    whole = run("whole", save_strategy="steps", save_steps=3)
    whole.train()
    rest = run("rest")
    rest.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    if rest.state.global_step != 6 or len(logged(rest, "loss")) != 6:
        raise AssertionError(f"resumed to step {rest.state.global_step} with {len(logged(rest, 'loss'))} losses")
    common.equal(common.state(rest.model), common.state(whole.model), what="the resumed and the unbroken run")
    return {"loss": logged(whole, "loss"), "weights": common.state(whole.model)}


@common.check(CLIENT, "load_best_model_at_end brings the best weights back", "accelerate")
def best(side: common.Side, folder: Path) -> common.Observed:
    data, scores = rows(TEXTS), itertools.chain([0.9], itertools.repeat(0.1))
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    judged = {"eval_dataset": data, "compute_metrics": lambda _: {"score": next(scores)}}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    run = trainer(side.load(TEXTS, common.tiny(folder, TEXTS)), folder, data, **steps, **judged, **best)
    run.train()
    first = side.load(TEXTS, folder / "checkpoint-1")
    common.equal(common.state(run.model), common.state(first), what="the model and its best checkpoint")
    common.differ(common.state(first), common.state(side.load(TEXTS, folder / "checkpoint-3")), "training on")
    return {"eval_loss": logged(run, "eval_loss")}


@common.dense_and_pruned(CLIENT, "checkpointed layers run twice and give the same weights", "accelerate")
def checkpointing(side: common.Side, folder: Path, pruned: bool = False) -> common.Observed:
    checkpoint, found = common.tiny(folder, WORDS, pruned), []
    for times, options in ((1, {}), (2, {common.CHECKPOINTING: True})):
        model = side.load(WORDS, checkpoint)
        with common.counted(model) as ran:
            trainer(model, folder, rows(WORDS), **options).train()
        if len(ran) != times * common.SIZES["num_hidden_layers"]:
            raise AssertionError(f"{len(ran)} layers ran with {options or 'no options'}")
        found.append(common.state(model))
    common.equal(found[0], found[1], what="checkpointed and plain training")
    return {"weights": found[0]}


@common.check(CLIENT, "4 accumulated batches of 2 equal one of 8: masked words", "accelerate", cls=WORDS)
@common.check(CLIENT, "4 accumulated batches of 2 equal one of 8: tokens", "accelerate", cls=TOKENS)
@common.check(CLIENT, "4 accumulated batches of 2 equal one of 8: texts", "accelerate", cls=TEXTS)
def accumulation(side: common.Side, folder: Path, cls: str) -> common.Observed:
    checkpoint = common.tiny(folder, cls)
    found: list[common.Observed] = []
    for size, steps in ((8, 1), (2, 4)):
        common.seed()
        model = side.load(cls, checkpoint)
        run = trainer(model, folder, rows(cls), per_device_train_batch_size=size, gradient_accumulation_steps=steps)
        run.train()
        found.append(
            {"loss": logged(run, "loss"), "grad_norm": logged(run, "grad_norm"), "weights": common.state(model)}
        )
    one, many = found
    for name in ("loss", "grad_norm"):
        (wanted,), (got,) = one[name], many[name]
        if abs(got - wanted) > common.ROUNDING32 * abs(wanted):
            raise AssertionError(f"{name} is {got:.5g}, and {wanted:.5g} for the same 8 rows in one batch")
    common.equal(many["weights"], one["weights"], within=common.ROUNDING32, what="the weights after one step")
    return one


@common.check(CLIENT, "eval_loss is that of one batch, whatever the batch size", "accelerate")
def evaluates(side: common.Side, folder: Path) -> common.Observed:
    model, data, found = side.load(TEXTS, common.tiny(folder, TEXTS)), rows(TEXTS, 6), []
    for size in (6, 4):  # the last batch is smaller
        run = trainer(model, folder, data, eval_dataset=data, per_device_eval_batch_size=size)
        found.append(run.evaluate()["eval_loss"])
    if abs(found[1] - found[0]) > common.ROUNDING32 * found[0]:
        raise AssertionError(f"eval_loss is {found[1]:.6g} in batches of 4 and {found[0]:.6g} in one of 6")
    return {"eval_loss": found[0]}


@common.check(CLIENT, "label smoothing and NEFTune noise reach the loss", "accelerate")
def smoothing(side: common.Side, folder: Path) -> common.Observed:
    checkpoint, losses = common.tiny(folder, TOKENS), {}
    settings = {"plain": {}, "smooth": {"label_smoothing_factor": 0.2}, "noisy": {"neftune_noise_alpha": 5.0}}
    for name, options in settings.items():
        common.seed()
        run = trainer(side.load(TOKENS, checkpoint), folder, rows(TOKENS), **options)
        run.train()
        losses[name] = logged(run, "loss")
    common.differ(losses["smooth"], losses["plain"], "label smoothing")
    common.differ(losses["noisy"], losses["plain"], "NEFTune")
    return losses


# accelerate ----------------------------------------------------------------------------------------------------------


@common.dense_and_pruned(ACCELERATE, "prepare, train, save_state, load_state", ACCELERATE)
@common.check(ACCELERATE, "prepare, train, save_state, load_state in bfloat16", ACCELERATE, precision="bf16")
def states(side: common.Side, folder: Path, pruned: bool = False, precision: str = "no") -> common.Observed:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = side.load(TEXTS, common.tiny(folder, TEXTS, pruned)).train()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, adam = accelerator.prepare(model, adam)
    losses = []

    def step() -> None:
        out = model(**common.tiny_batch(), labels=torch.tensor([0, 1]))
        if not isinstance(out.logits, torch.Tensor) or out.logits.dtype != torch.float32:
            raise AssertionError(f"logits came back as {out.logits!r:.80}")  # accelerate rebuilds the output
        accelerator.backward(out.loss)
        adam.step()
        adam.zero_grad()
        losses.append(float(out.loss.detach()))

    step()
    accelerator.save_state(str(folder / "state"))
    saved = common.state(model)
    step()
    after = common.state(model)
    common.differ(after, saved, "a step")
    accelerator.load_state(str(folder / "state"))
    common.equal(common.state(model), saved, what="the state loaded and the state saved")
    step()
    common.equal(common.state(model), after, what="a step, and the step again")
    accelerator.unwrap_model(model).save_pretrained(str(folder / "model"))
    common.equal(common.state(side.load(TEXTS, folder / "model")), after, what="the model and its copy from disk")
    return {"losses": losses, "weights": after}


@common.check(ACCELERATE, "empty weights, then dispatched from disk; and offloaded to the CPU", ACCELERATE)
@torch.no_grad()
def dispatched(side: common.Side, folder: Path) -> common.Observed:
    from accelerate import cpu_offload, init_empty_weights, load_checkpoint_and_dispatch

    path = common.tiny(folder, TEXTS)
    plain = side.load(TEXTS, path)
    with init_empty_weights():
        empty = getattr(side.models, TEXTS)(plain.config)
    if {p.device.type for p in empty.parameters()} != {"meta"}:
        raise AssertionError("the empty model has weights")
    model = load_checkpoint_and_dispatch(empty, str(path), device_map={"": "cpu"}).eval()
    wanted = plain(**common.tiny_batch()).logits
    common.equal(model(**common.tiny_batch()).logits, wanted, what="dispatched and plain")
    offloaded = cpu_offload(side.load(TEXTS, path), execution_device=torch.device("cpu"))
    common.equal(offloaded(**common.tiny_batch()).logits, wanted, what="offloaded and plain")
    return {"logits": wanted}
