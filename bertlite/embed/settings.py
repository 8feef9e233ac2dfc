"""The settings of `Embedder` and of `bertlite embed`: options get their defaults here, and resuming compares them.

No torch, as `--help` imports this.
"""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from bertlite.support.kinds import check_settings

if TYPE_CHECKING:
    import torch

SHOWN_BY = "shown by"  # in a field's metadata; without it resuming compares the setting itself
ROUNDING = "nothing, as it changes vectors by rounding alone"


@dataclass(frozen=True, kw_only=True)
class VectorSettings:
    """The settings that determine vectors; `Embedder` describes them."""

    pooling: str | None = field(default=None, metadata={SHOWN_BY: "modules"})
    normalize: bool = False
    prompt: str | None = None
    prompt_name: str | None = None
    truncate_dim: int | None = field(default=None, metadata={SHOWN_BY: "dimension"})
    dtype: "torch.dtype | str | None" = None
    reproducible: bool = False
    device: str = field(default="cpu", metadata={SHOWN_BY: ROUNDING})
    backend: str = field(default="auto", metadata={SHOWN_BY: ROUNDING})
    max_length: int | None = None
    max_tokens: int = field(default=4096, metadata={SHOWN_BY: ROUNDING})

    def __post_init__(self) -> None:
        check_settings(self)
        numbers = {each.name: getattr(self, each.name) for each in fields(self) if each.type in (int, int | None)}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be an integer, 1 or more")
        if self.prompt is not None and self.prompt_name is not None:
            raise ValueError(f"prompt is {self.prompt!r} and prompt_name {self.prompt_name!r}: give one of them")


@dataclass(frozen=True, kw_only=True)
class EmbedSettings(VectorSettings):
    """The settings of `embed`: the fields of `Embedder`, and two for its files.

    Args:
        shard_rows: rows in a file; by default 10,000, or fewer if these have 1,000,000 characters.  A kill loses the
            work on at most one file, in each process.
        keep_text: write the texts too.

    Raises:
        ValueError: a number is below 1, or there are two prompts.
    """

    shard_rows: int | None = None
    keep_text: bool = False


def compared(kind: type[VectorSettings], settings: Any) -> dict[str, Any]:
    """Return those settings of a kind that resuming compares by themselves."""
    return {each.name: getattr(settings, each.name) for each in fields(kind) if SHOWN_BY not in each.metadata}
