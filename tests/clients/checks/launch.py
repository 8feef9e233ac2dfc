"""accelerate."""

from pathlib import Path

import torch

from tests.clients.checks.common import (
    Observed,
    Side,
    check,
    dense_and_pruned,
    differ,
    equal,
    state,
    tiny,
    tiny_batch,
)

CLIENT = "accelerate"
CLS = "BertForSequenceClassification"


@dense_and_pruned(CLIENT, "prepare, train, save_state, load_state", CLIENT)
@check(CLIENT, "prepare, train, save_state, load_state in bfloat16", CLIENT, precision="bf16")
def states(side: Side, folder: Path, pruned: bool = False, precision: str = "no") -> Observed:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = side.load(CLS, tiny(folder, CLS, pruned)).train()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, adam = accelerator.prepare(model, adam)
    losses = []

    def step() -> None:
        out = model(**tiny_batch(), labels=torch.tensor([0, 1]))
        if not isinstance(out.logits, torch.Tensor) or out.logits.dtype != torch.float32:
            raise AssertionError(f"logits came back as {out.logits!r:.80}")  # accelerate rebuilds the output
        accelerator.backward(out.loss)
        adam.step()
        adam.zero_grad()
        losses.append(float(out.loss.detach()))

    step()
    accelerator.save_state(str(folder / "state"))
    saved = state(model)
    step()
    after = state(model)
    differ(after, saved, "a step")
    accelerator.load_state(str(folder / "state"))
    equal(state(model), saved, what="the state loaded and the state saved")
    step()
    equal(state(model), after, what="a step, and the step again")
    accelerator.unwrap_model(model).save_pretrained(str(folder / "model"))
    equal(state(side.load(CLS, folder / "model")), after, what="the model and its copy from disk")
    return {"losses": losses, "weights": after}


@check(CLIENT, "empty weights, then dispatched from disk; and offloaded to the CPU", CLIENT)
@torch.no_grad()
def dispatched(side: Side, folder: Path) -> Observed:
    from accelerate import cpu_offload, init_empty_weights, load_checkpoint_and_dispatch

    path = tiny(folder, CLS)
    plain = side.load(CLS, path)
    with init_empty_weights():
        empty = getattr(side.models, CLS)(plain.config)
    if {p.device.type for p in empty.parameters()} != {"meta"}:
        raise AssertionError("the empty model has weights")
    model = load_checkpoint_and_dispatch(empty, str(path), device_map={"": "cpu"}).eval()
    wanted = plain(**tiny_batch()).logits
    equal(model(**tiny_batch()).logits, wanted, what="dispatched and plain")
    offloaded = cpu_offload(side.load(CLS, path), execution_device=torch.device("cpu"))
    equal(offloaded(**tiny_batch()).logits, wanted, what="offloaded and plain")
    return {"logits": wanted}
