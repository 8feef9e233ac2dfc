"""Run `bertlite export`."""

import argparse

from bertlite.progress import Progress
from bertlite.records import write_json
from bertlite.shipping.export import SHAPES, export
from bertlite.shipping.formats import FORMATS


def main(args: argparse.Namespace) -> int:
    """Export a checkpoint in each format, and print the errors of the graphs."""
    for name in args.format:
        FORMATS[name].require()  # before any of them is written
    record = {}
    with Progress(len(args.format) * (2 + len(SHAPES)), "steps", what="export") as progress:

        def step(text: str) -> None:
            progress.what = f"export: {text}"  # in the line of a log
            progress.advance()

        for name in args.format:
            record = export(args.checkpoint, args.folder, name, cls=args.class_name, progress=step)
            found = record["formats"][name]
            rows = [row for shape in found["shapes"] for row in shape["outputs"].values()]
            worst = max(rows, key=lambda row: row["error"] / row["allowed"])
            progress.print(
                f"{args.folder / FORMATS[name].file}: {found['class']}, {found['bytes'] / 1e6:.1f} MB;"
                f" at {len(found['shapes'])} shapes the largest difference from the model is"
                f" {max(row['difference'] for row in rows):.1e}, the error {worst['error']:.1e}"
                f" (torch's own {worst['torch']:.1e}, allowed {worst['allowed']:.1e})"
            )
    if args.record:
        write_json(args.record, record)
    return 0
