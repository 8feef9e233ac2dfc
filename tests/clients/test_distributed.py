"""Two processes under torchrun.  The first test starts all jobs of a side, the others read what they left."""

from pathlib import Path

import pytest
from checks.distributed import DDP, FSDP, TENSOR
from harness import only_ours, same_as_stock, stock_does, stock_fails

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("name", stock_does(DDP) + stock_does(FSDP) + stock_does(TENSOR))
def test_two_processes_compute_what_stocks_do(name: str, tmp_path: Path) -> None:
    same_as_stock(name, tmp_path)


@pytest.mark.parametrize("name", stock_fails(DDP) + stock_fails(FSDP) + stock_fails(TENSOR))
def test_two_processes_compute_what_stock_cannot(name: str, tmp_path: Path) -> None:
    only_ours(name, tmp_path)
