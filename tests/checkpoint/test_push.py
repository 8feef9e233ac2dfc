"""push_to_hub: what arrives at a hub, in one commit; a server in this process stands for it."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_same, make

from bertlite import BertModel, BertTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
PUSH = """
import sys
from bertlite import BertModel, BertTokenizer
model = BertModel.from_pretrained(sys.argv[1])
tokenizer = BertTokenizer.from_pretrained(sys.argv[1])
options = {"private": True, "token": "hf_secret", "commit_message": "a pruned BERT", "revision": "small"}
print(model.push_to_hub("org/name", **options).commit_url)
print(tokenizer.push_to_hub("org/name", token="hf_secret").commit_url)
try:
    model.push_to_hub("org/forbidden", token="hf_secret")
except Exception as error:
    print(type(error).__name__)
"""


class Hub(ThreadingHTTPServer):
    """A hub that remembers what it is asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[tuple[str, Any]] = []
        self.tokens: set[str | None] = set()


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        lines = [json.loads(line) for line in data.splitlines() if line.strip()]
        self.server.asked.append((self.path, lines))
        self.server.tokens.add(self.headers.get("Authorization"))
        url = f"http://127.0.0.1:{self.server.server_port}/org/name"
        if "forbidden" in json.dumps(lines) or "forbidden" in self.path:
            return self.answer({"error": "not yours"}, 403)
        if "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in lines[0]["files"]]
            return self.answer({"files": files})
        if "/commit/" in self.path:
            return self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{url}/commit/{'0' * 40}"})
        return self.answer({"url": url, "name": "org/name", "id": "1"})

    def answer(self, values: Any, status: int = 200) -> None:
        data = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def files_of(commit: list[Any]) -> dict[str, bytes]:
    return {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in commit if line["key"] == "file"
    }


def test_a_model_and_its_tokenizer_arrive_in_one_commit_each(hub: Hub, tmp_path: Path) -> None:
    model, folder = make(vocab_size=len(WORDS)), tmp_path / "model"
    model.prune_heads({1: [2]})
    model.save_pretrained(folder)
    BertTokenizer(WORDS).save_pretrained(folder)
    offline = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, "-c", PUSH, folder], env={**offline, **settings}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    url = f"http://127.0.0.1:{hub.server_port}/org/name/commit/{'0' * 40}"
    assert done.stdout.split() == [url, url, "HfHubHTTPError"]
    assert hub.tokens == {"Bearer hf_secret"}
    paths = [path for path, _ in hub.asked]
    created = next(lines[0] for path, lines in hub.asked if path.endswith("/repos/create"))
    assert created["name"] == "name"
    assert created["organization"] == "org"
    assert created.get("private") is True or created.get("visibility") == "private"
    assert any(path.endswith("/branch/small") for path in paths)
    commits = [(path, lines) for path, lines in hub.asked if "/commit/" in path]
    (where, first), (main, second) = commits
    assert where.endswith("/commit/small")
    assert main.endswith("/commit/main")
    summaries = [line["value"]["summary"] for lines in (first, second) for line in lines if line["key"] == "header"]
    assert summaries == ["a pruned BERT", "Upload tokenizer"]
    assert set(files_of(second)) == {"tokenizer.json", "tokenizer_config.json", "vocab.txt"}
    arrived = tmp_path / "arrived"
    arrived.mkdir()
    for name, data in {**files_of(first), **files_of(second)}.items():
        (arrived / name).write_bytes(data)
    again = BertModel.from_pretrained(arrived)
    assert again.config.pruned_heads == {1: (2,)}
    assert_same(again.state_dict(), model.state_dict(), atol=0)
    assert BertTokenizer.from_pretrained(arrived).get_vocab() == {word: i for i, word in enumerate(WORDS)}


def test_nothing_is_made_on_the_hub_for_a_model_that_cannot_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "HfApi", fail)
    with pytest.raises(ValueError, match="is on the meta device"):
        make().to("meta").push_to_hub("org/name")
    with pytest.raises(ValueError, match="max_shard_size is 0"):
        make().push_to_hub("org/name", max_shard_size=0)
