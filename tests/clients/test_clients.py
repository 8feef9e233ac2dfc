"""Every check of every client, with bertlite's classes and with transformers' own."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bertlite.hf.compat import CACHE
from bertlite.support.environment import version_of
from scripts.measure import clients
from tests.clients.checks import common
from tests.clients.checks.adapters import CLS

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # clients ask under the old name
]
OPTIONAL = ("Opacus",)  # few need them, and CI installs none
SLOW = ("DDP", "FSDP2", "tensor parallel", "torch.compile", "torch.export")  # clients; and checks:
DEAR = ("fresh_process", "trains_embeddings", "smoothing", "resumes")

# What stock cannot do, and what it says.  Where it does a thing wrong in silence, it is the check that speaks.
UNLOADABLE = "RuntimeError: You set `ignore_mismatched_sizes` to `False`"  # a pruned checkpoint, in transformers 5
GRAPH = "Unsupported: "  # a graph break
STACK = "RuntimeError: stack expects each tensor to be equal size"  # one gradient of the positions for all examples
EACH = {name: STACK for name in common.CHECKS if common.CHECKS[name].client == "Opacus"}
EACH["mapped_gradients"] = "RuntimeError: vmap: It looks like you're either"  # it looks at the mask's values
# post_init makes it; 4 needs init_weights alone
UNTIED = "AttributeError: .* has no attribute 'all_tied_weights_keys'"
WEIGHED = "AssertionError: loss is .* for the same 8 rows in one"  # accumulated batches: 5 adds means, 4 averages
STOCK_FAILS = {
    5: {
        **EACH,
        **{
            name: UNLOADABLE
            for name in common.CHECKS
            if name.endswith("-pruned") or name in ("loads_pruned", "fresh_process")
        },
        **{name: WEIGHED for name in common.CHECKS if name.startswith(("accumulation", "trainer_ddp"))},
        "whole_graph-output_attentions": GRAPH,
        "whole_graph-output_hidden_states": GRAPH,
        "trained_graph": GRAPH,
        "loads_relative": "AssertionError: the model and bertlite's core differ by",
        "attentions": "AssertionError: 0 attentions of 3 layers",
        "head_mask": "AssertionError: head_mask changed nothing",
        "prune_heads": "AttributeError: .* has no attribute 'prune_heads'",
        "mask_3d": "RuntimeError: expand",
        **dict.fromkeys(("colbert", "simcse"), UNTIED),
        "bottlenecks": "AttributeError: 'tuple' object has no attribute 'shape'",  # layers return no tuples
        **({"prefixes": "ValueError: Model does not support past key values"} if CACHE == "cache" else {}),  # PEFT
    },
    4: {
        **EACH,
        "accumulation-BertForTokenClassification": WEIGHED,
        "accumulation-BertForMaskedLM": WEIGHED,
        "trainer_ddp-BertForMaskedLM": WEIGHED,
        "lora_checkpointed": "AssertionError: checkpointed and plain training differ by",
        "whole_graph-output_attentions": GRAPH,
        "tensor_parallel": "RuntimeError: shape",
        "tensor_parallel-pruned": "RuntimeError: shape",
    },
}[5 if common.V5 else 4]
WITHIN = {  # elsewhere what the two saw is equal bit for bit
    "ddp": 1e-12,  # float64
    "fsdp": 1e-12,
    "tensor_parallel": 1e-12,
}
if not common.V5:  # its attention divides where 5 multiplies: float32 and float64 round differently
    WITHIN["attentions"] = common.ROUNDING32
    WITHIN |= dict.fromkeys(("head_mask", "loads_relative", "simcse", "bottlenecks"), common.ROUNDING)
    WITHIN |= dict.fromkeys(("trains_embeddings", "trains_embeddings-pruned"), 5e-3)  # Adam makes rounding a step


def marked(names: Iterable[str]) -> list[Any]:
    marks = {"optional": OPTIONAL, "slow": SLOW + DEAR}
    return [
        pytest.param(
            name,
            marks=[
                getattr(pytest.mark, mark) for mark in marks if {name, common.CHECKS[name].client} & {*marks[mark]}
            ],
        )
        for name in names
    ]


def seen(name: str, folder: Path, side: common.Side = common.OURS) -> Any:
    """Run a check and return what it observed; skip, with the reason, where what it needs is not installed."""
    try:
        return common.CHECKS[name].run(side, folder / side.name)
    except common.MissingError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", marked(name for name in common.CHECKS if name not in STOCK_FAILS))
def test_what_a_client_gets_is_what_stock_gives(name: str, tmp_path: Path) -> None:
    ours, stocks = seen(name, tmp_path), seen(name, tmp_path, common.STOCK)
    common.equal(ours, stocks, WITHIN.get(name, 0.0), f"bertlite.hf and transformers in {name}")


@pytest.mark.parametrize("name", marked(STOCK_FAILS))
def test_what_stock_cannot_do_works_and_it_fails_as_the_table_says(name: str, tmp_path: Path) -> None:
    assert seen(name, tmp_path)
    with pytest.raises(Exception) as failure:  # noqa: PT011  # the table has the type and the text
        common.CHECKS[name].run(common.STOCK, tmp_path / common.STOCK.name)
    assert re.match(STOCK_FAILS[name], common.first_line(failure.value)), common.first_line(failure.value)


def test_pruning_refuses_an_adapted_projection_by_name(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        common.OURS.load(CLS, common.tiny(tmp_path, CLS)), peft.LoraConfig(task_type="SEQ_CLS", r=3)
    )
    with pytest.raises(TypeError, match=r"encoder\.layer\.1\.attention\.self\.query is a peft\..*merge adapters"):
        model.base_model.model.prune_heads({1: [2]})
    merged = model.merge_and_unload()
    merged.prune_heads({1: [2]})
    assert merged.bert.encoder.layer[1].attention.self.num_attention_heads == 3


# scripts/measure/clients.py, which runs every check with both libraries and writes what came of it


def test_the_record_says_what_came_of_each_run_and_a_failure_of_ours_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(side: Any, folder: Path) -> Any:
        raise ValueError(f"nothing in {folder}")

    def absent(side: Any, folder: Path) -> Any:
        raise common.MissingError("not installed: x")

    out = tmp_path / "out.json"
    assert clients.main(["--only", "loads_pruned", "--out", str(out)]) == 0
    monkeypatch.setitem(common.CHECKS, "planted", common.Check("none", "it fails", "planted", fails, ()))
    monkeypatch.setitem(
        common.CHECKS, "planted-absent", common.Check("none", "it is absent", "planted-absent", absent, ())
    )
    assert clients.main(["--only", "encoder_decoder-1,planted", "--out", str(out)]) == 1
    record = json.loads(out.read_text())
    lines = {line["name"]: line for line in record["checks"]}
    assert set(lines) == {"encoder_decoder-1", "planted", "planted-absent"}
    passed, failed, missing = (lines[name] for name in ("encoder_decoder-1", "planted", "planted-absent"))
    assert (passed["difference"], passed["bertlite.hf"]["result"]) == (0, "passes")
    assert failed["bertlite.hf"] == {"result": "fails", "error": "ValueError: nothing in FOLDER/run"}
    assert missing["transformers"] == {"result": "not run", "error": "MissingError: not installed: x"}
    versions = record["environment"]["versions"]
    assert versions["torch"]
    assert [versions[name] for name in ("peft", "opacus")] == [*map(version_of, ("peft", "opacus"))]  # or None


def test_an_unknown_word_lists_the_checks() -> None:
    with pytest.raises(SystemExit, match=r"no check matches nonsense; have: .*loads_pruned"):
        clients.main(["--only", "nonsense"])
