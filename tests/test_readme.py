"""README.md: its code runs, and its figures are those of the records."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import blocks
import pytest

from scripts.make import tables
from scripts.make.tables import proof, read, speed

ROOT = Path(__file__).resolve().parents[1]

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {page: page.read_text(encoding="utf-8") for page in tables.PAGES}
SECTIONS = [
    "Install",
    "Use",
    "What transformers 5 lost",
    "Proof",
    "Speed",
    "Pruning",
    "Commands",
    "Where things are",
    "Limits",
]


def test_the_readme_is_short_and_in_order() -> None:
    assert len(README.encode()) <= 12_000
    assert re.findall("^## (.*)$", README, re.MULTILINE) == SECTIONS
    (introduction,) = re.findall(r"^# bertlite\n\n(.*?)\n\n## ", README, re.DOTALL)
    assert len(re.findall(r"\.(?=\s|$)", introduction)) == 3, "three sentences: what it is, what it keeps, for whom"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_figures_are_those_of_the_records(page: Path) -> None:
    filled, outdated = tables.filled(PAGES[page])
    assert filled == PAGES[page], "run python -m scripts.make.tables"
    assert outdated == []


def test_every_table_is_on_one_page() -> None:
    """Those of a GPU once there are records of one."""
    on_gpu = any((ROOT / "scripts" / "results").glob("*-cuda*.json"))
    wanted = sorted(name for name in tables.TABLES if on_gpu or not name.startswith("gpu"))
    assert sorted(re.findall(r"^<!-- ([a-z]+) -->$", "\n".join(PAGES.values()), re.MULTILINE)) == wanted


def test_a_figure_that_was_changed_by_hand_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged = tmp_path / "README.md"
    forged.write_text(README.replace("<!-- proofbrief -->\n", "<!-- proofbrief -->\n9.99\n"))
    assert tables.main(["--check", str(forged)]) == 1
    assert "README.md differs from the records" in capsys.readouterr().err


def test_no_ratio_is_printed_without_its_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table stays as it is while its record is too old, and the record is named."""
    record = json.loads((read.RESULTS / "startup.json").read_text())
    for section in record["sections"].values():
        section["ratios"] = dict.fromkeys(section["ratios"], 1.25)
    (tmp_path / "startup.json").write_text(json.dumps(record))
    monkeypatch.setattr(read, "RESULTS", tmp_path)
    page = "<!-- startup -->\nas it was\n<!-- /startup -->\n"
    same, outdated = tables.filled(page)
    assert same == page
    assert outdated == ["startup: bertlite / torch has no spread; make the record again"]
    for section in record["sections"].values():
        section["ratios"] = {pair: {"low": 1.2, "median": 1.25, "high": 1.5} for pair in section["ratios"]}
    (tmp_path / "startup.json").write_text(json.dumps(record))
    new, outdated = tables.filled(page)
    assert "bertlite / torch = 1.25 (1.20–1.50)" in new
    assert outdated == []
    (tmp_path / "README.md").write_text(page)
    assert tables.main([str(tmp_path / "README.md")]) == 0
    assert (tmp_path / "README.md").read_text() == new


@pytest.mark.parametrize("part", [{"choice": "quick"}, {"only": ["float64"]}], ids=["quick", "only"])
@pytest.mark.parametrize("name", ["parity", "proofbrief"])
def test_a_proof_of_some_cases_is_not_shown_as_the_whole(
    part: dict[str, object], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads((read.RESULTS / "parity-5.23.0.json").read_text())
    path = tmp_path / "parity-5.23.0.json"
    monkeypatch.setattr(read, "RESULTS", tmp_path)
    page = f"<!-- {name} -->\nas it was\n<!-- /{name} -->\n"
    path.write_text(json.dumps({**record, "choice": "all", "only": []}))
    assert tables.filled(page)[1] == []
    path.write_text(json.dumps({**record, **part}))
    same, (message,) = tables.filled(page)
    assert same == page
    assert "is of some cases, not of `bertlite parity --all`" in message


def test_the_code_runs_from_top_to_bottom(tmp_path: Path) -> None:
    names = blocks.run(ROOT / "README.md", tmp_path)
    pruned = names["smaller"].config.pruned_heads
    assert {layer: tuple(heads) for layer, heads in pruned.items()} == {0: (1, 5), 3: tuple(range(12))}


def test_the_first_lines_are_ten_at_most_and_those_of_the_documentation() -> None:
    first = blocks.blocks(ROOT / "README.md")[0]
    assert len([line for line in first.splitlines() if line]) <= 10
    assert blocks.blocks(ROOT / "notebooks" / "docs" / "index.md") == [first]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_the_first_lines_run_as_they_stand_in_a_terminal(tmp_path: Path) -> None:
    """Typed into an interactive Python, with bert-base-uncased in the hub's cache and no network."""
    cache = blocks.hub_cache(blocks.given(tmp_path)["checkpoint"], tmp_path)
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    ours, theirs = pty.openpty()
    lines = blocks.blocks(ROOT / "README.md")[0] + "exit()\n"
    python = subprocess.Popen(
        [sys.executable, "-q", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment
    )
    os.close(theirs)
    os.write(ours, lines.encode())
    shown = b""
    with contextlib.suppress(OSError):  # a terminal whose program has ended
        while found := os.read(ours, 4096):
            shown += found
    os.close(ours)
    assert python.wait() == 0
    text = shown.decode().replace("\r\n", "\n")
    assert "Error" not in text
    assert "\ntorch.Size([2, " in text
    assert "\n{0: (1, 5), 3: (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)}\n" in text
    assert (tmp_path / "pruned" / "config.json").exists()


def test_the_files_it_names_and_links_to_exist() -> None:
    for path in re.findall(r"(?:scripts|tests|bertlite|notebooks)/[\w./-]*\w", README):
        assert (ROOT / path).exists(), f"README.md names {path}"
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), f"README.md links to {path}"


def test_the_table_of_parity_names_torch_where_there_are_records_of_several(tmp_path, monkeypatch):
    record = json.loads((read.RESULTS / "parity-5.23.0.json").read_text())
    monkeypatch.setattr(read, "RESULTS", tmp_path)
    (tmp_path / "parity-5.23.0.json").write_text(json.dumps(record))
    page = "<!-- parity -->\n<!-- /parity -->\n"
    said, _ = tables.filled(page)
    assert said.count("torch") == 1
    assert said.count("\n|") < 12, "a short table, and the record has the rest"
    record["environment"]["versions"]["torch"] = "99.1.0+cu999"
    (tmp_path / "parity-5.23.0-torch-99.1.0.json").write_text(json.dumps(record))
    both, _ = tables.filled(page)
    assert "| transformers 5.23.0, torch 2.13.0 | transformers 5.23.0, torch 99.1.0 |" in both
    assert "torch" not in both.splitlines()[-3]


def test_a_claim_shows_its_worst_tensor_and_what_fails():
    claim = {"tensors": 3, "failed": 0, "max_error": 0.5, "max_ratio": None}
    assert proof.worst([claim, {**claim, "tensors": 1000, "max_error": 2e-11}]) == "1,003: 5.0e-01"
    assert proof.worst([{**claim, "max_ratio": 2.004, "failed": 1}]) == "3: ratio 2.00, 1 fail"
    assert proof.worst([{**claim, "max_error": 0}]) == "3: 0"


def test_a_client_that_was_not_run_has_no_row():
    rows = [line for line in proof.clients().splitlines() if line.startswith("|")]
    assert not [row for row in rows if row.count("not run") == 3]


def test_the_table_of_engines_that_are_limited_names_the_limits_and_needs_no_record(tmp_path, monkeypatch):
    record = json.loads((read.RESULTS / "speed.json").read_text())
    monkeypatch.setattr(read, "RESULTS", tmp_path)
    assert tables.TABLES["avxtwo"]() == ""
    record["environment"]["limits"] = {"BERTLITE_NATIVE": "avx2"}
    (tmp_path / "speed-avx2.json").write_text(json.dumps(record))
    assert ", BERTLITE_NATIVE=avx2, 2 threads" in tables.TABLES["avxtwo"]()


def test_the_tables_of_a_gpu_need_only_its_records(tmp_path, monkeypatch):
    """Made here of the CPU's, with what a GPU's have beside that."""
    found = {
        "parity-cuda": "parity-5.23.0",
        "speed-cuda": "speed",
        "checkpointing-cuda-base": "checkpointing",
        "checkpointing-cuda-large": "checkpointing",
    }
    spread = {"low": 0.4, "median": 0.5, "high": 0.625}
    for name, like in found.items():
        record = json.loads((read.RESULTS / f"{like}.json").read_text())
        record["environment"] |= {"gpu": "a GPU", "driver": "570.1"}
        for section in record.get("sections", {}).values():
            section["demands"] = {engine: {"kernels per layer": 7.5, "waits": 1} for engine in section["seconds"]}
            section["ratios"] = dict.fromkeys(section["ratios"], spread)
            section["of_limit"] = dict.fromkeys(section["seconds"], spread)
            section["peak_bytes"] = dict.fromkeys(section["seconds"], 3 * 2**30)
        for kind in ("full", "ragged"):
            if kind in record:
                record[kind]["ratios"] = {f"{each} / transformers, plain": spread for each in record[kind]["rows"]}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    monkeypatch.setattr(read, "RESULTS", tmp_path)
    names = [name for name in tables.TABLES if name.startswith("gpu")]
    said, outdated = tables.filled("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in names))
    assert outdated == []
    assert said.count("a GPU, driver 570.1") == 4
    assert re.search(
        r"^\| 1 x 16 \| bertlite (optimised|onednn|native) float32 \| 7\.5 \| 1 \| 3,072 \|$", said, re.MULTILINE
    )
    assert "| bertlite native float32 | 50% (40%–62%) |" in said
    assert "| bertlite native float32 | 0.50 (0.40–0.62) |" in said


def spread_around(median: float) -> dict[str, float]:
    return {"low": 0.9 * median, "median": median, "high": 1.1 * median}


def speed_record() -> dict[str, Any]:
    """Return a record with texts padded to their longest and to a fixed length, and a section of pruned models."""
    record: dict[str, Any] = json.loads((read.RESULTS / "speed.json").read_text())
    base, ours = "transformers sdpa float32", "bertlite native int8"
    ratios = {f"OpenVINO int8 / {ours}": spread_around(3.0), f"{base} / {ours}": spread_around(5.0)}
    section = {"seconds": dict.fromkeys([base, ours], spread_around(0.01)), "ratios": ratios}
    whole, half = (f"bertlite native {of} int8" for of in ("whole", "half of both"))
    pruned = {
        "seconds": {whole: spread_around(0.25), half: spread_around(0.125)},
        "ratios": {f"{whole} / {half}": spread_around(1.75)},
    }
    record["sections"] = {"pruned MiniLM 1 thread": {**pruned, "model": "MiniLM", "threads": 1}}
    for model in ("bert-base", "MiniLM"):
        for work, filled, padding in (
            ("32 x 128 SST-2", 0.18, "fixed"),
            ("32 x 49 SST-2", 0.48, "longest"),
            ("1 x 128", 1, "none"),
            ("8 x 128", 1, "none"),
        ):
            facts = {"model": model, "threads": 2, "work": work, "filled": filled, "padding": padding}
            record["sections"][f"forward {work} {model}"] = {**section, **facts}
    return record


def test_texts_padded_to_their_longest_stand_before_those_of_a_fixed_length(tmp_path, monkeypatch):
    record = speed_record()
    (tmp_path / "speed.json").write_text(json.dumps(record))
    monkeypatch.setattr(read, "RESULTS", tmp_path)
    said, outdated = tables.filled("<!-- speedbrief -->\n<!-- /speedbrief -->\n<!-- peers -->\n<!-- /peers -->\n")
    assert outdated == []
    lines = said.splitlines()
    assert "|  | 8 x 128 | 32 x 49 SST-2 (48%) | 32 x 128 SST-2 (18%), fixed |" in lines
    assert "| bertlite native int8 | 5.00 (4.50–5.50) | 5.00 (4.50–5.50) | 5.00 (4.50–5.50) |" in lines
    for note in ("The percentage is the share of positions that hold tokens", "the longest of their batch. Fixed:"):
        assert note in said
    for model in ("bert-base", "MiniLM"):
        assert [line.split(" | ")[2] for line in lines if line.startswith(f"| {model} | 2 |")] == [
            *("8 x 128", "32 x 49 SST-2 (48%)", "32 x 128 SST-2 (18%), fixed")
        ]
    assert "| MiniLM | 2 | 8 x 128 |  |  | 3.00 (2.70–3.30) |" in lines
    assert "| MiniLM | 1 | bertlite native int8 | 250.0 (225.0–275.0) ms |  |  | 1.75 (1.57–1.93) |" in lines


def test_a_record_without_padding_is_of_fixed_lengths():
    section = {"filled": 0.18}
    assert speed.heads_of({"32 x 128 SST-2": section, "8 x 128": {"filled": 1}}) == [
        *("32 x 128 SST-2 (18%), fixed", "8 x 128")
    ]


def test_the_table_of_embedding_has_a_row_for_every_engine(tmp_path, monkeypatch):
    record = json.loads((read.RESULTS / "embed.json").read_text())
    torch, openvino = "sentence-transformers torch float32", "sentence-transformers OpenVINO int8"
    ours, tokenizing = "bertlite native int8", "bertlite, texts to tokens alone"
    record["seconds"] = {name: spread_around(2.0) for name in (torch, openvino, ours, tokenizing)}
    record["errors"] = {torch: 1e-7, openvino: 7e-2, ours: 2e-2}
    record["ratios"] = {
        f"{torch} / {ours}": spread_around(4.0),
        f"{torch} / {openvino}": spread_around(3.0),
        f"{openvino} / {ours}": spread_around(1.25),
        f"{tokenizing} / {ours}": spread_around(0.05),
    }
    record["data"]["tokens"] = 1000
    (tmp_path / "embed.json").write_text(json.dumps(record))
    monkeypatch.setattr(read, "RESULTS", tmp_path)
    lines = tables.filled("<!-- embed -->\n<!-- /embed -->\n")[0].splitlines()
    assert f"|  | tokens per second | over {torch} | over its OpenVINO | error |" in lines
    assert "| bertlite native int8 | 500 (455–556) | 4.00 (3.60–4.40) | 1.25 (1.12–1.38) | 2e-02 |" in lines
    assert f"| {openvino} | 500 (455–556) | 3.00 (2.70–3.30) |  | 7e-02 |" in lines
    assert not any(line.startswith(f"| {tokenizing}") for line in lines)
    assert any("Tokenizing takes 5.0% (4.5%–5.5%)" in line for line in lines)
