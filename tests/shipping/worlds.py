"""Checkpoints as people have them: with a tokenizer whose file truncates and pads, a card, pooling."""

import json
import shutil
import string
from pathlib import Path
from typing import Any

from conftest import SPECIAL, make
from tokenizers import Tokenizer

from bertlite import BertModel, BertTokenizer

LETTERS = string.ascii_lowercase
WORDS = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
CARD = """---
license: apache-2.0
language: en
base_model: someone/dense
tags:
- theirs
---
# Theirs
"""
PRUNED = {"pruned_heads": {0: (1, 3), 2: (0, 1, 2, 3)}, "pruned_neurons": {1: tuple(range(37)), 2: (0, 5)}}


def save(folder: Path, cls: Any = BertModel, **changes: Any) -> Path:
    """Save a small model with its tokenizer, whose tokenizer.json truncates to 8 tokens and pads."""
    make(cls, type_vocab_size=2, **changes).float().save_pretrained(folder)
    BertTokenizer(WORDS, model_max_length=40).save_pretrained(folder)

    # As found on the hub: files that truncate and pad, which a copy must not do.
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "README.md").write_text(CARD)
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def add_pooling(folder: Path, first: str = "") -> Path:
    """Make a checkpoint one of sentence-transformers, with mean pooling and normalised vectors."""
    types = {first: "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(types.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name in ("1_Pooling", "2_Normalize"):
        (folder / name).mkdir()
    pooling = {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / first).mkdir(exist_ok=True)
    (folder / first / "sentence_bert_config.json").write_text('{"max_seq_length": 24, "do_lower_case": false}')
    (folder / "config_sentence_transformers.json").write_text('{"similarity_fn_name": "cosine"}')
    return folder


def make_cross_encoder(folder: Path) -> Path:
    """Add the files that sentence-transformers 6.2 writes beside a CrossEncoder's config and weights."""
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
    (folder / "sentence_bert_config.json").write_text('{"transformer_task": "sequence-classification"}')
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    return folder


def in_hub_cache(checkpoint: Path, cache: Path, repository: str) -> None:
    """Put a checkpoint into a cache of the hub under a repository's name."""
    commit, place = "0" * 40, cache / f"models--{repository.replace('/', '--')}"
    shutil.copytree(checkpoint, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
