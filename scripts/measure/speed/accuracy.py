"""The accuracy of engines against float64: only right ones are timed.

Shapes:  B sequences · S positions · D hidden
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Forward = Callable[[Mapping[str, Tensor]], Any]  # batch -> outputs
ERRORS = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.2}  # above these an engine is wrong
COSINES = {"float32": 1 - 1e-6, "bfloat16": 0.99, "int8": 0.9}  # and below these, at a single token


@dataclass(frozen=True)
class Accuracy:
    """The distance of an engine's last hidden states from those in float64, at the tokens that are not padding.

    Args:
        error: relative error, by root mean square over all tokens.
        cosine: the least cosine of a token with the same one in float64.
        error_unmasked: relative error from float64 without a mask; None if there is no padding.
    """

    error: float
    cosine: float
    error_unmasked: float = float("inf")

    def is_right(self, dtype: str) -> bool:
        """Return whether an engine is right up to the rounding of a dtype, and reads the mask."""
        near = self.error <= ERRORS[dtype] and self.cosine >= COSINES[dtype]  # neither holds for nan
        return near and self.error < self.error_unmasked


def accuracies(
    truth: nn.Module, runs: Mapping[str, Forward], batch: Mapping[str, Tensor], failed: dict[str, str] | None = None
) -> dict[str, Accuracy]:
    """Return the accuracy of engines on a batch.

    Args:
        truth: the model in float64.
        failed: gets the reason of each engine that raises, which has no accuracy; None lets it raise.
    """
    real = batch["attention_mask"].cpu().bool()
    with torch.no_grad():
        right = states(truth(**batch))[real]
        unmasked = None if bool(real.all()) else states(truth(input_ids=batch["input_ids"]))[real]
    found = {}
    for name, run in runs.items():
        try:
            found[name] = accuracy(states(run(batch))[real], right, unmasked)
        except torch.AcceleratorError:  # no engine runs in this process any more
            raise
        except Exception as error:
            if failed is None:
                raise
            failed[name] = f"{type(error).__name__}: {error}"
    return found


def accuracy(found: Tensor, right: Tensor, unmasked: Tensor | None) -> Accuracy:
    """Return the accuracy of last hidden states, (tokens, D)."""
    error = float((found - right).norm() / right.norm())
    cosine = float(F.cosine_similarity(found, right, dim=-1).min())
    if unmasked is None:
        return Accuracy(error, cosine)
    return Accuracy(error, cosine, float((found - unmasked).norm() / unmasked.norm()))


def states(out: Any) -> Tensor:
    """Return the last hidden states, (B, S, D), in float64 on the CPU, from the outputs of any engine."""
    found: Tensor = out.last_hidden_state if hasattr(out, "last_hidden_state") else torch.as_tensor(out[0])
    return found.detach().double().cpu()
