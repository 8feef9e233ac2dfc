"""Every check of every client, with bertlite's classes and with transformers' own."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bertlite.support.environment import version_of
from scripts.measure import clients
from tests.clients.checks.adapters import CLS
from tests.clients.checks.common import CHECKS, OURS, Check, MissingError, tiny
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


# scripts/measure/clients.py, which runs every check with both libraries and writes what came of it


def test_the_record_says_what_came_of_each_run(tmp_path: Path) -> None:
    assert clients.main(["--only", "encoder_decoder-1,loads_pruned", "--out", str(tmp_path / "out.json")]) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    lines = {line["name"]: line for line in record["checks"]}
    assert set(lines) == {"encoder_decoder-1", "loads_pruned"}
    assert lines["encoder_decoder-1"]["difference"] == 0
    assert {line["bertlite.hf"]["result"] for line in lines.values()} == {"passes"}
    versions = record["environment"]["versions"]
    assert versions["torch"]
    assert {name: versions[name] for name in ("peft", "opacus")} == {
        name: version_of(name) for name in ("peft", "opacus")
    }  # None of what is not installed


def test_a_failure_of_ours_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(side: Any, folder: Path) -> Any:
        raise ValueError(f"nothing in {folder}")

    def absent(side: Any, folder: Path) -> Any:
        raise MissingError("not installed: x")

    monkeypatch.setitem(CHECKS, "planted", Check("none", "it fails", "planted", fails, ()))
    monkeypatch.setitem(CHECKS, "planted-absent", Check("none", "it is absent", "planted-absent", absent, ()))
    assert clients.main(["--only", "planted", "--out", str(tmp_path / "out.json")]) == 1
    first, second = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert first["bertlite.hf"] == {"result": "fails", "error": "ValueError: nothing in FOLDER/run"}
    assert second["transformers"] == {"result": "not run", "error": "MissingError: not installed: x"}


def test_an_unknown_word_lists_the_checks() -> None:
    with pytest.raises(SystemExit, match=r"no check matches nonsense; have: .*loads_pruned"):
        clients.main(["--only", "nonsense"])
