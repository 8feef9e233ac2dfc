"""Every check of every client, with bertlite's classes and with transformers' own."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.checks.adapters import CLS
from tests.clients.checks.common import CHECKS, OURS, tiny
from tests.clients.harness import STOCK_FAILS, only_ours, same_as_stock

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # clients ask under the old name
]
OPTIONAL = ("Opacus",)  # few need them, and CI installs none
SLOW = ("DDP", "FSDP2", "tensor parallel", "torch.compile", "torch.export")  # clients; and checks:
DEAR = ("fresh_process", "trains_embeddings", "smoothing", "resumes")


def marked(names: Iterable[str]) -> list[Any]:
    marks = {"optional": OPTIONAL, "slow": SLOW + DEAR}
    return [
        pytest.param(
            name, marks=[getattr(pytest.mark, mark) for mark in marks if {name, CHECKS[name].client} & {*marks[mark]}]
        )
        for name in names
    ]


@pytest.mark.parametrize("name", marked(name for name in CHECKS if name not in STOCK_FAILS))
def test_what_a_client_gets_is_what_stock_gives(name: str, tmp_path: Path) -> None:
    same_as_stock(name, tmp_path)


@pytest.mark.parametrize("name", marked(STOCK_FAILS))
def test_what_stock_cannot_do_works(name: str, tmp_path: Path) -> None:
    only_ours(name, tmp_path)


def test_pruning_refuses_an_adapted_projection_by_name(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(OURS.load(CLS, tiny(tmp_path, CLS)), peft.LoraConfig(task_type="SEQ_CLS", r=3))
    with pytest.raises(TypeError, match=r"encoder\.layer\.1\.attention\.self\.query is a peft\..*merge adapters"):
        model.base_model.model.prune_heads({1: [2]})
    merged = model.merge_and_unload()
    merged.prune_heads({1: [2]})
    assert merged.bert.encoder.layer[1].attention.self.num_attention_heads == 3
