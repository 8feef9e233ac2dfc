"""The scripts: each parses its arguments, works through the library, and returns a status."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from conftest import SIZES

import bertlite
from bertlite import BertConfig, BertModel
from bertlite.support.environment import git_state
from scripts.make import speed_history
from scripts.measure import batches, checkpointing, gpu_checks, gpu_embed, gpu_parity
from scripts.measure.speed import __main__ as speed
from scripts.stress import hf_suites, release

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("scripts", "tests", "bertlite", "notebooks", ".github", ".ci")
SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "scripts").glob("*/*.py"))
    if path.name not in ("hostile.py", "wheel_hook.py")  # parts of tests or of builds
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
    assert {*steps} == {*gpu_checks.STEPS}
    for python, flag, module, *words in (command for runs in steps.values() for command in runs):
        assert (python, flag) == (sys.executable, "-m")
        assert find_spec(module) is not None
        for script in (checkpointing, gpu_embed, gpu_parity, speed):
            if module == script.__name__.removesuffix(".__main__"):
                with pytest.raises(SystemExit) as ended:
                    script.main([*words, "--help"])
                assert not ended.value.code
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
    marked = {Path(words[-1]).stem for words in steps["tests"]}
    assert marked == {"test_parity", "test_gpu", "test_gpu_fuzz", "test_triton_kernels", "test_fused"}


def test_a_gpu_check_that_fails_is_printed_and_kept(tmp_path, capsys):
    assert gpu_checks.run("parity", [sys.executable, "-c", "print('fine')"], tmp_path) == 0
    assert gpu_checks.run("parity", [sys.executable, "-c", "print('oh'); raise SystemExit(3)"], tmp_path) == 3
    assert (tmp_path / "parity.txt").read_text() == "fine\noh\n"
    assert "parity: exit 3 after" in capsys.readouterr().out
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="sees no CUDA device"):
            gpu_checks.main(["c", "--out", str(tmp_path)])


def test_a_gpu_check_ends_in_time_with_what_it_started(tmp_path):
    """And what it printed until then is kept; workers of tests and compilers hold its output open."""
    code = "import subprocess as s, time; print('begun'); s.Popen(['sleep', '60']); time.sleep(60)"
    start = time.monotonic()
    status = gpu_checks.run("speed", [sys.executable, "-c", code], tmp_path, until=start + 3)
    assert (status, (tmp_path / "speed.txt").read_text()) == (-signal.SIGKILL, "begun\n")
    assert time.monotonic() - start < 30


def test_a_case_that_ends_the_process_costs_that_case_alone(tmp_path, monkeypatch):
    """Parity goes on behind it, and its record has the case as one that differs."""
    pytest.importorskip("transformers.models.bert.modeling_bert")  # here once, or in each fork for 4 seconds
    model = BertModel(BertConfig(**SIZES))
    model.save_pretrained(tmp_path / "model")
    words = [str(tmp_path / "model"), "--device", "cpu", "--only", "padded-float64-chunked", "--shapes", ""]
    words += ["--journal", str(tmp_path / gpu_checks.JOURNAL), "--out", str(tmp_path / "parity.json")]
    check, runs = sys.modules["bertlite.parity.check"], []
    plain = check.compare_sides

    def ends(case, *args):
        if case.name == "BertModel-sdpa-padded-float64-chunked":
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(case, *args)

    def run(step, words, out, until):  # in a fork, which has imported everything
        def main():
            torch.set_num_threads(1)  # OpenMP's other threads are not in a fork, which would wait for them
            sys.exit(gpu_parity.main(words))

        child = get_context("fork").Process(target=main)
        child.start(), child.join()
        runs.append(child.exitcode)
        return child.exitcode

    monkeypatch.setattr(check, "compare_sides", ends)
    monkeypatch.setattr(gpu_checks, "run", run)
    assert not gpu_checks.run_to_end("parity", words, tmp_path)
    assert runs == [-signal.SIGKILL, -signal.SIGKILL, 1]
    (found,) = json.loads((tmp_path / "parity.json").read_text())["checkpoints"].values()
    ended = [case for case in found["cases"] if "process ended" in str(case.get("worst"))]
    assert {case["name"] for case in ended} == {"BertModel-sdpa-padded-float64-chunked"}
    assert sum(claim["failed"] for claim in found["claims"]) == len(ended) == 2  # each case runs once more at the end
    assert all(case["ok"] for case in found["cases"] if case not in ended)
    assert len({case["name"] for case in found["cases"]}) * 2 == len(found["cases"])


@pytest.mark.parametrize(("step", "stays"), [("speed", False), ("speed-large", True)])
def test_the_second_step_of_speed_adds_to_the_record_of_the_first(step, stays, tmp_path, monkeypatch):
    (tmp_path / gpu_checks.RECORD).write_text("{}")
    monkeypatch.setenv("BERTLITE_COMMIT", "")  # which --commit sets
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_checks, "run_to_end", lambda *of: (tmp_path / gpu_checks.RECORD).exists() == stays)
    monkeypatch.setattr("scripts.measure.gpu_goals.write_verdicts", lambda *of: None)
    assert gpu_checks.main(["c", "--out", str(tmp_path), "--steps", step, "--commit", "abc"]) == 0


def test_an_archive_names_its_commit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bertlite.support.environment.ROOT", tmp_path)
    with pytest.raises(SystemExit):
        gpu_checks.parse(["c", "--out", str(tmp_path)])
    assert "name it by --commit" in capsys.readouterr().err
    monkeypatch.setenv("BERTLITE_COMMIT", "")
    gpu_checks.parse(["c", "--out", str(tmp_path), "--commit", "abc"])
    assert git_state() == {"commit": "abc", "dirty": False}


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
        names = ("every layer", "every 2nd layer", "plain")
        peaks = [rows[f"bertlite packed, {name}"]["peak_bytes"] for name in names]
        assert 0 < peaks[0] < peaks[1] < peaks[2]
        assert rows["transformers, every layer"]["peak_bytes"] < rows["transformers, plain"]["peak_bytes"]
        assert all(row["low"] <= row["median"] <= row["high"] for row in rows.values())
        assert record[kind]["ratios"]["bertlite packed, plain / transformers, plain"]["median"] > 0
    assert "bertlite sdpa, every layer, offloaded" in capsys.readouterr().out


def test_the_tests_of_a_release_exist():
    assert all((ROOT / "tests" / name).exists() for name in release.TESTS)
    for page, (extra, tests) in release.PAGES.items():
        assert f"pip install '.[{extra}]'" in (ROOT / page).read_text(encoding="utf-8"), page
        assert all((ROOT / "tests" / name).exists() for name in tests)
    assert release.lowest(["torch>=2.6", "bertlite[embed] >= 0.4.4, <6", "tqdm"]) == ["torch==2.6", "bertlite==0.4.4"]


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
        assert BertForMaskedLM.__module__.startswith("transformers."), "these are not stock classes"

    def test_of_ours(self):
        BertForMaskedLM(CONFIG).prune_heads({0: [1]})
        assert BertForMaskedLM.__module__.startswith("bertlite.")
"""


def test_vectors_that_change_with_their_batch_are_counted():
    texts = ["a", "b", "c"]
    changed = batches.compare(lambda given: torch.tensor([[len(given) * (text == "b")] for text in given]), texts)
    assert changed == {"differ": 1, "most": 2.0}
    assert batches.compare(lambda given: torch.ones(len(given), 2), texts) == {"differ": 0, "most": 0.0}


@pytest.mark.slow
def test_the_suites_of_transformers_run_with_bertlites_classes(tmp_path):
    version = pytest.importorskip("transformers").__version__
    suite = tmp_path / hf_suites.TESTS
    suite.parent.mkdir(parents=True)
    suite.write_text(SUITE)
    with tarfile.open(tmp_path / f"{version}.tar.xz", "w:xz") as archive:
        archive.add(suite, f"{version}/{hf_suites.TESTS}")

    env = {**os.environ, "BERTLITE_PEER_SUITES": str(tmp_path)}
    command = [sys.executable, "-m", hf_suites.__name__]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "1 failed, 2 passed" in ran.stdout
    assert "AssertionError: these are not stock classes" in ran.stdout


def test_without_the_suites_of_transformers_nothing_is_run_and_a_line_says_so(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setenv("BERTLITE_PEER_SUITES", str(tmp_path))
    assert hf_suites.main([]) == 0
    assert f"there is no {tmp_path}" in capsys.readouterr().out
    monkeypatch.setenv("BERTLITE_PEER_SUITES", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match="which is no folder"):
        hf_suites.main([])


def test_the_history_of_a_record_is_what_git_holds(tmp_path, monkeypatch):
    """Versions of one commit replace each other; the point is where it was measured, not where it was stored."""

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    for measured, median in (("a" * 40, 2.0), ("b" * 40, 3.0), ("b" * 40, 4.0)):
        ratios = {f"{speed_history.BASE} / bertlite native float32": {"median": median}, "other / x": {"median": 9}}
        sections = {"forward 1 x 16 2 threads": {"ratios": ratios}}
        content = {"environment": {"git": {"commit": measured}}, "sections": sections}
        (tmp_path / "r.json").write_text(json.dumps(content))
        git("add", "."), git("commit", "-qm", "x")
    monkeypatch.setattr(speed_history, "ROOT", tmp_path)
    found = list(speed_history.history("r.json"))
    key = ("forward 1 x 16", "bertlite native float32")
    assert [(point.commit, point.ratios) for point in found] == [("aaaaaaa", {key: 2.0}), ("bbbbbbb", {key: 4.0})]


def test_the_citation_names_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {bertlite.__version__}\n" in text


def test_the_continuous_jobs_are_the_parts_of_ci_run():
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    jobs = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    parts = re.search(r"^parts=\((.+)\)$", run, re.MULTILINE)[1].split()
    assert re.search(r"part: \[(.+)\]", jobs)[1].replace('"', "").split(", ") == parts
    assert set(re.findall(r"(?:if|\|\|) runs ([\w.]+)", run)) == {*parts}
    assert subprocess.run([ROOT / ".ci" / "run", "nonsense"], capture_output=True, check=False).returncode == 2


SUITE_RUN = "python -m scripts.stress.hf_suites"
WITH = [[SUITE_RUN, f"test --with {version}"] for version in ("4.57.6", "5.0.0")]
BESIDE = [*WITH, ["python -m mypy"], ["parity"], [SUITE_RUN]]
TOOLS = ("chromium", "aarch64-linux-gnu-g++", "qemu-aarch64", "clang++", "g++")


@pytest.mark.parametrize("broken", ["", *sorted({each for steps in BESIDE for each in steps})])
def test_parts_run_side_by_side_and_the_tests_only_if_all_of_them_pass(broken, tmp_path):
    stub = f'#!/usr/bin/env bash\necho "ran ${{0##*/}} $*"\n[[ -z "{broken}" || "${{0##*/}} $*" != "{broken}"* ]]\n'
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    scripts = (f"scripts/{name}" for name in ("bootstrap", "test", "parity"))
    pythons = (f".venv{version}/bin/python" for version in ("", "-4.57.6", "-5.0.0"))
    for name in (*scripts, *pythons, *(f"bin/{tool}" for tool in TOOLS)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(stub, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    for name in re.search(r"^older=\((.+)\)$", text, re.MULTILINE)[1].split():
        (tmp_path / name).mkdir(parents=True)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=env, capture_output=True, text=True, check=False)
    ran = [line for line in done.stdout.splitlines() if line.startswith("ran ") and "bootstrap" not in line]
    assert ran[2] == "ran python -m scripts.make.tables --stale"
    wanted = [each for steps in BESIDE for each in steps[: steps.index(broken) + 1 if broken in steps else None]]
    assert len(ran) >= len(wanted) + 3
    assert all(line.startswith(f"ran {each}") for line, each in zip(ran[3:], wanted, strict=False))
    assert (done.returncode == 0, "ran test " in ran) == (not broken, not broken)
