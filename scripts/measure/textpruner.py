"""Compare heads pruned by TextPruner and by bertlite: the same model, calibration examples and number of heads.

    python -m scripts.measure.textpruner CHECKPOINT --train train.tsv --dev dev.tsv --out runs/textpruner,FILE.json

TextPruner calls `prune_heads`, which transformers 4 has and 5 lacks.  It requires numpy<1.22 from Python 3.10 on;
`pip install --no-deps textpruner` avoids that.  MODEL is a folder or hub id of a sequence classifier.  Each cell is a
run's folder; a finished one is not run again.
"""

import argparse
import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy.stats import ttest_1samp

from bertlite.cli.parts import FOLDER, RECORD, integers, paths
from bertlite.cli.prune import add_calibration, add_data
from bertlite.experiments.command import data_source
from bertlite.experiments.compare import provenance
from bertlite.experiments.evaluate import TASKS, predict
from bertlite.experiments.experiment import Cell, Experiment, Setting
from bertlite.support.records import Record, Run, is_finished, read_runs, version_of, write_record

TASK = TASKS["classification"]
OURS = {"bertlite": "none", "bertlite, refit": "refit"}  # name: repair


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    train, dev = (data_source(args, path, None) for path in (args.train, args.dev))
    experiment = Experiment(Setting(args.checkpoint, TASK.name, train, dev, args.max_length, args.calibration))
    built = experiment.dense.config.num_attention_heads
    for heads in args.heads:
        if not 0 < heads < built:
            raise ValueError(f"{heads} heads a layer: TextPruner can leave 1 to {built - 1} of {built}")
    rows = []
    for heads in args.heads:
        systems = {"TextPruner": [textpruner(experiment, heads, seed, args.out[FOLDER]) for seed in args.seeds]}
        fraction = 1 - heads / built
        for name, repair in OURS.items():
            cells = [Cell(fraction=fraction, at_least=1, repair=repair, seed=seed) for seed in args.seeds]
            systems[name] = [read_runs(experiment.run(cell, args.out[FOLDER]))[0] for cell in cells]
        rows += [row(name, fraction, runs) for name, runs in systems.items()]
        for line in rows[-len(systems) :]:
            print(
                f"{100 * fraction:3.0f} % removed  {line['system']:<28} accuracy {100 * line['accuracy']:.1f}"
                f" [{100 * line['low']:.1f}, {100 * line['high']:.1f}]  heads kept {line['heads_kept']}"
            )
    runs = read_runs(args.out[FOLDER], name="textpruner")
    write_record(
        args.out[RECORD],
        {
            "what": "heads pruned by TextPruner and by bertlite",
            **{name: runs[0].facts[name] for name in ("command", "data", "model")},
            **provenance([*runs, *read_runs(args.out[FOLDER], name="prune")]),
            "textpruner": version_of("textpruner"),
            "dense": float(TASK.metrics["accuracy"](experiment.dense_outputs, np.array(experiment.dev.labels))),
            "calibration": args.calibration,
            "rows": rows,
        },
    )
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data(parser)
    add_calibration(parser)
    parser.add_argument(
        "--heads", type=integers, default="6,4,2,1", help="left, of a layer on average (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=integers, default="0,1,2", help="of the calibration examples (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=paths((RECORD, FOLDER)), required=True, metavar="FOLDER,FILE.json", help="runs, and the record"
    )
    args = parser.parse_args(argv)
    if len(args.out) < 2:
        parser.error("--out needs a folder for the runs and a file for the record: FOLDER,FILE.json")
    return args


def textpruner(experiment: Experiment, heads: int, seed: int, root: Path) -> Record:
    """Run TextPruner with its defaults, but for the settings that both must share and uneven layers."""
    config = {"heads": heads, "setting": {"calibration": experiment.setting.calibration}}
    folder = root / f"textpruner-{heads}-{seed}-{experiment.hashes['model']['dense'][:8]}"
    if is_finished(folder):
        return read_runs(folder)[0]
    import transformers

    with contextlib.redirect_stdout(io.StringIO()):  # it prints optional packages
        from textpruner import GeneralConfig, TransformerPruner, TransformerPruningConfig

    data, hashes = experiment.hashes["data"], experiment.hashes["model"]
    model: Any = transformers.BertForSequenceClassification.from_pretrained(experiment.setting.model)
    with (
        Run("textpruner", config, folder=folder, seed=seed, data=data, model=hashes) as run,
        TemporaryDirectory() as scratch,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        pruner = TransformerPruner(
            model,
            TransformerPruningConfig(
                target_ffn_size=model.config.intermediate_size,
                target_num_of_heads=heads,
                pruning_method="iterative",
                n_iters=1,
                head_even_masking=False,
            ),
            GeneralConfig(use_device="cpu", output_dir=scratch),
        )
        pruner.prune(experiment.calibration(seed), save_model=False)
        found = predict(model, experiment.dev_data, TASK)
        run.results = {
            "accuracy": TASK.metrics["accuracy"](found, np.array(experiment.dev.labels)),
            "heads_kept": pruner.head_mask.sum(1).int().tolist(),
        }
    return read_runs(folder)[0]


def row(system: str, fraction: float, runs: Sequence[Record]) -> dict[str, Any]:
    """Return a system's mean over seeds with its interval."""
    values = [run.results["accuracy"] for run in runs]
    interval = ttest_1samp(values, 0).confidence_interval()  # Student's, of the mean over seeds
    return {
        "system": system,
        "fraction": fraction,
        "values": values,
        "accuracy": float(np.mean(values)),
        "low": float(interval.low),
        "high": float(interval.high),
        "heads_kept": [sum(run.results["heads_kept"]) for run in runs],
    }


if __name__ == "__main__":
    raise SystemExit(main())
