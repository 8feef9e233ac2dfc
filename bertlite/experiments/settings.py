"""Settings of pruning and training: options get their defaults here, and resuming compares them.

No torch, since `--help` imports this.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from typing import Any, TypeVar

from bertlite.support.kinds import check_settings

Settings = TypeVar("Settings")
LABELS_FOR = ("all", "judging")
DETERMINES = "determines"  # in a field's metadata; without it a setting determines everything
REST, NOTHING = "everything after gradients and curves", "nothing"


@dataclass(frozen=True)
class PruneSettings:
    """The settings of `prune_to`, named like the options of `bertlite prune to`.

    A field determines the result: unfinished work with another value is not continued.  Exceptions say so.

    Args:
        text: names of the columns with the text: one, or two for pairs.
        columns: names of all columns, for a .csv or .tsv file without a header.
        label: name of the column with the label; None uses no labels.
        labels_for: "all", or "judging" to use labels only for judging.
        max_length: the number of tokens to truncate texts to; by default 128, or as sentence-transformers would.
        calibration: texts to fit to; by default 1024, or fewer with 16 tokens for each input of the widest matrix.
        vocabulary: keep only the tokens that the texts use.
        seed: the seed for drawing texts.
        device: "cpu" or "cuda".
        at: (sequences, tokens) of the batch that the target is for; by default (8, 128) without `lengths`.
        lengths: a file with a length in tokens on each line; the batch has `batch_size` of their quantiles.
        backend: how models are timed: "plain" PyTorch, or a backend of `optimize_for_inference`; by default "plain",
            on a GPU "graphs", for int8 "auto".
        dtype: the dtype that the pruned model will run in; by default the checkpoint's.
        size: a target like 40% is a share of the file's bytes, not of the MACs.
        distil: minutes of training after pruning, or steps, such as "500steps".
        mapping: fit a map after an encoder's pooling, if there are 800 texts that do not judge.
        lose_at_most: points that the model may lose; by default a MiniLM's normal number.

    Raises:
        ValueError: a value is none of these.
    """

    text: tuple[str, ...] = ("text",)
    columns: tuple[str, ...] = ()
    label: str | None = None
    labels_for: str = "all"
    max_length: int | None = None
    calibration: int | None = None
    vocabulary: bool = False
    seed: int = 0
    device: str = "cpu"
    at: tuple[int, int] | None = field(default=None, metadata={DETERMINES: REST})
    lengths: str | PathLike[str] | None = field(default=None, metadata={DETERMINES: REST})
    batch_size: int = field(default=32, metadata={DETERMINES: REST})
    backend: str | None = field(default=None, metadata={DETERMINES: REST})
    dtype: str | None = field(default=None, metadata={DETERMINES: REST})
    size: bool = field(default=False, metadata={DETERMINES: REST})
    distil: float | str | None = field(default=None, metadata={DETERMINES: REST})
    mapping: bool = field(default=True, metadata={DETERMINES: REST})
    lose_at_most: float | None = field(default=None, metadata={DETERMINES: NOTHING})

    def __post_init__(self) -> None:
        check_settings(self)
        if self.labels_for not in LABELS_FOR:
            raise ValueError(f"labels_for is {self.labels_for!r}; give one of {', '.join(LABELS_FOR)}")
        for name in ("max_length", "calibration", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; give 1 or more")
        if isinstance(self.distil, str) and steps_of(self.distil) is None:
            raise ValueError(f"distil is {self.distil!r}; give minutes, or steps such as 500steps")
        if self.labels_for == "judging" and self.label is None:
            raise ValueError("--labels-for judging needs --label NAME, the column with the labels")

    def determining(self, *, curves: bool = False) -> dict[str, Any]:
        """Return the settings that determine a result, or only gradients and curves; JSON-ready."""
        left_out = (NOTHING, REST) if curves else (NOTHING,)
        kept = [each.name for each in fields(self) if each.metadata.get(DETERMINES) not in left_out]
        return json.loads(json.dumps({name: getattr(self, name) for name in kept}, default=str))


def steps_of(distil: float | str) -> int | None:
    """Return the number of "500steps"; None if it is not a number of steps."""
    found = re.fullmatch(r"([1-9]\d*) ?steps?", str(distil), re.ASCII)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Recipe:
    """The settings of training.

    Args:
        epochs: passes over the examples; a fraction is a part of one.
        lr: peak learning rate; it rises linearly over the first `warmup` of the steps and falls linearly to 0.
        warmup: share of the steps.
        clip: largest norm of the gradients.
        distil: weight of the distance to a teacher's logits in the loss, 0 to 1; the rest is the labels' loss.
        hidden: factor of the distance to the teacher's hidden states, which is added.
    """

    epochs: float = 3
    lr: float = 5e-5
    batch_size: int = 32
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    distil: float = 0.0
    hidden: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that is negative or not finite, a rate of 0, or a share above 1."""
        check_settings(self)
        highest = {"warmup": 1, "distil": 1}
        for name, value in asdict(self).items():
            most = highest.get(name, math.inf)
            if not 0 <= value <= most or value == math.inf or (name in ("lr", "batch_size") and not value):
                above = "above" if name in ("lr", "batch_size") else "from"
                raise ValueError(f"{name} is {value}; give a finite number {above} 0" + ("" if most > 1 else " to 1"))


def from_options(cls: type[Settings], options: Mapping[str, Any]) -> Settings:
    """Make settings from the options with the names of their fields; other fields have their defaults."""
    names = [each.name for each in fields(cls) if each.name in options]  # type: ignore[arg-type]  # a dataclass
    return cls(**{name: options[name] for name in names})
