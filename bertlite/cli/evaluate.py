"""The arguments of `bertlite evaluate`."""

from bertlite.cli.parts import Commands, command
from bertlite.cli.prune import add_data, add_metric

DESCRIPTION = """\
Compute the metrics of a checkpoint on labelled examples, one of them with a 95 % interval over the examples.  The task
follows from the checkpoint's class: sequence or token classification, regression, similarity of two texts, or masked
words, which need no labels.  With --against, the two checkpoints are compared on the same examples: the difference has
an interval and a p-value, and the exit status is 1 if CHECKPOINT is significantly worse."""


def add(commands: Commands) -> None:
    """Add `evaluate` and its arguments."""
    evaluate = command(
        commands,
        "evaluate",
        "bertlite.experiments.evaluate_command",
        summary="compute the metrics of a checkpoint on labelled examples, alone or against another's",
        description=DESCRIPTION,
        examples=(
            "evaluate fast --dev dev.tsv --against runs/dense/model --metric mcc",
            "evaluate runs/dense/model --dev dev.tsv",
        ),
        record="the metrics, intervals and the comparison",
    )
    add_data(evaluate, train=False, task=None)
    evaluate.add_argument(
        "--against", metavar="CHECKPOINT", help="compare with this checkpoint, of the same task (default: none)"
    )
    add_metric(evaluate)
