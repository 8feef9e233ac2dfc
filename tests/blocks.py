"""The code in README.md and in the pages of notebooks/docs, run page by page from top to bottom.

A block that cannot run here says why in the line above it: <!-- not run: it needs Spark -->
"""

import re
import shutil
import string
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIZES, SPECIAL

from bertlite import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, BertTokenizer, prune_heads
from bertlite.shipping.folder import write_model

BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
HUB_IDS, COMMIT = ("google-bert/bert-base-uncased", "sentence-transformers/all-MiniLM-L6-v2"), "0" * 40
LIBRARIES = {  # what a block needs that may be missing
    "bertlite.hf": "transformers",
    "Embedder": "sentence_transformers",
    "EmbedSettings": "sentence_transformers",
    "from transformers": "transformers",
    "sentence_transformers": "sentence_transformers",
    "import datasets": "datasets",
    '"onnx")': "onnxscript",
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "from gliner": "gliner",
    "import MultiVectorEncoder": "sentence_transformers.multi_vector_encoder",
}


DENSE: dict[str, Any] = {  # folders that pages speak of
    "encoder": (BertModel, {}),
    "classifier": (BertForSequenceClassification, {}),
    "reranker": (BertForSequenceClassification, {"num_labels": 1}),
}


def blocks(page: Path) -> list[str]:
    """Return the blocks of a page that run."""
    return [hit["code"] for hit in BLOCK.finditer(page.read_text(encoding="utf-8")) if not hit["reason"]]


def run(page: Path, folder: Path) -> dict[str, Any]:
    """Run the blocks of a page, in order, in one namespace that has what the pages speak of; return the namespace."""
    names = given(folder)
    with hub(names["checkpoint"], folder), chdir(folder), pytest.MonkeyPatch.context() as patch:
        # Only models that the page names are written: most pages need none.
        text = page.read_text(encoding="utf-8")
        for name, (cls, changes) in DENSE.items():
            if f'"{name}"' in text:
                write_model(name, cls.from_pretrained("checkpoint", **changes), "checkpoint")
        for name, write in {"guard": write_guard, "gliner": write_gliner, "colbert": write_colbert}.items():
            if f'"{name}"' in text:
                write(name)
        if '"fast"' in text:
            whole = BertForSequenceClassification.from_pretrained("checkpoint")
            write_model("fast", prune_heads(whole, {0: [1, 5], 3: range(12)}), "checkpoint")
            if find_spec("transformers"):  # where it puts code that is trusted
                patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))

        # One namespace, as a reader who goes on typing has it.
        for i, code in enumerate(blocks(page)):
            for words, library in LIBRARIES.items():
                if words in code:
                    pytest.importorskip(library)
            exec(compile(code, f"{page.name}, block {i}", "exec"), names)
    return names


def write_guard(folder: str) -> None:
    """Write a small DeBERTa that classifies, as transformers writes it."""
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES, "vocab_size": 100, "num_attention_heads": 4, "relative_attention": True, "position_buckets": 8}
    words = {"pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "share_att_key": True, "legacy": False}
    config = transformers.DebertaV2Config(**sizes, **words, max_relative_positions=-1, position_biased_input=False)
    transformers.DebertaV2ForSequenceClassification(config).save_pretrained(folder)
    BertTokenizer.from_pretrained("checkpoint").save_pretrained(folder)


def write_gliner(folder: str) -> None:
    """Write a small GLiNER, as the library writes it."""
    gliner = pytest.importorskip("gliner")
    config = gliner.GLiNERConfig(model_name="checkpoint", hidden_size=64, max_width=3, span_mode="markerV0")
    gliner.GLiNER.from_config(config).save_pretrained(folder)


def write_colbert(folder: str) -> None:
    """Write a small ColBERT whose queries are expanded with tokens that nothing attends to, if the library has one."""
    if find_spec("sentence_transformers") and find_spec("sentence_transformers.multi_vector_encoder"):
        from sentence_transformers import MultiVectorEncoder

        model: Any = MultiVectorEncoder("checkpoint", device="cpu")
        model[0].query_expansion = {"strategy": "fixed", "attend": False, "length": 32}
        model.save_pretrained(folder)


@contextmanager
def hub(checkpoint: Path, folder: Path) -> Iterator[None]:
    """Let huggingface_hub find HUB_IDS in a cache that has the checkpoint under these names."""
    from huggingface_hub import constants

    for name in HUB_IDS:
        repository = folder / "hub" / f"models--{name.replace('/', '--')}"
        shutil.copytree(checkpoint, repository / "snapshots" / COMMIT, dirs_exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(COMMIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        yield


def given(folder: Path) -> dict[str, Any]:
    sizes = {**SIZES, "num_attention_heads": 12, "num_hidden_layers": 4, "max_position_embeddings": 64}
    checkpoint = folder / "checkpoint"
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(checkpoint)

    # Single letters and their pieces: any English text has tokens.
    letters = [*string.ascii_lowercase, *".,"]
    words = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = BertTokenizer(words)
    tokenizer.save_pretrained(checkpoint)
    ids = torch.randint(1, len(words), (2, 11))

    return {
        "checkpoint": checkpoint,
        "folder": folder / "folder",
        "full": folder / "full",
        "tokenizer": tokenizer,
        "texts": [f"{letter}." for letter in letters],
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }
