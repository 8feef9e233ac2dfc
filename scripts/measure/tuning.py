"""Measure candidates for the tuned constants of bertlite in turn.

    python -m scripts.measure.tuning --out scripts/results/tuning.json      # three minutes on two cores
    python -m scripts.measure.tuning --only MAX_FILL,CALL_COST

For each constant it prints the value in the code, and what each candidate brings, with its spread: another is worth
choosing if its lead exceeds that.  Times are of layers of bert-base's shape.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bertlite import BertConfig, BertForSequenceClassification, BertModel
from bertlite.bench.work import Work, ragged
from bertlite.cli.parts import names_of
from bertlite.records import environment, quartiles, write_record
from bertlite.timing import alternate, check_rounds, ratios, with_spread

CALLS = (0, 256, 1024, 4096, 16384)
FILLS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
POSITIONS = (16, 32, 64, 128, 256, 512)
NEVER = sys.maxsize  # as MIN_POSITIONS or the like: no batch is so large
VOCABULARY = 1000

Ratio = dict[str, float]  # median and quartiles
Place = tuple[Any, str, Any]  # module, name of a constant, value


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement.

    Args:
        scale: share of the sequences of each batch, at most 1; tests take few.
    """

    hidden: int = 768
    layers: int = 2
    rounds: int = 9
    scale: float = 1.0

    def config(self, **changes: Any) -> BertConfig:
        """Return the config of a model with layers of this shape and a small vocabulary."""
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden,
            "num_attention_heads": max(1, self.hidden // 64),
            "intermediate_size": 4 * self.hidden,
            "num_hidden_layers": self.layers,
        }
        return BertConfig(**{**sizes, **changes})

    def sequences(self, count: int) -> int:
        """Return the number of sequences in a batch."""
        return max(2, round(self.scale * count))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        type=names_of("constant", list(CONSTANTS)),
        default=list(CONSTANTS),
        metavar="A,B",
        help="(default: all)",
    )
    parser.add_argument("--hidden", type=int, default=Sizes.hidden, help="size of the states (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=Sizes.layers, help="layers of a model (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=Sizes.rounds, help="runs of each candidate (default: %(default)s)"
    )
    parser.add_argument("--scale", type=float, default=Sizes.scale, help="share of each batch (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="where to write the record")
    args = parser.parse_args(argv)
    check_rounds(args.rounds, name="--rounds")
    sizes = Sizes(args.hidden, args.layers, args.rounds, args.scale)
    where = environment("cuda" if torch.cuda.is_available() else "cpu")
    constants: dict[str, Any] = {}
    with torch.inference_mode():
        for name in args.only:
            constants[name] = CONSTANTS[name](sizes)
            show(name, constants[name])
    if args.out:
        record = {"what": "scripts/measure/tuning.py", "environment": where, "sizes": vars(sizes)}
        write_record(args.out, {**record, "constants": constants})
        print(f"record: {args.out}")
    return 0


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print the measurement of a constant: the value in the code, and ratios."""
    print(f"{name}: {found['in_code']} in the code")
    for candidate, ratio in found["ratios"].items():
        print(f"    {candidate:>8}  {with_spread(ratio)}  {found['ratio']}", flush=True)


def holders(*names: str) -> list[Place]:
    """Return every module of bertlite that has one of these constants, defined there or imported, with its value."""
    modules = [module for path, module in list(sys.modules.items()) if path.startswith("bertlite.")]
    return [(module, name, vars(module)[name]) for module in modules for name in names if name in vars(module)]


def value_of(name: str) -> Any:
    """Return the value of a constant in the code.

    Raises:
        LookupError: no module that is loaded has it.
    """
    for _, _, value in holders(name):
        return value
    raise LookupError(f"no module of bertlite has {name}: was it renamed?")


@contextmanager
def constants_set(places: Sequence[Place], values: Mapping[str, Any]) -> Iterator[None]:
    """Give constants of bertlite other values within the block; `places` is what `holders` returns."""
    try:
        for module, name, _ in places:
            setattr(module, name, values[name])
        yield
    finally:
        for module, name, value in places:
            setattr(module, name, value)


def run_with(run: Callable[[], Any], **values: Any) -> Callable[[], None]:
    """Return a function that runs with constants of bertlite set to these values."""
    places = holders(*values)

    def call() -> None:
        with constants_set(places, values):
            run()

    return call


def compare_values(runs: Mapping[Any, Callable[[], Any]], in_code: Any, rounds: int) -> dict[str, Any]:
    """Time a function for each value of a constant; `in_code` must be among them."""
    times = alternate({str(value): run for value, run in runs.items()}, rounds)
    found = {str(value): quartiles(ratios(times, str(in_code), str(value))) for value in runs}
    return {"in_code": in_code, "ratio": f"times as fast as {in_code}", "ratios": found}


def by_value(in_code: float, ratio: str, points: Mapping[float, Ratio]) -> dict[str, Any]:
    """Return the ratios by a value, and the threshold in the code."""
    return {"in_code": in_code, "ratio": ratio, "ratios": {str(value): found for value, found in points.items()}}


def call_cost(sizes: Sizes) -> dict[str, Any]:
    """Measure what one more call of attention costs, on packed batches with the lengths of two data sets."""
    model = BertModel(sizes.config(attn_implementation="packed")).eval()
    works = (ragged("SST-2", sizes.sequences(32), 128), ragged("WikiText-2", sizes.sequences(8), 512))
    batches = [work.inputs(VOCABULARY) for work in works]
    in_code = value_of("CALL_COST")

    def forward() -> None:
        for batch in batches:
            model(**batch)

    runs = {cost: run_with(forward, CALL_COST=cost) for cost in sorted({*CALLS, in_code})}
    return compare_values(runs, in_code, sizes.rounds)


def filled_batch(sequences: int, length: int, share: float) -> dict[str, Tensor]:
    """Return a batch in which this share of the positions, 0.5 or more, holds tokens; lengths are evenly spaced."""
    shortest = 2 * share - 1
    lengths = [round(length * (shortest + (1 - shortest) * i / (sequences - 1))) for i in range(sequences)]
    return Work("filled", tuple(max(1, n) for n in lengths), length).inputs(VOCABULARY)


def packing_ratio(model: BertForSequenceClassification, batch: Mapping[str, Tensor], rounds: int) -> Ratio:
    """Return the time with padding over the time without, of a head that reads the first tokens alone."""
    run = partial(model, **batch)
    runs = {"padded": run_with(run, MIN_POSITIONS=NEVER), "packed": run_with(run, MIN_POSITIONS=0, MAX_FILL=1.0)}
    return quartiles(ratios(alternate(runs, rounds), "padded", "packed"))


def max_fill(sizes: Sizes) -> dict[str, Any]:
    """Measure up to which share of tokens it pays to leave padding out."""
    model = BertForSequenceClassification(sizes.config()).eval()
    batches = {share: filled_batch(sizes.sequences(16), 128, share) for share in FILLS}
    points: dict[float, Ratio] = {share: packing_ratio(model, batch, sizes.rounds) for share, batch in batches.items()}
    return by_value(value_of("MAX_FILL"), "times as fast without padding, by share of tokens", points)


def min_positions(sizes: Sizes) -> dict[str, Any]:
    """Measure from how many positions on it pays to leave padding out."""
    model = BertForSequenceClassification(sizes.config()).eval()
    batches = {count: filled_batch(2, count // 2, 0.6) for count in POSITIONS}
    points: dict[float, Ratio] = {count: packing_ratio(model, batch, sizes.rounds) for count, batch in batches.items()}
    return by_value(value_of("MIN_POSITIONS"), "times as fast without padding, by positions", points)


CONSTANTS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "CALL_COST": call_cost,
    "MAX_FILL": max_fill,
    "MIN_POSITIONS": min_positions,
}

if __name__ == "__main__":
    raise SystemExit(main())
