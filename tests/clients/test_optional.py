"""Libraries that few need and CI does not install; each test is skipped where its library is absent."""

from pathlib import Path

import pytest
from checks import OURS
from checks.common import tiny
from checks.tools import WIDE
from harness import only_ours, same_as_stock, stock_does, stock_fails

pytestmark = [pytest.mark.clients, pytest.mark.optional]
CLIENTS = ("ONNX", "torchao", "captum", "bertviz", "TextPruner")


@pytest.mark.parametrize("name", [name for client in CLIENTS for name in stock_does(client)])
def test_results_are_stocks(name: str, tmp_path: Path) -> None:
    same_as_stock(name, tmp_path)


@pytest.mark.parametrize("name", [name for client in CLIENTS for name in stock_fails(client)])
def test_what_stock_cannot_do_works(name: str, tmp_path: Path) -> None:
    only_ours(name, tmp_path)


def test_pruning_refuses_a_quantised_projection_by_name(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = OURS.load("BertModel", tiny(tmp_path, **WIDE))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(TypeError, match=r"encoder\.layer\.1\.attention\.self\.query is a torchao\..*quantise after"):
        model.prune_heads({1: [2]})
