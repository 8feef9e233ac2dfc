"""bertlite/inference/gpu/ahead.py: what stands in a parcel, the order of results, and errors of threads."""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from bertlite.inference.gpu import ahead
from bertlite.inference.gpu.ahead import AHEAD, LATE, Parcel, made_ahead, read_late, run_ahead

CPU = torch.device("cpu")


def test_a_parcel_is_its_batch_in_one_piece_of_memory() -> None:
    batch: dict[str, Any] = {
        "ids": torch.arange(33).view(3, 11),
        "half": torch.randn(3, 5).bfloat16(),
        "real": torch.rand(3, 11) > 0.5,
        "none": torch.empty(0, 7),
        "turned": torch.randn(4, 3, dtype=torch.float64).T,
        "number": torch.tensor(2.5),
        "prompt_length": 4,
    }
    sent = Parcel(batch, pinned=False).send(CPU)
    assert sent.keys() == batch.keys()
    assert sent["prompt_length"] == 4
    tensors = [name for name, x in batch.items() if isinstance(x, torch.Tensor)]
    assert len({sent[name].untyped_storage().data_ptr() for name in tensors if sent[name].numel()}) == 1
    for name in tensors:
        assert sent[name].dtype == batch[name].dtype
        assert torch.equal(sent[name], batch[name])


@pytest.mark.parametrize("device", [CPU, torch.device("meta")])
def test_results_come_in_order_and_each_has_its_own_inputs(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU one by one, else ahead in threads: `Parcel.send` leaves the tensors where they are."""
    threads = set()
    monkeypatch.setattr(Parcel, "send", lambda parcel, _: parcel.views(parcel.memory))

    def make(i: int) -> Mapping[str, Any]:
        threads.add(threading.current_thread())
        return {"x": torch.full((2, i + 1), i)}

    found = list(run_ahead(make, lambda i, batch: batch["x"] * 10 + i, range(40), device))
    assert [x.shape for x in found] == [(2, i + 1) for i in range(40)]
    assert all((x == 11 * i).all() for i, x in enumerate(found))
    assert (threading.main_thread() in threads) == (device == CPU)


def test_no_more_is_made_ahead_or_read_late_than_said() -> None:
    made, launched = [], []
    results = made_ahead(lambda i: made.append(i) or i, range(100))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(made) <= AHEAD + 1

    def launch() -> Iterator[torch.Tensor]:
        for i in range(20):
            launched.append(i)
            yield torch.tensor([i])

    for i, x in enumerate(read_late(launch())):
        assert x == np.array([i])
        assert len(launched) == min(i + LATE + 1, 20)


def test_an_error_of_a_thread_is_raised() -> None:
    def make(i: int) -> int:
        if i == 3:
            raise ValueError("text 3 is none")
        return i

    found = []
    with pytest.raises(ValueError, match="text 3 is none"):
        found.extend(made_ahead(make, range(20)))  # the iterator ends its threads
    assert threading.active_count() < 2 + ahead.THREADS
