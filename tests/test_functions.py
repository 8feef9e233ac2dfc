"""The functions behind the commands: they leave the caller's process as they found it."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from left_as_found import process_left_as_found
from natively import kernels_or_skip

pytest.importorskip("accelerate")
pytest.importorskip("pyarrow")
pytest.importorskip("sentence_transformers")

import accelerate

import bertlite
from bertlite import BertForSequenceClassification
from bertlite.embed import embed
from bertlite.experiments import experiment, finetune, speed
from bertlite.experiments.data import DataSource
from bertlite.experiments.settings import PruneSettings, Recipe
from bertlite.parity.command import ParitySettings, parity
from tests.shipping.worlds import LETTERS, add_pooling, save

SMALL = {"max_length": 12, "at": (2, 8)}


@dataclass(frozen=True)
class World:
    """Two checkpoints and files of texts, and a folder to write into."""

    encoder: Path
    classifier: Path
    rows: Path  # csv, with labels
    texts: Path  # plain
    out: Path


def some_texts(count: int) -> list[str]:
    draw = random.Random(3)
    return [" ".join(draw.choices(LETTERS, k=draw.randrange(3, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    home = tmp_path_factory.mktemp("world")
    encoder = add_pooling(save(home / "encoder"))
    classifier = save(home / "classifier", BertForSequenceClassification, num_labels=2)
    rows, texts = home / "rows.csv", home / "texts.txt"
    rows.write_text("text,label\n" + "".join(f"{text},{i % 2}\n" for i, text in enumerate(some_texts(40))))
    texts.write_text("\n".join(some_texts(60)))
    return World(encoder, classifier, rows, texts, home / "out")


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    return World(made.encoder, made.classifier, made.rows, made.texts, tmp_path / "out")


def train(w: World) -> Any:
    return bertlite.finetune(w.classifier, w.rows, w.rows, w.out, recipe=Recipe(epochs=1, batch_size=8))


def train_again_after_a_kill(w: World) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "print_epoch", kill)
        with pytest.raises(KeyboardInterrupt):
            train(w)
    train(w)


def prune_and_compare(w: World) -> None:
    data = DataSource(str(w.rows))
    setting = experiment.Setting(str(w.classifier), "classification", data, data, calibration=8)
    cells = experiment.grid(["michel"], [0.5], epochs=[1])
    bertlite.prune_run(experiment.Experiment(setting), cells, w.out)
    bertlite.prune_compare([w.out])


FUNCTIONS: dict[str, Callable[[World], Any]] = {
    "attention": lambda w: bertlite.attention(w.classifier, "a b", html=w.out),
    "convert": lambda w: bertlite.convert(w.classifier, w.out),
    "embed": lambda w: embed(w.encoder, w.texts, w.out),
    "env": lambda w: bertlite.env(),
    "evaluate": lambda w: bertlite.evaluate(w.classifier, w.rows, dtype="bfloat16"),
    "finetune": train,
    "finetune, continued": train_again_after_a_kill,
    "inspect": lambda w: bertlite.inspect(w.classifier),
    "measure_speed": lambda w: bertlite.measure_speed(w.encoder, some_texts(60), dtype="bfloat16"),
    "measure_speed, pipeline": lambda w: bertlite.measure_speed(w.classifier, some_texts(60), dtype="bfloat16"),
    "pack": lambda w: bertlite.pack(w.encoder, w.out),
    "pack, pipeline": lambda w: bertlite.pack(w.classifier, w.out),
    "parity": lambda w: parity(w.classifier, ParitySettings(only=("float64-sdpa-padded", "dropout"))),
    "parity, families": lambda w: parity(None, ParitySettings(families=True, only=("electra",))),
    "prune_run, prune_compare": prune_and_compare,
    "prune_to": lambda w: bertlite.prune_to(w.encoder, "60%", w.texts, w.out, settings=PruneSettings(**SMALL)),
    "prune_to, trained": lambda w: bertlite.prune_to(
        w.classifier, "60%", w.texts, w.out, settings=PruneSettings(**SMALL, distil="5steps")
    ),
    "prune_vocabulary_of": lambda w: bertlite.prune_vocabulary_of(w.classifier, w.texts, w.out),
}


@pytest.mark.filterwarnings("ignore")  # texts are few, and used twice
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_leave_the_process_as_they_found_it(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("TIMING", "JUDGING"):
        monkeypatch.setattr(speed, limit, 0.1)
    if "pack" in name or "speed" in name:
        kernels_or_skip()
    for draw in (random.seed, np.random.seed, torch.manual_seed):
        draw(5)
    with process_left_as_found():
        FUNCTIONS[name](world)


@pytest.mark.filterwarnings("ignore")
def test_training_neither_sees_nor_changes_an_accelerator_of_the_caller(world: World, tmp_path: Path) -> None:
    def digest(name: str) -> str:
        data = world.rows, world.rows
        record = bertlite.finetune(world.classifier, *data, tmp_path / name, recipe=Recipe(epochs=1))
        return str(record["runs"][0]["results"]["sha256"])

    wanted = digest("alone")
    try:
        accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        assert digest("with an Accelerator") == wanted
        assert accelerate.Accelerator(cpu=True).mixed_precision == "bf16"
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
