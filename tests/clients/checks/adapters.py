"""PEFT."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.clients.checks import common

CLIENT = "PEFT"
CLS = "BertForSequenceClassification"


def step(model: Any) -> float:
    """Take one step of gradient descent on two rows; return the loss before it."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = model(**common.tiny_batch(), labels=torch.tensor([0, 1])).loss
    loss.backward()
    torch.optim.SGD(trained, lr=0.1).step()
    model.zero_grad()
    return float(loss.detach())


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(**common.tiny_batch()).logits


def adapted(side: common.Side, path: Path, config: Any) -> Any:
    from peft import get_peft_model

    return get_peft_model(side.load(CLS, path), config)


def kept(side: common.Side, path: Path, model: Any, folder: Path) -> torch.Tensor:
    """Save an adapter and load it onto the checkpoint; return the logits, which must be equal."""
    from peft import PeftModel

    wanted = logits(model)
    model.save_pretrained(str(folder))
    again = PeftModel.from_pretrained(side.load(CLS, path), str(folder))
    common.equal(logits(again), wanted, what="the adapted model and its copy from disk")
    return wanted


@common.dense_and_pruned(CLIENT, "LoRA: train, save, load, merge", "peft")
def lora(side: common.Side, folder: Path, pruned: bool = False) -> common.Observed:
    from peft import LoraConfig

    path = common.tiny(folder, CLS, pruned)
    plain = side.load(CLS, path)
    model = adapted(side, path, LoraConfig(task_type="SEQ_CLS", r=3, lora_alpha=8))  # targets by model_type
    factors = [name for name, p in model.named_parameters() if "lora_A" in name and p.requires_grad]
    if len(factors) != 2 * common.SIZES["num_hidden_layers"]:  # query and value
        raise AssertionError(f"{len(factors)} LoRA layers")
    losses = [step(model), step(model), step(model)]
    wanted = kept(side, path, model, folder / "adapter")
    common.differ(wanted, logits(plain), "LoRA")
    merged = model.merge_and_unload()
    side.owns(merged)
    common.equal(logits(merged), wanted, within=common.ROUNDING32, what="merged and adapted")
    merged.save_pretrained(str(folder / "merged"))
    again = side.load(CLS, folder / "merged")
    common.equal(common.state(again), common.state(merged), what="the merged model and its copy from disk")
    return {"losses": losses, "logits": wanted}


@common.check(CLIENT, "LoRA under checkpointed layers: the same gradients", "peft")
def lora_checkpointed(side: common.Side, folder: Path) -> common.Observed:
    from peft import LoraConfig

    path, found = common.tiny(folder, CLS), []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = adapted(side, path, LoraConfig(task_type="SEQ_CLS", r=3))
        if checkpointed:
            getattr(model, f"{common.CHECKPOINTING}_enable")()
        losses = [step(model), step(model)]
        found.append({"losses": losses, "weights": {k: v for k, v in common.state(model).items() if "lora" in k}})
    common.equal(found[0], found[1], what="checkpointed and plain training")
    return found[0]


@common.dense_and_pruned(CLIENT, "IA3 and prompt tuning: train, save, load", "peft")
def tunings(side: common.Side, folder: Path, pruned: bool = False) -> common.Observed:
    from peft import IA3Config, PromptTuningConfig

    prompt = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=5)
    return tuned(side, common.tiny(folder, CLS, pruned), {"ia3": IA3Config(task_type="SEQ_CLS"), "prompt": prompt})


@common.dense_and_pruned(CLIENT, "prefix tuning: train, save, load", "peft")
def prefixes(side: common.Side, folder: Path, pruned: bool = False) -> common.Observed:
    from peft import PrefixTuningConfig

    prefix = PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=5)
    return tuned(side, common.tiny(folder, CLS, pruned), {"prefix": prefix})


def tuned(side: common.Side, path: Path, configs: Mapping[str, Any]) -> common.Observed:
    """Train an adapter of each config for a step, save and load it; return what each gave."""
    seen = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        model = adapted(side, path, config)
        before = logits(model)
        loss = step(model)
        after = kept(side, path, model, path.parent / name)
        common.differ(after, before, name)
        seen[name] = {"loss": loss, "logits": after}
    return seen
