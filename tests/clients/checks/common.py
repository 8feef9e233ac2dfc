"""What all checks share: the table they are entered in, the two libraries, checkpoints, comparisons.

A check uses a client library as its users do, raises where its claim does not hold, and returns what it observed.  It
runs with bertlite's classes or with transformers' own, so that the two can be compared and the same code finds what
stock fails at.
"""

import importlib.util
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import bertlite
import bertlite.hf
from bertlite.parity.command import DEMO, demo_checkpoint
from tests import conftest

V5 = int(transformers.__version__.split(".")[0]) >= 5
RENAMED = hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable")  # in 5.23
CHECKPOINTING = "activation_checkpointing" if RENAMED else "gradient_checkpointing"
SIZES: dict[str, Any] = {**conftest.SIZES, "type_vocab_size": 2}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # two runs are then one
GONE = {0: [1, 3], 2: [0]}  # the heads that are missing in a pruned checkpoint; layers lose different numbers
SOME = {0: [1, 3], 5: [0]}  # the same of MiniLM, which has 6 layers of 12 heads
ROUNDING = 1e-12  # float64
ROUNDING32 = 1e-5  # float32, where another order of the same sums is allowed

Observed = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """A library whose BERT classes a check runs with, and how Auto classes are made to find them."""

    name: str
    models: ModuleType
    loading: Callable[[], AbstractContextManager[Any]] = nullcontext

    def load(self, cls: str, folder: Path, **options: Any) -> Any:
        return getattr(self.models, cls).from_pretrained(folder, **options)

    def owns(self, model: nn.Module) -> None:
        """Raise unless the model is of this library's class: proof that the path was taken."""
        wanted = getattr(self.models, type(model).__name__, None)
        if type(model) is not wanted:
            raise AssertionError(f"{type(model)} is not {self.name}'s")


OURS = Side("bertlite.hf", bertlite.hf, bertlite.hf.registered)
STOCK = Side("transformers", transformers)


class MissingError(Exception):
    """A library or checkpoint that the check needs is not installed."""


class ElsewhereError(Exception):
    """An error of another process; the text names the exception."""


def first_line(error: Exception) -> str:
    """Return the first line of an error as it stands at the foot of a traceback."""
    text = str(error) if isinstance(error, ElsewhereError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0].strip()


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, or with a dot in its name a part of a package."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package itself is missing
        return False


@dataclass(frozen=True)
class Check:
    client: str
    claim: str
    name: str
    function: Callable[..., Observed]
    needs: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    def run(self, side: Side, folder: Path) -> Observed:
        """Run the check in an empty folder.

        Raises:
            MissingError: a library or the MiniLM checkpoint is not installed.
            Exception: the claim does not hold.
        """
        missing = [name for name in self.needs if not is_installed(name)]
        if missing:
            raise MissingError(f"not installed: {', '.join(missing)}")
        folder.mkdir(parents=True)
        with clean():
            return self.function(side, folder)


CHECKS: dict[str, Check] = {}


def name_of(function: Any, options: Mapping[str, Any]) -> str:
    return "-".join([function.__name__, *(key if value is True else str(value) for key, value in options.items())])


def check(client: str, claim: str, *needs: str, **options: Any) -> Callable[[Any], Any]:
    """Enter a function into CHECKS, under its name and these options of it."""

    def enter(function: Any) -> Any:
        name = name_of(function, options)
        if name in CHECKS:
            raise ValueError(f"two checks are called {name}")
        CHECKS[name] = Check(client, claim, name, partial(function, **options), needs)
        return function

    return enter


def dense_and_pruned(client: str, claim: str, *needs: str, **options: Any) -> Callable[[Any], Any]:
    """Enter a function into CHECKS twice, the second time with pruned=True."""

    def enter(function: Any) -> Any:
        check(client, claim, *needs, **options)(function)
        return check(client, f"{claim}, pruned", *needs, **options, pruned=True)(function)

    return enter


@contextmanager
def clean() -> Iterator[None]:
    """Set seeds, and drop the state that accelerate and the compiler keep for a process, before and after."""
    reset()
    seed()
    try:
        yield
    finally:
        reset()


def reset() -> None:
    if importlib.util.find_spec("accelerate"):
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    torch._dynamo.reset()


def seed(value: int = 0) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def tiny(
    folder: Path, cls: str = "BertModel", pruned: bool = False, dtype: torch.dtype = torch.float32, **fields: Any
) -> Path:
    """Write a small random checkpoint with bertlite's core: every weight matters and dropout is 0."""
    model: Any = conftest.randomise_(getattr(bertlite, cls)(bertlite.BertConfig(**{**SIZES, **QUIET, **fields})))
    model = bertlite.prune_heads(model, GONE) if pruned else model
    path = folder / f"{cls}{'-pruned' * pruned}"
    model.to(dtype).save_pretrained(path)
    return path


def tiny_batch(rows: int = 2, length: int = 11, seed: int = 1) -> dict[str, Tensor]:
    """Make token ids, token types and a right-padded mask; the rows have different lengths, all at least 2."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([max(length - (4 * row) % 7, 2) for row in range(rows)])
    return {
        "input_ids": torch.randint(1, SIZES["vocab_size"], (rows, length), generator=generator),
        "token_type_ids": torch.randint(0, SIZES["type_vocab_size"], (rows, length), generator=generator),
        "attention_mask": (torch.arange(length) < lengths[:, None]).long(),
    }


def minilm() -> Path:
    """Return the folder of the trained MiniLM, not to be written to.

    Raises:
        MissingError: it is not installed.
    """
    found = demo_checkpoint()
    if found is None:
        raise MissingError(f"not installed: {DEMO}")
    return found


# Comparisons ---------------------------------------------------------------------------------------------------------


def flat(observed: Any, path: str = "") -> dict[str, Any]:
    """Return {place: tensor, number or string} of everything that a check observed."""
    if isinstance(observed, np.ndarray | np.generic):
        observed = torch.from_numpy(np.asarray(observed))
    if isinstance(observed, Mapping):
        items = list(observed.items())
    elif isinstance(observed, list | tuple):
        items = list(enumerate(observed))
    else:
        return {path: observed}
    return {k: v for name, part in items if part is not None for k, v in flat(part, f"{path}.{name}").items()}


def gap(got: Any, wanted: Any) -> float:
    """Return the largest difference between two sets of tensors and numbers.

    Raises:
        AssertionError: they differ in places, shapes, dtypes or words, or there is nothing.
    """
    got, wanted = flat(got), flat(wanted)
    if list(got) != list(wanted) or not got:
        raise AssertionError(f"{sorted(set(got) ^ set(wanted))} in one only, of {len(got)} and {len(wanted)}")
    worst = 0.0
    for place, have in got.items():
        want = wanted[place]
        if isinstance(have, Tensor) and isinstance(want, Tensor):
            if have.shape != want.shape or have.dtype != want.dtype:
                raise AssertionError(f"{place}: {have.dtype}{list(have.shape)}, not {want.dtype}{list(want.shape)}")
            found = (have.double() - want.double()).abs().max().item() if have.numel() else 0.0
            worst = max(worst, found) if found == found else float("nan")
        elif isinstance(have, float) and isinstance(want, float):
            worst = max(worst, abs(have - want))
        elif have != want:
            raise AssertionError(f"{place}: {have!r}, not {want!r}")
    return worst


def equal(got: Any, wanted: Any, within: float = 0.0, what: str = "they") -> None:
    """Raise AssertionError unless two sets of tensors and numbers are the same; 0 means bit for bit."""
    found = gap(got, wanted)
    if not found <= within:
        raise AssertionError(f"{what} differ by {found:.2e}; allowed: {within:g}")


def differ(got: Any, other: Any, what: str) -> None:
    """Raise AssertionError unless something changed."""
    if not gap(got, other) > 0:
        raise AssertionError(f"{what} changed nothing")


def state(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the gradients, and clear them."""
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@contextmanager
def counted(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of the feed-forward networks that run, one per run: checkpointed layers run theirs twice."""
    ran: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for name, module in model.named_modules()
        if name.endswith(".intermediate")
    ]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()
