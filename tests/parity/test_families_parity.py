"""The sections of the other families: transformers' own class of each beside ours, and the faults they must find."""

import json
import shutil
import string
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from bertlite import BertTokenizer
from bertlite.checkpoint.families import FAMILIES
from bertlite.cli import main
from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity import Case, check
from bertlite.parity.command import claims_table
from bertlite.parity.families import FAMILY_HEADS, KINDS, cases_of, save_random
from bertlite.parity.inputs import encoded_sentences
from bertlite.parity.reference import unsupported


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives the folder of a family's small model."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_random(tmp_path_factory.mktemp("family"), kind, "small")
        return made[kind]

    return make


CASES = [
    pytest.param(case, marks=[] if case in cases_of(kind, quick=True) else pytest.mark.slow, id=case.name)
    for kind in KINDS
    for case in dict.fromkeys((*cases_of(kind, quick=True), *cases_of(kind)))
]


@pytest.mark.parametrize("case", CASES)
def test_a_small_model_of_a_family_is_transformers_model(case, folders):
    if reason := unsupported(case):
        pytest.skip(reason)
    report = check(case, "cpu", folders(case.family))
    assert report.ok, f"\n{report}"
    assert report.backend.partition(",")[0] in (case.backend, "none", "eager"), report.backend


def test_every_family_has_cases_with_every_backend_and_padding():
    assert {kind.partition("/")[0] for kind in KINDS} == FAMILIES.keys() - {"bert", "new"}
    assert {case.model for kind in KINDS for case in cases_of(kind, quick=True)} == {"BertModel", *FAMILY_HEADS}
    for kind in KINDS:
        for quick in (True, False):
            cases = cases_of(kind, quick)
            assert {case.backend for case in cases} == {"eager", "sdpa", "packed", "native"}
            assert {case.batch for case in cases} == {"full", "padded", "left"}
            assert {case.dtype for case in cases} >= {"float64", "float32"}
            assert {case.feature for case in cases} >= {"", "gradients"}


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "mpnet", "deberta-v2"])
def test_a_fault_is_found_and_named_by_our_module(kind, folders):
    def tamper(model: Any) -> None:
        model.encoder.layer[1].attention.self.key.weight.data[3, 5] += 1e-6

    report = check(Case("BertModel", "eager", "left", "float64", family=kind), "cpu", folders(kind), tamper)
    assert report.failed
    assert report.first_module == "encoder.layer.1.attention.self.key"


@pytest.mark.parametrize("head", ["BertForQuestionAnswering", "BertForMultipleChoice"])
def test_a_classifier_with_other_labels_is_compared_with_other_heads(head, folders, tmp_path):
    transformers = pytest.importorskip("transformers")
    cls = transformers.DebertaV2ForSequenceClassification
    cls.from_pretrained(folders("deberta-v2"), num_labels=3).save_pretrained(tmp_path / "nli")
    report = check(Case(head, "sdpa", "padded", "float64", family="deberta-v2"), "cpu", tmp_path / "nli")
    assert report.ok, f"\n{report}"


def test_a_folder_of_a_family_is_compared_with_its_own_class(folders, tmp_path, capsys):
    folder, out = tmp_path / "mine", tmp_path / "record.json"
    shutil.copytree(folders("xlm-roberta"), folder)
    roles = {f"{name}_token": f"<{token}>" for name, token in (("cls", "s"), ("pad", "pad"), ("sep", "/s"))}
    roles |= {f"{name}_token": f"<{name}>" for name in ("unk", "mask")}
    letters = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
    BertTokenizer([*roles.values(), *letters], **roles).save_pretrained(folder)
    config = Checkpoint(folder).config
    # of one segment, though a pair has two
    rows = encoded_sentences(Checkpoint(folder), config.vocab_size, config.type_vocab_size)
    assert len(rows) == 4
    assert {segment for _, segments in rows for segment in segments} == {0}
    assert main(["parity", str(folder), "--only", "BertModel", "--out", str(out)]) == 0
    (section,) = json.loads(out.read_text())["families"].values()
    assert section["model_type"] == "xlm-roberta"
    assert all(case["ok"] and case["name"].startswith("xlm-roberta-") for case in section["cases"])
    assert "equal: " in capsys.readouterr().out


def test_other_families_have_one_part_of_the_table_together():
    claim = {"dtype": "float64", "claim": "within 1e-12", "cases": 1, "tensors": 9, "failed": 0}
    small, large = {**claim, "max_error": 1e-15, "max_ratio": None}, {**claim, "max_error": 2e-14, "max_ratio": 1.5}
    found = {"checkpoints": {"mine": {"claims": [small]}}, "families": {"a": {"claims": [small]}}}
    words = [line.split()[0] for line in claims_table(found).splitlines()]
    assert words == ["dtype", "mine", "float64", "a", "float64"]
    found["families"]["b"] = {"claims": [{**large, "failed": 1}]}
    *_, heading, row = claims_table(found).splitlines()
    assert heading == "2 models of other families (random)"
    assert row.split()[-5:] == ["2", "18", "1", "2.00e-14", "1.500"]
