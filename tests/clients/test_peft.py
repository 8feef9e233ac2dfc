"""PEFT's adapters on bertlite's models."""

from pathlib import Path

import pytest
from checks import OURS
from checks.adapters import CLS
from checks.common import tiny
from harness import only_ours, same_as_stock, stock_does, stock_fails

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # PEFT asks under the old name
]


@pytest.mark.parametrize("name", stock_does("PEFT"))
def test_adapter_is_stocks(name: str, tmp_path: Path) -> None:
    same_as_stock(name, tmp_path)


@pytest.mark.parametrize("name", stock_fails("PEFT"))
def test_adapter_works_where_stock_fails(name: str, tmp_path: Path) -> None:
    only_ours(name, tmp_path)


def test_pruning_refuses_a_wrapped_projection_by_name(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(OURS.load(CLS, tiny(tmp_path, CLS)), peft.LoraConfig(task_type="SEQ_CLS", r=3))
    with pytest.raises(TypeError, match=r"encoder\.layer\.1\.attention\.self\.query is a peft\..*merge adapters"):
        model.base_model.model.prune_heads({1: [2]})
    merged = model.merge_and_unload()
    merged.prune_heads({1: [2]})
    assert merged.bert.encoder.layer[1].attention.self.num_attention_heads == 3
