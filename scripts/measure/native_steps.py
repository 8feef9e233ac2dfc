"""Measure the gain of each step of the native kernels: the kernels without it, and the kernels as they are.

    python -m scripts.measure.native_steps --out scripts/results/native_steps.json    # ten minutes on two cores
    python -m scripts.measure.native_steps --set avx2 --out scripts/results/native_steps-avx2.json

Times are of layers of bert-base's shape, in every dtype.  A ratio above 1 says how much slower it is without the step.
"""

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertlite import BertConfig, BertModel, optimize_for_inference
from bertlite.checkpoint.saving import dtype_name
from bertlite.inference import InferenceModel
from bertlite.inference.native.conversion import native_copy
from bertlite.runtime.library import AVX2, SOURCES, InstructionSet, compile_kernels, usable_sets
from bertlite.runtime.structs import Kernels
from bertlite.support.environment import environment
from bertlite.support.files import write_json
from bertlite.support.timing import alternate, check_rounds, with_spread
from scripts.measure.speed.rounds import summary

AS_IT_IS = "as it is"
STEPS = {  # {title: another value of a constant of the kernels, or a flag of the compiler}
    "weights are not fetched ahead": "TILES_AHEAD = 0",
    "what a product goes to is not fetched ahead": "FETCHES_TARGETS = 0",
    "outputs are never shared out": "FEW_TOKENS = 0",
    "outputs are shared out up to 256 tokens for each thread": "FEW_TOKENS = 256",
    "32 tokens at a time": "TOKENS = 32",
    "64 tokens at a time": "TOKENS = 64",
    "256 tokens at a time": "TOKENS = 256",
    "threads never take whole sequences": "WHOLE_SEQUENCES = 0",
    "threads take whole sequences where they can": "WHOLE_SEQUENCES = 1",
}
AVX2_STEPS = {  # where a block of a weight stays in the first cache
    "long weights are not multiplied in parts": "WORDS_AT_ONCE = 1000000",
    "weights are fetched ahead by one row of tiles": "TILES_AHEAD = 1",
    "loops are aligned by chance": "-fno-align-loops",
}
AMX_STEPS = {  # where bfloat16 takes some neurons at a time
    "768 neurons at a time": "NEURONS = BFLOAT16_ON_TILES<Kind> ? 768 : ALL",
    "all neurons at a time": "NEURONS = ALL",
}
WORKS = {"1 x 16": (1, 16), "1 x 128": (1, 128), "8 x 128": (8, 128)}
DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the record (default: none)")
    sets = {each.name: each for each in usable_sets()}
    parser.add_argument("--set", choices=sets, default=next(iter(sets)), help="instructions (default: %(default)s)")
    args = parser.parse_args(argv)
    check_rounds(args.rounds)
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=args.layers, vocab_size=1000)
    model = BertModel(config, add_pooling_layer=False).eval().requires_grad_(False)
    with variants(sets[args.set]) as kernels:
        sections = {
            f"{dtype_name(dtype)} {work}": measure(model, dtype, shape, kernels, args.rounds)
            for dtype in DTYPES
            for work, shape in WORKS.items()
        }
    for title, section in sections.items():
        print(title)
        for pair, ratio in section["ratios"].items():
            print(f"  {pair.partition(' / ')[0]:60} {with_spread(ratio)}")
    if args.out is not None:
        record = {"environment": environment(), "layers": args.layers, "set": args.set}
        write_json(args.out, {**record, "sections": sections})
    return 0


@contextmanager
def variants(chosen: InstructionSet) -> Iterator[Mapping[str, Kernels]]:
    """Compile the kernels of a set of instructions as they are and without each step."""
    steps = STEPS | (AVX2_STEPS if {*AVX2} <= {*chosen.flags} else {}) | (AMX_STEPS if chosen.name == "amx" else {})
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for i, (name, change) in enumerate({AS_IT_IS: "", **steps}.items()):
            sources, path = Path(folder) / f"{i}", Path(folder) / f"{i}.so"
            shutil.copytree(SOURCES, sources)
            if change.startswith("-"):
                compile_kernels(replace(chosen, flags=(*chosen.flags, change)), path, sources)
            else:
                change_constant(sources, change)
                compile_kernels(chosen, path, sources)
            found[name] = Kernels(str(path))
        yield found


def change_constant(sources: Path, change: str) -> None:
    """Give a constant of the kernels another value, such as "TOKENS = 32"; "" changes nothing."""
    pattern, changed = rf"\b{change.partition(' = ')[0]} = [^,;]+", 0
    for path in sources.iterdir() if change else ():
        text, count = re.subn(pattern, change, path.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")
        changed += count
    if change and changed != 1:
        raise ValueError(f"{change}: the kernels define it {changed} times, not once")


def measure(
    model: BertModel, dtype: torch.dtype, shape: tuple[int, int], kernels: Mapping[str, Kernels], rounds: int
) -> dict[str, Any]:
    """Time one batch in one dtype with every variant, in turn."""
    ids = torch.randint(1, model.config.vocab_size, shape)
    candidates: dict[str, Callable[[], Any]] = {
        name: partial(InferenceModel(native_copy(model, dtype, each), "native", dtype), ids)
        for name, each in kernels.items()
    }
    if dtype.is_floating_point:
        candidates["the plain model"] = partial(optimize_for_inference(model, dtype=dtype, backend="plain"), ids)
    times = alternate(candidates, rounds, burst=0.05)
    return summary(f"{shape}, {dtype}", times, [(name, AS_IT_IS) for name in candidates if name != AS_IT_IS])


if __name__ == "__main__":
    sys.exit(main())
