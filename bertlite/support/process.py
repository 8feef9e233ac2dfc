"""Leave the caller's process as it was: its random numbers, and accelerate's record of it."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from bertlite.support.kinds import P, R, checked


def door(function: Callable[P, R]) -> Callable[P, R]:
    """Let a public function check its arguments, and leave the caller's process as it was."""
    return checked(process_kept()(function))


@contextmanager
def process_kept() -> Iterator[None]:
    """Run a block, or with `@process_kept()` a function, whose random draws, seeds and current GPU end with it.

    An Accelerator of the caller has no effect inside, and one that is made inside has none afterwards.
    """
    python, arrays = random.getstate(), np.random.get_state()
    gpus_ran = torch.cuda.is_initialized()
    gpu = torch.cuda.current_device() if gpus_ran else 0

    # accelerate keeps its state in shared dicts: empty, it begins anew.
    states = accelerate_states()
    known = [dict(each) for each in states]
    for each in states:
        each.clear()

    try:
        with torch.random.fork_rng(range(torch.cuda.device_count() if gpus_ran else 0)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        if not gpus_ran:  # their generators begin with the seed of the CPU's
            torch.cuda.manual_seed_all(torch.initial_seed())
        if torch.cuda.is_initialized():
            torch.cuda.set_device(gpu)

        # The states are asked for again: accelerate may have been imported inside.
        for each in accelerate_states():
            each.clear()
        for each, before in zip(states, known, strict=True):
            each.update(before)


def accelerate_states() -> list[dict[str, object]]:
    """Return the values that all Accelerators of this process share, each kind in a dict; none without accelerate."""
    state = sys.modules.get("accelerate.state")
    kinds = ("PartialState", "AcceleratorState", "GradientState")
    return [] if state is None else [getattr(state, name)._shared_state for name in kinds]
