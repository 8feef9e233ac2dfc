"""Count the time of each phase of the native kernels, by thread, in a build that counts it.

    python -m scripts.measure.phases --hidden-size 384 --heads 12 --batch 8 128 --dtype int8 --threads 2

Prints each thread's share of its forward's time, phase by phase, and the processor's clock cycles (nanoseconds, but on
x86) of a token in a layer.  "up / finish" is what follows a tile of the up-projection's matmul: activation and store.
"""

import argparse
import ctypes
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from bertlite import BertConfig, BertModel
from bertlite.inference import InferenceModel
from bertlite.inference.native.calls import Kernels
from bertlite.inference.native.conversion import native_copy
from bertlite.inference.native.library import compile_kernels, usable_sets

MOST_PHASES, MOST_THREADS = 64, 64  # of kernels/profile.h


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=768, help="(default: bert-base's, %(default)s)")
    parser.add_argument("--heads", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs=2, default=(8, 128), help="sequences and tokens (default: 8 128)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), default="int8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    config = BertConfig(
        hidden_size=args.hidden_size,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        vocab_size=1000,
    )
    dtype = getattr(torch, args.dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profiled.so"
        best = usable_sets()[0]
        compile_kernels(replace(best, flags=(*best.flags, "-DBERTLITE_PROFILE")), path)
        model = BertModel(config, add_pooling_layer=False).eval().requires_grad_(False)
        quick = InferenceModel(native_copy(model, dtype, Kernels(str(path))), "native", dtype)
        ids = torch.randint(1, config.vocab_size, tuple(args.batch))
        quick(ids)
        library = ctypes.CDLL(str(path))
        read(library)
        rounds = []
        for _ in range(args.rounds):
            quick(ids)
            rounds.append(read(library))
    for thread in sorted({thread for each in rounds for thread in each}):
        phases = {phase for each in rounds for phase in each.get(thread, ())}
        medians = {phase: median(each.get(thread, Counter())[phase] for each in rounds) for phase in phases}
        total, scale = sum(medians.values()), args.layers * ids.numel()
        print(f"thread {thread}: {total / scale:.0f} for each token and layer")
        for phase, spent in sorted(medians.items(), key=lambda each: -each[1]):
            print(f"  {phase:45} {spent / total:6.1%} {spent / scale:9.1f}")
    return 0


def read(library: ctypes.CDLL) -> dict[int, Counter[str]]:
    """Return the times of the threads that ran, by phase, and forget them."""
    library.bertlite_phase.restype, library.bertlite_time.restype = ctypes.c_char_p, ctypes.c_uint64
    names = [(library.bertlite_phase(number) or b"").decode() for number in range(MOST_PHASES)]
    found: dict[int, Counter[str]] = {}
    for thread in range(MOST_THREADS):
        times: Counter[str] = Counter()
        for outer, outer_name in enumerate(names):
            for phase, name in enumerate(names):
                spent = library.bertlite_time(thread, outer, phase)
                if name != names[0]:
                    times[name if outer_name in (names[0], "layers") else f"{outer_name} / {name}"] += spent
        if +times:
            found[thread] = +times
    return found


if __name__ == "__main__":
    sys.exit(main())
