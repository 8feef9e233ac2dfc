"""Random models and batches on a GPU, one after the other in one process: outputs and gradients are float64's.

A kernel that keeps something of the batches before, as cuDNN's attention did, is found by their random order.
"""

import copy
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bertlite import BertConfig, BertModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CASES = 300  # about 30 s on an H200
ALLOWED = {"float32": 2e-3, "bfloat16": 0.08, "float16": 0.03, "autocast": 0.08}  # relative; 2e-3 is TF32's
VOCABULARY = 500
CHOICES: dict[str, Sequence[Any]] = {  # what is drawn: what is printed of a case that fails runs it again
    "head": [(64, 2), (64, 12), (32, 4), (32, 12), (16, 4), (24, 3), (128, 2)],  # size and number
    "seed": range(2**30),
    "layers": [1, 2, 3],
    "length": [1, 2, 7, 16, 33, 63, 64, 65, 100, 128, 192, 200, 320, 448],
    "rows": [1, 2, 3, 5, 8],
    "mask": ["none", "ones", "right", "left", "holes", "empty row", "one row"],
    "backend": ["sdpa", "packed", "eager", "auto"],
    "dtype": [*ALLOWED],
}
SHARES = {"gated": 0.25, "pruned": 0.25, "steep": 0.2, "checkpointed": 0.2}  # steep: low scores


def draw(rng: random.Random) -> Any:
    """Draw a case."""
    chosen = {name: rng.choice(values) for name, values in CHOICES.items()}
    head_size, heads = chosen["head"]
    flags = {name: rng.random() < share for name, share in SHARES.items()}
    return SimpleNamespace(**chosen, **flags, head_size=head_size, heads=heads)


def models(case: Any, rng: random.Random) -> tuple[BertModel, BertModel]:
    """Return the model of a case and, with its weights, the one in float64."""
    width = case.head_size * case.heads
    config = BertConfig(
        hidden_size=width, num_attention_heads=case.heads, num_hidden_layers=case.layers, vocab_size=VOCABULARY,
        intermediate_size=2 * width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05) if parameter.dim() == 2 else parameter.add_(0.02 * torch.randn_like(parameter))
        for layer in model.encoder.layer if case.steep else ():
            layer.attention.self.query.bias.add_(4.0)
            layer.attention.self.key.bias.sub_(4.0)
    if case.pruned:
        gone = rng.sample(range(case.heads), rng.randrange(1, case.heads + 1))  # or all of a layer's
        model.prune_heads({rng.randrange(case.layers): gone})
    model = model.cuda().train()
    if case.dtype in ("bfloat16", "float16"):
        model = model.to(getattr(torch, case.dtype))
    true = copy.deepcopy(model).double()
    true.set_attn_implementation("eager")
    model.set_attn_implementation(case.backend)
    if case.checkpointed:
        model.gradient_checkpointing_enable()
    return model, true


def mask_of(case: Any, rng: random.Random) -> Tensor:
    mask = torch.ones(case.rows, case.length, dtype=torch.long)
    for row in mask:
        count = rng.randrange(1, case.length + 1)
        if case.mask in ("right", "empty row"):
            row[count:] = 0
        elif case.mask == "left":
            row[: case.length - count] = 0
        elif case.mask == "holes":
            row[torch.rand(case.length) < 0.3] = 0
            row[rng.randrange(case.length)] = 1
    if case.mask == "empty row":
        mask[rng.randrange(case.rows)] = 0
    if case.mask == "one row":
        mask[:-1] = 0
    return mask


def errors(case: Any) -> tuple[float, float]:
    """Return the relative errors of a case's outputs and gradients, at real tokens."""
    rng = random.Random(case.seed)
    torch.manual_seed(case.seed)
    model, true = models(case, rng)
    mask = mask_of(case, rng).cuda()
    inputs: dict[str, Any] = {"input_ids": torch.randint(VOCABULARY, mask.shape, device="cuda")}
    if case.mask != "none":
        inputs["attention_mask"] = mask
    gate = torch.rand(case.layers, case.heads, device="cuda") if case.gated else None
    wanted = torch.randn(*mask.shape, case.head_size * case.heads, device="cuda") * mask[..., None]
    found = []
    for each in (model, true):
        with torch.autocast("cuda", torch.bfloat16, enabled=case.dtype == "autocast" and each is model):
            gated = {} if gate is None else {"head_mask": gate.to(each.dtype)}
            states = each(**inputs, **gated).last_hidden_state
        states = torch.where(mask[..., None].bool(), states, 0)
        states.backward(wanted.to(states.dtype))
        zeros = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in each.named_parameters()}
        found.append((states.detach(), torch.cat([x.flatten() for x in zeros.values()])))
    ours, theirs = found
    return tuple(relative(x, y) for x, y in zip(ours, theirs, strict=True))


def relative(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y).norm() / y.norm().clamp(min=1e-12))


@pytest.mark.parametrize("seed", [0, 1])
def test_random_cases_one_after_the_other_are_right(seed: int) -> None:
    rng = random.Random(seed)
    wrong = []
    for _ in range(CASES // 2):
        case = draw(rng)
        allowed = ALLOWED[case.dtype] * (4 if case.steep else 1)
        output, gradient = errors(case)
        if not (output < allowed and gradient < allowed):
            wrong.append(f"output {output:.1e}, gradient {gradient:.1e} of {allowed:.1e}: {case}")
    assert not wrong, "\n".join(wrong)
