"""sentence-transformers."""

import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import torch

import bertlite
from tests.clients.checks import common
from tests.clients.checks.pipelines import names, worded
from tests.clients.checks.trainer import SETTINGS

CLIENT = "sentence-transformers"
NEEDS = ("sentence_transformers", "datasets", "accelerate")
TEXTS = [
    "The capital of France is Paris.",
    "Rome is the capital of Italy, and has been for a while; before it was Florence, and before that Turin.",
    "Simmer the soup slowly.",
    "",
]


def copied(folder: Path, pruned: bool = False) -> Path:
    """Return a folder of links to all-MiniLM-L6-v2's files; saving replaces a link, and writes through none."""
    path = Path(shutil.copytree(common.minilm(), folder / "minilm", copy_function=os.symlink))
    if pruned:
        bertlite.prune_heads(bertlite.BertModel.from_pretrained(path), common.SOME).save_pretrained(path)
    return path


def opened(side: common.Side, path: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    with side.loading():
        model = SentenceTransformer(str(path), device="cpu")
    side.owns(inner(model))
    return model


def inner(model: Any) -> Any:
    """Return the transformer of a SentenceTransformer or a CrossEncoder; version 6 renamed it."""
    if hasattr(model, "__getitem__"):
        model = model[0]
    return getattr(model, "auto_model", None) or model.model


@common.dense_and_pruned(CLIENT, "loads by path, encodes, saves and loads again", *NEEDS)
def encodes(side: common.Side, folder: Path, pruned: bool = False) -> common.Observed:
    model = opened(side, copied(folder, pruned))
    vectors = model.encode(TEXTS, convert_to_tensor=True)
    common.equal(
        vectors.norm(dim=1), torch.ones(len(TEXTS)), within=common.ROUNDING32, what="the vectors' lengths and 1"
    )
    if vectors[0] @ vectors[1] < vectors[0] @ vectors[2] + 0.1:
        raise AssertionError("two sentences about capitals are no closer than one of them and a recipe")
    model.save_pretrained(str(folder / "saved"))
    common.equal(
        opened(side, folder / "saved").encode(TEXTS, convert_to_tensor=True), vectors, what="vectors before and after"
    )
    return {"vectors": vectors}


@common.dense_and_pruned(CLIENT, "a training step with checkpointed layers", *NEEDS)
def trains_embeddings(side: common.Side, folder: Path, pruned: bool = False) -> common.Observed:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    moved = importlib.util.find_spec("sentence_transformers.sentence_transformer")  # in version 6
    losses = importlib.import_module(f"sentence_transformers.{'sentence_transformer.' if moved else ''}losses")

    path, found = copied(folder, pruned), []
    pairs = {"anchor": ["what is the capital of france", "how to cook soup"], "positive": ["paris", "simmer it"]}
    for times, options in ((1, {}), (2, {common.CHECKPOINTING: True})):
        model = opened(side, path)
        for module in inner(model).modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        before = model.encode(TEXTS, convert_to_tensor=True)
        common.seed()
        run = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(str(folder / "run"), **{**SETTINGS, **options}),
            train_dataset=Dataset.from_dict(pairs),
            loss=losses.MultipleNegativesRankingLoss(model),
        )
        with common.counted(inner(model)) as ran:
            run.train()
        layers = inner(model).config.num_hidden_layers
        if len(ran) != 2 * times * layers:  # anchors and positives
            raise AssertionError(f"{len(ran)} layers ran, of {layers}, with {options or 'no options'}")
        after = model.encode(TEXTS, convert_to_tensor=True)
        common.differ(after, before, "training")
        found.append(common.state(inner(model)))
    common.equal(found[0], found[1], what="checkpointed and plain training")
    return {"weights": found[0]}


@common.check(CLIENT, "CrossEncoder scores pairs", *NEEDS)
def cross_encoder(side: common.Side, folder: Path) -> common.Observed:
    from sentence_transformers import CrossEncoder

    path = worded(folder, "BertForSequenceClassification", **names("bad", "good", "neither"))
    with side.loading():
        model = CrossEncoder(str(path), device="cpu")
    side.owns(inner(model))
    scores = model.predict([("word5 word9", "word1"), ("word2 word3", "")], convert_to_tensor=True)
    common.differ(scores[0], scores[1], "another pair")
    return {"scores": scores}
