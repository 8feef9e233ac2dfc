"""A hub that breaks off: what the cache holds under a name is the whole file or nothing, and asking again goes on.

A server in this process speaks the hub's protocol to a child that loads from it through huggingface_hub.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import make

LOAD = """
import time
time.sleep = lambda seconds: None  # huggingface_hub waits before it tries again, five times
from bertlite import BertModel
try:
    print(BertModel.from_pretrained("org/name").get_input_embeddings().weight.sum().item())
except ConnectionError as error:
    print("ConnectionError:", error)
"""
WEIGHTS = "model.safetensors"


class Hub(ThreadingHTTPServer):
    """The files of one folder as those of any repository; of the weights only so many bytes, while it is ill."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.most = folder, -1


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.head()

    def do_GET(self) -> None:
        path = self.head()
        if path is not None:
            whole, most = path.read_bytes(), self.server.most
            self.wfile.write(whole[self.start() :] if most < 0 or path.name != WEIGHTS else whole[self.start() : most])
            self.close_connection = True

    def start(self) -> int:
        """The byte that is asked for, after those that have come."""
        return int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])

    def head(self) -> Path | None:
        path = self.server.folder / self.path.rpartition("/")[2]
        if not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        self.send_response(206 if self.start() else 200)
        self.send_header("X-Repo-Commit", "0123456789abcdef" * 2 + "01234567")
        self.send_header("ETag", f'"{path.name}"')
        self.send_header("Content-Length", str(path.stat().st_size - self.start()))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        return path

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    make().save_pretrained(tmp_path / "there")
    server = Hub(tmp_path / "there")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def load(hub: Hub, cache: Path) -> str:
    """What a child says that loads org/name."""
    env = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(cache),
        "HF_HUB_CACHE": str(cache),
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=False, env=env)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def held(cache: Path) -> dict[str, int]:
    """The bytes of every file that a reader of the cache would find."""
    return {path.name: path.stat().st_size for path in cache.rglob("snapshots/*/*")}


def test_a_download_that_breaks_off_is_an_error_and_leaves_nothing_half(hub, tmp_path):
    cache, size = tmp_path / "cache", (tmp_path / "there" / WEIGHTS).stat().st_size
    hub.most = size // 3
    said = load(hub, cache)
    assert said.startswith(f"ConnectionError: org/name: {WEIGHTS} was not completely received from the hub (")
    assert said.endswith("): try again")
    assert held(cache) == {"config.json": (tmp_path / "there/config.json").stat().st_size}
    hub.most = -1
    assert float(load(hub, cache)) == make().get_input_embeddings().weight.sum().item()
    assert held(cache)[WEIGHTS] == size
