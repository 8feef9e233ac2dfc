"""accelerate with bertlite's models, on the CPU."""

from pathlib import Path

import pytest
from harness import only_ours, same_as_stock, stock_does, stock_fails

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("name", stock_does("accelerate"))
def test_accelerate_is_stocks(name: str, tmp_path: Path) -> None:
    same_as_stock(name, tmp_path)


@pytest.mark.parametrize("name", stock_fails("accelerate"))
def test_accelerate_works_where_stock_fails(name: str, tmp_path: Path) -> None:
    only_ours(name, tmp_path)
