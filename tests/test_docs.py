"""The documentation: its code runs, it names everything that is public, and Sphinx builds it without a warning."""

import ast
import asyncio
import base64
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import blocks
import numpy as np
import pytest

from bertlite import BertForSequenceClassification
from bertlite.cli import parser
from bertlite.cli.parts import subcommands
from bertlite.runtime import contents, pooling, shapes, structs
from bertlite.shipping.pack import pack
from tests.clients.checks import common
from tests.shipping.worlds import save

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "notebooks" / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WITH_CODE = [page for page in PAGES if blocks.blocks(page)]
REFERENCE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page.parent.name == "api")
THEIRS = {  # transformers' own
    "bertlite.hf": {
        "BertConfig",
        "BertForPreTrainingOutput",
        "BertTokenizer",
        "BertTokenizerFast",
        "apply_chunking_to_forward",
    }
}


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    blocks.run(page, tmp_path)


def test_a_block_that_fails_fails_its_page(tmp_path: Path) -> None:
    assert {"quickstart.md", "pruning.md", "padding.md", "embed.md"} <= {page.name for page in WITH_CODE}
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: it is wrong -->\n```python\n1 / 0\n```\n\n```python\nx = checkpoint.name\n```\n")
    assert blocks.run(page, tmp_path)["x"] == "checkpoint"
    page.write_text("```python\nx = 1\n```\n\n```python\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError):
        blocks.run(page, tmp_path)


@pytest.mark.filterwarnings("ignore")  # of the libraries' own code
def test_the_server_of_the_page_answers_requests_that_come_at_once(tmp_path: Path) -> None:
    for name in ("fastapi", "transformers", "sentence_transformers"):
        pytest.importorskip(name)
    uvicorn = pytest.importorskip("uvicorn")
    minilm = common.minilm()
    save(tmp_path / "model", BertForSequenceClassification, num_labels=1)
    pack(minilm, tmp_path / "packed", texts=["so good"])
    pack(tmp_path / "model", tmp_path / "reranker", texts=["so good", "poor"])
    names: dict[str, Any] = {}
    with chdir(tmp_path):
        exec(compile(server_of_the_page(), "serving.md", "exec"), names)
    server = uvicorn.Server(uvicorn.Config(names["app"], port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    def ask(path: str, **given: Any) -> Any:
        body, kind = json.dumps(given).encode(), {"Content-Type": "application/json"}
        try:
            return json.load(urllib.request.urlopen(urllib.request.Request(url + path, body, kind), timeout=60))
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]

    half = "half \ud83d"
    requests: list[Any] = [
        ["so good", "poor"],
        [],
        half,
        "says anne",
        *([f"number {i}"] for i in range(9)),
        ["", half],
    ]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda texts: ask("/v1/embeddings", input=texts), requests))
    coded, cut = (ask("/v1/embeddings", input="so good", encoding_format="base64", dimensions=x) for x in (None, 7))
    texts = ["poor", "so good", "says anne"]
    ranked = ask("/rerank", query="good", texts=texts), ask("/v1/rerank", query="good", documents=texts, top_n=2)
    shown = ask("/rerank", query="good", texts=texts, return_text=True, model="reranker")
    shown += ask("/v1/rerank", query="good", documents=texts, return_documents=True)["results"]
    refused: dict[str, Any] = {  # by the word that the message must hold
        "dimensions": ask("/v1/embeddings", input="x", dimensions=385),
        "model": ask("/v1/embeddings", input="x", model="text-embedding-3-small"),
        "surrogates": ask("/v1/embeddings", input="x", user=half),
        "at most 2048": ask("/v1/embeddings", input=["x"] * 2049),
        "unicode string": ask("/v1/embeddings", input="x", **{half: half}),
        "raw_scores": ask("/rerank", query="x", texts=["y"], raw_scores=True),
        "texts or documents": ask("/rerank", query="x"),
        "query": ask("/rerank", query=half, texts=["y"]),
        "max_chunks": ask("/rerank", query="x", texts=["y"], max_chunks=3),
    }
    server.should_exit = True
    thread.join()
    encode = names["encoder"].encode
    for given, answer in zip(requests, answers, strict=True):
        if half in given:
            assert answer[0] == 422
            assert "surrogates" in answer[1]
        else:
            wanted = [encode(text).tolist() for text in ([given] if isinstance(given, str) else given)]
            assert [each["embedding"] for each in answer["data"]] == wanted
    decode = base64.b64decode
    assert decode(coded["data"][0]["embedding"]) == encode("so good").tobytes()
    first = encode("so good")[:7]
    assert decode(cut["data"][0]["embedding"]) == (first / np.linalg.norm(first)).tobytes()
    assert (coded["model"], coded["usage"]["total_tokens"]) == ("packed", 4)
    best = [(each["corpus_id"], each["score"]) for each in names["reranker"].rank("good", texts)]
    assert [(each["index"], each["score"]) for each in ranked[0]] == best
    assert [(each["index"], each["relevance_score"]) for each in ranked[1]["results"]] == best[:2]
    assert [each["text"] if "text" in each else each["document"]["text"] for each in shown] == [
        texts[i] for i, _ in best * 2
    ]
    assert max(len(message) for _, message in refused.values()) < 300
    assert [word for word, found in refused.items() if found[0] != 422 or word not in found[1]] == []


def server_of_the_page() -> str:
    (code,) = re.findall(r"serves it -->\n```python\n(.*?)```", (DOCS / "serving.md").read_text("utf-8"), re.DOTALL)
    return str(code)


@pytest.fixture
def together() -> Any:
    """The class of the page's server that computes requests together, which needs no web framework."""
    names: dict[str, Any] = {"asyncio": asyncio, "Any": Any}
    [found] = [each for each in ast.parse(server_of_the_page()).body if getattr(each, "name", "") == "Together"]
    exec(compile(ast.Module([found], []), "serving.md", "exec"), names)
    return names["Together"]


def call_of_the_page(rows: list[str]) -> list[str]:
    time.sleep(0.02)
    if "bad" in rows:
        raise ValueError("a bad row")
    return [row.upper() for row in rows]


@pytest.mark.parametrize("bad", range(4))
def test_a_bad_request_fails_alone(together: Any, bad: int) -> None:
    requests = [["one"], [], ["two", "three"], ["four"]]
    requests[bad] = [*requests[bad], "bad"]

    async def ask() -> list[Any]:
        call = together(call_of_the_page)
        return await asyncio.gather(*map(call, requests), call(["late"]), return_exceptions=True)

    *found, late = asyncio.run(ask())
    assert late == ["LATE"]
    assert str(found.pop(bad)) == "a bad row"
    del requests[bad]
    assert found == [[row.upper() for row in rows] for rows in requests]


@pytest.mark.parametrize("gone", range(4))
@pytest.mark.parametrize("after", [0.0, 0.01, 0.03])
def test_a_caller_that_goes_away_leaves_others_their_results(together: Any, gone: int, after: float) -> None:
    async def ask() -> list[Any]:
        call = together(call_of_the_page)
        tasks = [asyncio.create_task(call([f"text {i}"])) for i in range(4)]
        await asyncio.sleep(after)
        tasks[gone].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return [*found, *await call(["text 4"])]

    *found, last = asyncio.run(ask())
    assert last == "TEXT 4"
    assert [each for i, each in enumerate(found) if i != gone] == [[f"TEXT {i}"] for i in range(4) if i != gone]


def test_the_dockerfile_of_the_page_installs_the_imports_of_the_wheel_script() -> None:
    (stage,) = re.findall(r"```dockerfile\n(.*?)\n\n", (DOCS / "serving.md").read_text("utf-8"), re.DOTALL)
    installed = {*" ".join(re.findall(r"RUN pip install (.*)", stage)).split()}
    make = ROOT / "scripts" / "make"
    read = [*map(ast.parse, (path.read_text("utf-8") for path in (make / "wheel.py", make / "wheel_hook.py")))]
    read += [ast.parse(path.read_text("utf-8")) for path in (ROOT / "bertlite" / "runtime").glob("*.py")]
    nodes = [node for tree in read for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    needed = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "bertlite", "scripts"}
    assert needed <= installed, f"the build would end with ModuleNotFoundError: {needed - installed}"
    assert {"numpy", "tokenizers", "hatchling", "lief"} <= needed
    assert "build" in installed  # which the script runs as a module


@pytest.mark.parametrize(
    "module",
    [
        *("bertlite", "bertlite.runtime", "bertlite.causal", "bertlite.hf", "bertlite.parity"),
        *("bertlite.commands", "bertlite.inference", "bertlite.pruning"),
    ],
)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    if module == "bertlite.hf":
        pytest.importorskip("transformers")
    documented = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", REFERENCE, re.MULTILINE))
    if "bertlite.models.heads" in documented:  # the whole module: what it names in __all__
        documented |= {f"bertlite.{name}" for name in import_module("bertlite.models.heads").__all__}
    home = import_module(module)
    own = [name for name, x in vars(home).items() if name[0] != "_" and not isinstance(x, ModuleType)]
    names = {*getattr(home, "__all__", own)} - THEIRS.get(module, set())
    missing = [name for name in names if not {f"bertlite.{name}", f"{module}.{name}"} & documented]
    assert not missing, f"notebooks/docs/api lacks {sorted(missing)}"


def test_the_pages_of_the_packed_format_have_every_field_and_format() -> None:
    page = "".join((DOCS / f"packed_{name}.md").read_text(encoding="utf-8") for name in ("format", "weights"))
    fields: list[Any] = [contents.DESCRIPTION, contents.EMBEDDINGS, contents.CONFIG, shapes.FIELDS]
    fields += [contents.VECTORS, contents.VECTORS["pooling"], contents.SCORES, contents.TAGS]
    fields += [contents.TEXTS[0], contents.STEPS["dense"]]
    fields += [structs.PARTS, structs.MATRICES, structs.VECTORS, structs.TABLES.values(), [contents.LAYERS]]
    assert {name for each in fields for name in each if f"`{name}`" not in page} == set()
    values: list[Any] = [shapes.FLOATS, contents.STORED, contents.CALLS, contents.STEPS]
    values += [pooling.POOLINGS, pooling.SIMILARITIES]
    assert {name for each in values for name in each if f'"{name}"' not in page} == set()
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == [*map(str, contents.FORMATS)]


def test_every_notebook_and_every_command_has_its_line() -> None:
    listed = (DOCS / "notebooks.md").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert [name for name in names if f"[`{name}`](../{name})" not in listed] == []
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert [name for name in subcommands(parser()) if f"`bertlite {name}" not in page] == []


def test_every_link_has_a_text_and_every_page_of_the_reference_a_sentence() -> None:
    """GitHub shows neither a link without a text nor the names that Sphinx makes of a directive."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "[](" not in text, page
        if page.parent.name == "api":
            assert re.match(r"# .*\n\n\S.*`\w+`", text), page


def test_a_search_finds_the_words_that_people_type() -> None:
    found = "\n".join(page.read_text(encoding="utf-8") for page in PAGES).lower()
    words = ("quantization", "latency", "throughput", "modernbert", "cite", "reranker", "prompt guard", "gliner")
    words += ("hf_hub_offline", "no compiler", "container", "threads", "apple", "graviton", "windows", "colab")
    words += ("which class", "install", "head pruning")
    assert [word for word in words if word not in found] == []


def test_a_table_has_no_empty_cell_and_no_column_without_a_value() -> None:
    """An empty cell reads as a fault of the page; a dash says that there is no value."""
    for page in PAGES:
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
            lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
            assert all(all(line) for line in lines[2:]), f"{page.name}: {table}"
            assert all({*column} != {"–"} for column in zip(*lines[2:], strict=True)), f"{page.name}: {table}"


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_measured_times_stand_in_tables_of_records(page: Path) -> None:
    """In a sentence no script would write them anew."""
    apart = re.compile(r"<!-- ([a-z]+) -->.*?<!-- /\1 -->|```.*?```|`[^`\n]+`", re.DOTALL)
    text = apart.sub("", page.read_text("utf-8"))
    found = re.findall(r"\d[\d.]* (?:CPU )?(?:ms|milliseconds?|s|seconds?|minutes?|hours?)\b", text)
    assert [each for each in found if each != "10 seconds"] == []  # between two lines of a log


def test_pictures_can_be_read_in_a_column_of_text() -> None:
    """A column has some 700 pixels; a picture that is much wider than high has letters of a few of them there."""
    for page in PAGES:
        for link in re.findall(r"^!\[.*\]\((.*)\)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            header = (page.parent / link).read_bytes()[:24]
            width, height = (int.from_bytes(header[i : i + 4], "big") for i in (16, 20))
            assert width <= 1.5 * height, f"{link} is {width} x {height}"


def test_code_fits_into_its_column() -> None:
    """76 characters are what a page of 1280 pixels shows of a line."""
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        code = "\n".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        assert [line for line in code.splitlines() if len(line) > 76] == [], page


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    for library in ("sphinx", "myst_parser", "furo", "transformers"):
        pytest.importorskip(library)
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-b", "dummy", "-qW", "--keep-going", DOCS, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr


CONTRIBUTING = ROOT / ".github" / "CONTRIBUTING.md"


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / ".github").rglob("*.md")], ids=lambda page: page.name)
def test_the_files_that_a_page_names_and_links_to_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/])((?:bertlite|scripts|tests|notebooks|\.ci|\.github)/[\w./-]*\w)", text))
    assert len(named) > 30 or page != CONTRIBUTING
    assert {path for path in named if not (ROOT / path).exists()} == set()
    assert {link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not (page.parent / link).exists()} == set()


def test_the_worked_examples_of_contributing_run(tmp_path: Path) -> None:
    names = blocks.run(CONTRIBUTING, tmp_path)
    assert type(names["model"]).__name__ == "BertForRating"
