"""bertlite/shipping/vectors.py: a folder of sentence-transformers gives its own vectors, or is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import set_entries
from natively import native
from torch import nn
from worlds import read, save

from bertlite import BertModel, BertTokenizer, runtime
from bertlite.experiments.budget.quality import Quality
from bertlite.experiments.data import Examples
from bertlite.experiments.evaluate import TASKS, predict
from bertlite.opened.checkpoint import Checkpoint
from bertlite.pruning.importance.batches import real_tokens
from bertlite.shipping.pack import pack
from bertlite.shipping.vectors import read_head

library = pytest.importorskip("sentence_transformers")
modules = library.sentence_transformer.modules
pytestmark = native

D = 48
TEXTS = ["a", "b c d", "x y z a b c d e f g h i j k l m n", "q r", "t u v w", "g", "A [SEP] İB [MASK]"]
SENTENCES = "config_sentence_transformers.json"
Change = Callable[[Path], None]


def dense(outputs: int, act: nn.Module, inputs: int = D, **options: Any) -> Any:
    torch.manual_seed(4)
    return modules.Dense(inputs, outputs, activation_function=act, **options)


def change(name: str, **entries: Any) -> Change:
    """Return a function that changes entries of a JSON file of a folder."""
    return lambda folder: set_entries(folder / name, **entries)


def settings(**entries: Any) -> Change:
    return change("sentence_bert_config.json", **entries)


def module(at: int, **entries: Any) -> Change:
    """Return a function that changes a module in modules.json."""

    def apply(folder: Path) -> None:
        every = read(folder / "modules.json")
        every[at] |= entries
        (folder / "modules.json").write_text(json.dumps(every))

    return apply


def move_encoder(folder: Path) -> None:
    """Put the encoder and its tokenizer into a folder of their own, which may have any name."""
    (folder / "body").mkdir()
    for path in [*folder.glob("*.*")]:
        if path.is_file() and path.name not in ("modules.json", SENTENCES):
            path.rename(folder / "body" / path.name)
    module(0, path="body")(folder)


def halve(folder: Path) -> None:
    library.SentenceTransformer(str(folder), device="cpu").half().save(str(folder))


def lower(folder: Path) -> None:
    """Let the library alone lower-case texts, but for special tokens."""
    settings(do_lower_case=True)(folder)
    change("tokenizer_config.json", do_lower_case=False)(folder)


def same(folder: Path) -> None:
    """Change nothing."""


POOL, UNIT = modules.Pooling(D), modules.Normalize()
TOKENS, OTHER, VECTOR = "token_embeddings", "other", "sentence_embedding"
OF_OTHER = dense(D, nn.Tanh(), module_input_name=OTHER, module_output_name=VECTOR)
EQUAL: dict[str, tuple[list[Any], Change]] = {
    "truncated": ([POOL, UNIT], change(SENTENCES, truncate_dim=5)),
    "several": ([modules.Pooling(D, ("mean", "cls", "max")), dense(7, nn.GELU(), inputs=3 * D), UNIT], same),
    "no effect": ([POOL, modules.Normalize(TOKENS), dense(7, nn.Tanh(), module_output_name=OTHER)], same),
    "short name": ([POOL, dense(7, nn.GELU())], change("2_Dense/config.json", activation_function="torch.nn.GELU")),
    "older names": ([POOL], settings(tokenizer_args={"model_max_length": 6, "truncation_side": "left"})),
    "newer names": ([POOL], settings(processor_kwargs={"model_max_length": 6}, model_kwargs={"dtype": "float32"})),
    "stated twice": ([POOL], settings(config_kwargs={"hidden_act": "gelu"})),
    "beyond positions": ([POOL], settings(max_seq_length=400)),
    "own folder": ([POOL, dense(7, nn.SiLU())], move_encoder),
    "in the root": ([POOL, UNIT], module(2, path="")),
    "one name": ([POOL, UNIT, dense(7, nn.Tanh())], module(3, name="2")),
    "half": ([POOL, dense(7, nn.Tanh())], halve),
    "lower case": ([POOL], lower),
}
REFUSED: dict[str, tuple[list[Any], Change, str]] = {
    "before": ([dense(D, nn.Tanh(), module_input_name=TOKENS), POOL], same, r"Dense before its Pooling; vectors are"),
    "pooled twice": ([POOL, modules.Pooling(D, "cls")], same, r"Pooling; vectors are made by an encoder, its Pooling"),
    "of others": ([POOL, OF_OTHER], same, "this Dense makes sentence_embedding of other"),
    "kind": ([POOL], change(SENTENCES, model_type="SparseEncoder"), "is a SparseEncoder of modules, Transformer,"),
    "size": ([POOL], change(SENTENCES, truncate_dim="5"), "truncate_dim is '5' in config_sentence_transformers.json"),
    "config": ([POOL], settings(config_args={"hidden_act": "relu"}), "config_kwargs.hidden_act='relu', which only"),
    "tokenizer": ([POOL], settings(tokenizer_args={"do_lower_case": False}), "processor_kwargs.do_lower_case=False"),
    "call": ([POOL], settings(processing_kwargs={"text": {"padding": False}}), "processing_kwargs.text={'padding': F"),
    "output": ([POOL], settings(module_output_name=VECTOR), "module_output_name='sentence_embedding', which only"),
    "prompt": ([POOL], change(SENTENCES, default_prompt_name="ask"), "the default prompt 'ask', which is none of its"),
    "prompts": ([POOL], change(SENTENCES, prompts={"ask": 3}), "has the prompt 3; prompts must be strings"),
}
WITHOUT_KERNELS: dict[str, tuple[list[Any], Change, str]] = {
    "residual": ([POOL, dense(D, nn.Tanh(), use_residual=True)], same, r"a Dense with Tanh\(\) and a residual after"),
    "activation": ([POOL, dense(7, nn.ELU())], same, r"a Dense with ELU\(alpha=1.0\) after its pooling"),
    "norm": ([POOL, modules.LayerNorm(D)], same, "a LayerNorm after its pooling"),
    "version 0": ([POOL], module(0, type="sentence_transformers.models.BERT"), "is of sentence-transformers 0.x"),
}


def write(folder: Path, parts: list[Any], after: Change) -> Path:
    """Write an encoder with modules after it, then change the folder."""
    body = modules.Transformer(str(save(folder / "body", max_position_embeddings=41)))
    library.SentenceTransformer(modules=[body, *parts], device="cpu").save(str(folder / "whole"))
    after(folder / "whole")
    return folder / "whole"


@pytest.mark.parametrize("name", EQUAL)
def test_vectors_are_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    """In `evaluate` and the like, and in a packed folder."""
    folder = write(tmp_path, *EQUAL[name])
    wanted = library.SentenceTransformer(str(folder), device="cpu").float().encode(TEXTS)
    tokenizer = BertTokenizer.from_pretrained(folder)
    tokens = tokenizer.encode_texts(TEXTS, tokenizer.sentences.max_length, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = BertModel.from_pretrained(folder, dtype=torch.float32).eval()(**tokens).last_hidden_state
    np.testing.assert_allclose(read_head(Checkpoint(folder))(states, tokens["attention_mask"]), wanted, atol=2e-5)
    assert pack(folder, tmp_path / "packed", texts=TEXTS)["difference"] < 1e-5
    np.testing.assert_allclose(runtime.load(tmp_path / "packed").encode(TEXTS), wanted, atol=2e-5)


@pytest.mark.parametrize("name", [*REFUSED, *WITHOUT_KERNELS])
def test_a_folder_that_cannot_be_obeyed_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    parts, after, message = {**REFUSED, **WITHOUT_KERNELS}[name]
    folder = write(tmp_path, parts, after)
    with pytest.raises(ValueError, match=message):
        pack(folder, tmp_path / "packed", texts=TEXTS)
    assert not (tmp_path / "packed").exists()
    if name in REFUSED:
        task = TASKS["similarity"]
        with pytest.raises(ValueError, match=message):
            task.of_checkpoint(Checkpoint(folder)), task.read_tokenizer(Checkpoint(folder), None).encode_texts(TEXTS)
    assert len(BertTokenizer.from_pretrained(folder)) > 0, "a tokenizer alone is loaded"


def test_a_search_judges_by_the_vectors_of_the_folder(tmp_path: Path) -> None:
    """The best state of a training is that with the nearest vectors, of which a folder may keep two numbers."""
    folder = write(tmp_path, [modules.Pooling(D, "cls"), UNIT], change(SENTENCES, truncate_dim=2))
    head, dense = read_head(Checkpoint(folder)), BertModel.from_pretrained(folder).eval()
    other = BertModel.from_pretrained(folder).eval()
    torch.nn.init.normal_(other.encoder.layer[-1].output.dense.weight)
    batch = dict(BertTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt"))
    with torch.no_grad():
        mine, theirs = (head(model(**batch).last_hidden_state, real_tokens(batch)) for model in (other, dense))
    assert mine.shape == (len(TEXTS), 2)
    _, divergence, _ = Quality(dense, [batch], head)(other)
    assert divergence == pytest.approx(-float((mine - theirs).square().sum(1).mean()) / 2)


def test_similarities_of_a_task_are_computed_in_float64(tmp_path: Path) -> None:
    folder = write(tmp_path, [POOL], same)
    task = TASKS["similarity"].of_checkpoint(Checkpoint(folder))
    examples = Examples("pairs", tuple(zip(TEXTS, TEXTS, strict=True)), (1.0,) * len(TEXTS))
    data = task.encode(examples, task.read_tokenizer(Checkpoint(folder), None))
    found = predict(BertModel.from_pretrained(folder, dtype=torch.bfloat16), data, task)
    np.testing.assert_allclose(found, 1, atol=1e-7)
