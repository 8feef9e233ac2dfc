"""The code in README.md and in the pages of notebooks/docs, run page by page from top to bottom.

A block that cannot run here says why in the line above it: <!-- not run: it needs Spark -->
"""

import re
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIZES

from bertlite import BertConfig, BertForMaskedLM, BertTokenizer

BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
LIBRARIES = {"bertlite.hf": "transformers", "import datasets": "datasets"}  # what a block needs that may be missing


def blocks(page: Path) -> list[str]:
    """Return the blocks of a page that run."""
    return [hit["code"] for hit in BLOCK.finditer(page.read_text(encoding="utf-8")) if not hit["reason"]]


def run(page: Path, folder: Path) -> dict[str, Any]:
    """Run the blocks of a page, in order, in one namespace that has what the pages speak of; return the namespace."""
    names = given(folder)
    for i, code in enumerate(blocks(page)):
        for words, library in LIBRARIES.items():
            if words in code:
                pytest.importorskip(library)
        exec(compile(code, f"{page.name}, block {i}", "exec"), names)
    return names


def given(folder: Path) -> dict[str, Any]:
    sizes = {**SIZES, "num_attention_heads": 12, "num_hidden_layers": 4, "max_position_embeddings": 64}
    checkpoint = folder / "checkpoint"
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(checkpoint)
    letters = [*string.ascii_lowercase, *".,"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = BertTokenizer(words)
    tokenizer.save_pretrained(checkpoint)
    ids = torch.randint(1, len(words), (2, 11))
    return {
        "checkpoint": checkpoint,
        "folder": folder / "folder",
        "full": folder / "full",
        "tokenizer": tokenizer,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }
