"""Write tests/golden: what transformers 4.57.6 computes and transformers 5 no longer can.

    .venv-4.57.6/bin/python -m scripts.make.golden [FOLDER]    # seconds; FOLDER is tests/golden unless given

Head masks, pruning, 3-D masks and relative positions, from one random model in float64 with eager attention:

    weights.safetensors   the model, float32 so that it stays small; distance tables included
    cases.json            the config of each case, and the heads pruned, call by call
    CASE.safetensors      inputs.… and outputs.… of that case
    pruned/               the model of the case "pruned-twice", as save_pretrained writes it
    versions.json         what computed all this

Without FOLDER also tests/clients/apart-4.57.6.safetensors: what the checks of tests/clients/checks/apart.py, which
take BERT apart, give with transformers' own classes.  Exits 1 under any other version of transformers.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VERSION = "4.57.6"
TESTS = Path(__file__).resolve().parents[2] / "tests"
FOLDER, APART = TESTS / "golden", TESTS / "clients" / f"apart-{VERSION}.safetensors"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 40,
    "type_vocab_size": 5,
}
B, S, N, L = 2, 11, 4, 3
PADDING = (torch.arange(S) < torch.tensor([[S], [7]])).long()


@dataclass(frozen=True)
class Golden:
    """One case.  Every query has something to attend to: transformers has no single rule for one that has nothing."""

    positions: str = "absolute"
    pruned: tuple[dict[int, list[int]], ...] = ()  # one call of prune_heads each
    mask: Tensor | None = None
    gate: Callable[[torch.Generator], Tensor] | None = None


def binary(generator: torch.Generator) -> Tensor:
    return (torch.rand(L, N, generator=generator) > 0.4).double()


def fractional(generator: torch.Generator) -> Tensor:
    return torch.rand(L, N, generator=generator).double() * 2 - 0.5  # some above 1, some below 0


def causal() -> Tensor:
    return torch.ones(S, S).tril().long().expand(B, S, S) * PADDING[:, None, :]


def blocks() -> Tensor:
    """Return a mask of two blocks: the first 4 positions attend to each other, and so do the later ones."""
    part = torch.arange(S) < 4
    return (part[:, None] == part).long().expand(B, S, S)


CASES = {
    "gate-heads": Golden(gate=lambda g: torch.tensor([1.0, 0.0, 1.0, 0.0]).double()),
    "gate-layers-binary": Golden(gate=binary),
    "gate-layers-fractional": Golden(gate=fractional, mask=PADDING),
    "gate-sequences": Golden(gate=lambda g: torch.rand(L, B, N, 1, 1, generator=g).double(), mask=PADDING),
    "gate-queries": Golden(gate=lambda g: torch.rand(L, B, N, S, 1, generator=g).double(), mask=PADDING),
    "pruned-once": Golden(pruned=({0: [1, 3], 2: [0]},)),
    "pruned-twice": Golden(pruned=({0: [1], 1: [0, 1, 2]}, {0: [3, 1], 2: [2]}), mask=PADDING),
    "mask-causal": Golden(mask=causal()),
    "mask-blocks": Golden(mask=blocks()),
    "relative_key": Golden("relative_key", mask=PADDING),
    "relative_key-gated": Golden("relative_key", mask=PADDING, gate=fractional),
    "relative_key-pruned": Golden("relative_key", pruned=({1: [2]},), mask=PADDING),
    "relative_key_query": Golden("relative_key_query", mask=PADDING),
    "relative_key_query-gated": Golden("relative_key_query", mask=PADDING, gate=fractional),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder: Path = parser.parse_args(argv).folder
    import transformers

    if transformers.__version__ != VERSION:
        sys.exit(f"this is transformers {transformers.__version__}; golden files come from {VERSION}")
    folder.mkdir(parents=True, exist_ok=True)
    weights = make_weights()
    save_file(weights, folder / "weights.safetensors")
    for case, (name, golden) in enumerate(CASES.items()):
        model = build(golden, weights)
        if name == "pruned-twice":
            model.save_pretrained(folder / "pruned")
        inputs, outputs = run(model.double(), golden, torch.Generator().manual_seed(case))
        tensors = {**{f"inputs.{k}": x for k, x in inputs.items()}, **{f"outputs.{k}": x for k, x in outputs.items()}}
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / f"{name}.safetensors")
    write(folder / "cases.json", {name: of(golden) for name, golden in CASES.items()})
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": VERSION}
    write(folder / "versions.json", versions)
    if folder == FOLDER:
        save_file(taken_apart(), APART)
    print(f"{len(CASES)} cases in {folder}")
    return 0


def of(golden: Golden) -> dict[str, Any]:
    """Return what a reader needs besides the tensors."""
    return {"config": {**SIZES, "position_embedding_type": golden.positions}, "prune_heads": golden.pruned}


def write(path: Path, values: dict[str, Any]) -> None:
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def make_weights() -> dict[str, Tensor]:
    """Weights that make every part matter: as made, biases are zero and LayerNorm does nothing."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: x.shape for name, x in empty("relative_key").state_dict().items()}
    noise = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in sorted(shapes.items())}
    return {name: x + 1 if name.endswith("LayerNorm.weight") else x for name, x in noise.items()}


def empty(positions: str) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SIZES, position_embedding_type=positions, attn_implementation="eager"))


def build(golden: Golden, weights: dict[str, Tensor]) -> Any:
    """Return the model of a case in float32: transformers 4 prunes no other dtype."""
    model = empty(golden.positions).eval()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    for heads in golden.pruned:
        model.prune_heads(heads)
    return model


@torch.no_grad()
def run(model: Any, golden: Golden, generator: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    inputs = {
        "input_ids": torch.randint(1, SIZES["vocab_size"], (B, S), generator=generator),
        "token_type_ids": torch.randint(0, SIZES["type_vocab_size"], (B, S), generator=generator),
    }
    if golden.mask is not None:
        inputs["attention_mask"] = golden.mask
    if golden.gate is not None:
        inputs["head_mask"] = golden.gate(generator)
    out = model(**inputs, output_attentions=True)
    attentions = {f"attentions.{layer}": x for layer, x in enumerate(out.attentions)}
    return inputs, {"last_hidden_state": out.last_hidden_state, "pooler_output": out.pooler_output, **attentions}


def taken_apart() -> dict[str, Tensor]:
    from tests.clients.checks import apart
    from tests.clients.checks.common import CHECKS, STOCK

    found: dict[str, Tensor] = {}
    for check in CHECKS.values():
        if check.function.func.__module__ == apart.__name__:  # type: ignore[attr-defined]  # a partial
            with tempfile.TemporaryDirectory() as folder:
                observed = check.run(STOCK, Path(folder) / "run")
            found |= {f"{check.name}.{key}": x.contiguous() for key, x in observed.items()}
    return found


if __name__ == "__main__":
    raise SystemExit(main())
