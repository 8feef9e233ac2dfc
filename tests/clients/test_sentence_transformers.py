"""sentence-transformers, which finds bertlite by path inside `registered()`."""

from pathlib import Path

import pytest
from harness import only_ours, same_as_stock, stock_does, stock_fails

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning"),  # the library calls it
]


@pytest.mark.parametrize("name", stock_does("sentence-transformers"))
def test_sentence_transformer_is_stocks(name: str, tmp_path: Path) -> None:
    same_as_stock(name, tmp_path)


@pytest.mark.parametrize("name", stock_fails("sentence-transformers"))
def test_sentence_transformer_works_where_stock_fails(name: str, tmp_path: Path) -> None:
    only_ours(name, tmp_path)
