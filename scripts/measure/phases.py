"""Count the time of each phase of the native kernels, by thread, in a build that counts it.

    python -m scripts.measure.phases --hidden-size 384 --dtypes int8 --threads 2
    python -m scripts.measure.phases --texts SST-2 --batch 32 128 --threads 2 --out scripts/results/phases-768.json
    python -m scripts.measure.phases --batch 8 512 --out scripts/results/attention-768.json

Prints each thread's share of its forward's time, phase by phase, and the processor's clock cycles (nanoseconds, but on
x86) of a token in a layer.  "up / finish" is what follows a tile of the up-projection's matmul: activation and store.
Then, for each dtype, the rate of attention compared with the matmuls: operations in their time, softmax and all.
"""

import argparse
import ctypes
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from bertlite import BertConfig, BertModel
from bertlite.cli.parts import names_of
from bertlite.experiments.budget.work import Work, full
from bertlite.inference import InferenceModel
from bertlite.inference.native.conversion import native_copy
from bertlite.runtime.library import compile_kernels, usable_sets
from bertlite.runtime.structs import Kernels
from bertlite.support.environment import environment
from bertlite.support.files import write_json
from scripts.measure.speed.batches import filled, ragged, works
from scripts.measure.speed.roof import operations, weights

DTYPES = ("float32", "bfloat16", "int8")
MATMULS = ("queries, keys and values", "output", "up", "down")
HEADER = Path(__file__).with_suffix(".h")
MOST_PHASES, MOST_THREADS = 64, 64  # of that file


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=768, help="(default: bert-base's, %(default)s)")
    parser.add_argument("--heads", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs=2, default=(8, 128), help="sequences and tokens (default: 8 128)")
    text = "with the lengths of SST-2 or WikiText-2, cut to the tokens of --batch (default: all have so many)"
    parser.add_argument(
        "--texts", choices=sorted({work.name.split()[-1] for work in works() if filled(work) < 1}), help=text
    )
    parser.add_argument("--dtypes", type=names_of("dtype", DTYPES), default=DTYPES, help="(default: all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="the record (default: none)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    config = BertConfig(
        hidden_size=args.hidden_size,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        vocab_size=1000,
    )
    work = ragged(args.texts, *args.batch) if args.texts else full(*args.batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profiled.so"
        best = usable_sets()[0]
        compile_kernels(replace(best, flags=(*best.flags, "-include", str(HEADER))), path)
        found = {dtype: measure(config, work, dtype, path, args.rounds) for dtype in args.dtypes}
    for dtype, threads in found.items():
        for thread, phases in threads.items():
            total, scale = sum(phases.values()), args.layers * sum(work.lengths)
            print(f"{dtype}, thread {thread}: {total / scale:.0f} for each token and layer")
            for phase, spent in phases.items():
                print(f"  {phase:45} {spent / total:6.1%} {spent / scale:9.1f}")
    rates = {dtype: attention_rate(threads.values(), config, work) for dtype, threads in found.items()}
    for dtype, rate in rates.items():
        print(f"{dtype}: attention runs at {rate:.2f} of the rate of the matmuls")
    if args.out is not None:
        shape = {"hidden_size": args.hidden_size, "layers": args.layers, "work": work.name}
        measured = {"phases": found, "attention_rates": rates}
        write_json(args.out, {"what": "phases", "environment": environment(), **shape, **measured})
    return 0


def measure(config: BertConfig, work: Work, dtype: str, path: Path, rounds: int) -> dict[int, dict[str, float]]:
    """Return the time of each thread's phases in a forward, medians of rounds, the longest first."""
    model = BertModel(config, add_pooling_layer=False).eval().requires_grad_(False)
    kind = getattr(torch, dtype)
    quick = InferenceModel(native_copy(model, kind, Kernels(str(path))), "native", kind)
    inputs, library, every = work.inputs(config.vocab_size), ctypes.CDLL(str(path)), []
    for _ in range(rounds + 1):
        quick(**inputs)
        every.append(read(library))
    found = {}
    for thread in sorted({thread for each in every for thread in each}):
        names = {phase for each in every for phase in each.get(thread, ())}
        medians = {name: float(median(each.get(thread, Counter())[name] for each in every[1:])) for name in names}
        found[thread] = dict(sorted(medians.items(), key=lambda each: -each[1]))
    return found


def attention_rate(threads: Iterable[Mapping[str, float]], config: BertConfig, work: Work) -> float:
    """Return the rate of attention relative to the matmuls of weights: operations in the time of their phases."""
    spent: Counter[str] = Counter()
    for phases in threads:
        spent.update(phases)
    attention = sum(time for phase, time in spent.items() if "attention" in phase or "context" in phase)
    matmuls = sum(spent[phase] for phase in MATMULS)
    of_matmuls = 2 * sum(work.lengths) * weights(config)
    return (operations(config, work.lengths) - of_matmuls) / attention / (of_matmuls / matmuls)


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
