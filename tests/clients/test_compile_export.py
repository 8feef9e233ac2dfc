"""torch.compile and torch.export of bertlite's models under transformers."""

from pathlib import Path

import pytest
from checks.compilers import COMPILE, EXPORT
from harness import only_ours, same_as_stock, stock_does, stock_fails

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("name", stock_does(COMPILE) + stock_does(EXPORT))
def test_one_graph_is_stocks(name: str, tmp_path: Path) -> None:
    same_as_stock(name, tmp_path)


@pytest.mark.parametrize("name", stock_fails(COMPILE) + stock_fails(EXPORT))
def test_one_graph_works_where_stock_fails(name: str, tmp_path: Path) -> None:
    only_ours(name, tmp_path)
