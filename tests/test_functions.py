"""The functions behind the commands: they leave the process and files as found, and refuse wrong values by name."""

import contextlib
import io
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make
from left_as_found import process_left_as_found
from natively import kernels_or_skip

pytest.importorskip("accelerate")
pytest.importorskip("pyarrow")
pytest.importorskip("sentence_transformers")

import accelerate

import bertlite
from bertlite import BertForSequenceClassification, commands
from bertlite.cli import main
from bertlite.commands import embed
from bertlite.experiments import experiment, finetune, speed
from bertlite.experiments.data import DataSource
from bertlite.experiments.settings import PruneSettings, Recipe
from bertlite.parity.command import ParitySettings, parity
from bertlite.shipping import export
from tests.shipping.worlds import LETTERS, add_pooling, in_hub_cache, save

SETTINGS = PruneSettings(max_length=12, at=(2, 8))


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
    return commands.finetune(w.classifier, w.rows, w.rows, w.out, recipe=Recipe(epochs=1, batch_size=8))


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
    commands.prune_run(experiment.Experiment(setting), cells, w.out)
    commands.prune_compare([w.out])


WRITES: dict[str, Callable[[World], Any]] = {  # functions that write what a world names as its output
    "attention, page": lambda w: commands.attention(w.classifier, "a b", html=w.out),
    "convert": lambda w: commands.convert(w.classifier, w.out),
    "embed": lambda w: embed(w.encoder, w.texts, w.out),
    "pack": lambda w: bertlite.pack(w.encoder, w.out, texts=w.texts),
    "prune_to": lambda w: bertlite.prune_to(w.encoder, "60%", w.texts, w.out, settings=SETTINGS),
    "prune_vocabulary": lambda w: commands.prune_vocabulary(w.classifier, w.texts, w.out),
}
FUNCTIONS: dict[str, Callable[[World], Any]] = {
    **WRITES,
    "env": lambda w: commands.env(),
    "evaluate": lambda w: bertlite.evaluate(w.classifier, w.rows, dtype="bfloat16"),
    "finetune": train,
    "finetune, continued": train_again_after_a_kill,
    "inspect": lambda w: commands.inspect(w.classifier),
    "measure_speed": lambda w: commands.measure_speed(w.encoder, some_texts(60), dtype="bfloat16"),
    "measure_speed, pipeline": lambda w: commands.measure_speed(w.classifier, some_texts(60), dtype="bfloat16"),
    "pack": lambda w: bertlite.pack(w.encoder, w.out),
    "pack, pipeline": lambda w: bertlite.pack(w.classifier, w.out),
    "parity": lambda w: parity(w.classifier, ParitySettings(only=("float64-sdpa-padded", "dropout"))),
    "parity, families": lambda w: parity(None, ParitySettings(families=True, only=("electra",))),
    "prune_run, prune_compare": prune_and_compare,
    "prune_to, trained": lambda w: bertlite.prune_to(
        w.classifier, "60%", w.texts, w.out, settings=replace(SETTINGS, distil="5steps")
    ),
}


@pytest.mark.filterwarnings("ignore")  # texts are few, and used twice
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_leave_the_process_as_they_found_it(name, world, monkeypatch):
    for limit in ("TIMING", "JUDGING"):
        monkeypatch.setattr(speed, limit, 0.1)
    if "pack" in name or "speed" in name:
        kernels_or_skip()
    for draw in (random.seed, np.random.seed, torch.manual_seed):
        draw(5)
    with process_left_as_found():
        FUNCTIONS[name](world)


@pytest.mark.filterwarnings("ignore")
def test_training_neither_sees_nor_changes_an_accelerator_of_the_caller(world, tmp_path):
    def digest(name: str) -> str:
        data = world.rows, world.rows
        record = commands.finetune(world.classifier, *data, tmp_path / name, recipe=Recipe(epochs=1))
        return str(record["runs"][0]["results"]["sha256"])

    wanted = digest("alone")
    try:
        accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        assert digest("with an Accelerator") == wanted
        assert accelerate.Accelerator(cpu=True).mixed_precision == "bf16"
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


# Outputs: no writer replaces or removes what it reads, or a model of another kind.

WRITERS: dict[str, Callable[[World], Any]] = {
    **WRITES,
    "export": lambda w: commands.export(w.classifier, w.out),
    "finetune": lambda w: commands.finetune(w.classifier, w.rows, w.rows, w.out, recipe=Recipe(epochs=1)),
    "inspect, record": lambda w: command("inspect", w.classifier, "--out", w.out),
    "evaluate, record": lambda w: command("evaluate", w.classifier, "--dev", w.rows, "--out", w.out),
    "save": lambda w: bertlite.optimize_for_inference(
        BertForSequenceClassification.from_pretrained(w.classifier), backend="native", dtype="float32"
    ).save(w.out),
}
PLACES: dict[str, Callable[[Path], Path]] = {  # outputs in a folder that has `model`, `other`, `packed` and texts
    "own": lambda home: home / "model",
    "own, up and down": lambda home: home / "other" / ".." / "model",
    "own, with a slash": lambda home: Path(f"{home / 'model'}/"),
    "own, relative": lambda home: Path("model"),
    "own, by a link": lambda home: home / "link",
    "own, as the working directory": lambda home: Path(),
    "copy by hard links": lambda home: home / "hard",
    "module of it": lambda home: home / "model" / "1_Pooling",
    "other checkpoint": lambda home: home / "other",
    "packed folder": lambda home: home / "packed",
    "around it": lambda home: home,
    "in the hub's cache": lambda home: home / "hub" / "models--me--model" / "snapshots" / ("0" * 40),
}
FILES: dict[str, Callable[[Path], Path]] = {
    "config": lambda home: home / "model" / "config.json",
    "config by a link": lambda home: home / "linked.json",
    "config by a hard link": lambda home: home / "hard" / "config.json",
    "config in the hub's cache": lambda home: next((home / "hub").rglob("config.json")),
}


def command(*words: str | Path) -> None:
    """Run a command; raise ValueError if it could not run."""
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        if main([str(word) for word in words]) == 2:
            raise ValueError(said.getvalue())


@pytest.fixture
def home(made: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with what people have: checkpoints, links, a packed folder, a cache of the hub, texts."""
    home = tmp_path / "home"
    shutil.copytree(made.classifier, home / "model")
    shutil.copytree(made.encoder, home / "other")
    shutil.copytree(home / "other" / "1_Pooling", home / "model" / "1_Pooling")
    shutil.copytree(home / "model", home / "hard", copy_function=os.link)
    in_hub_cache(home / "model", home / "hub", "me/model")
    (home / "link").symlink_to("model")
    (home / "linked.json").symlink_to("model/config.json")
    (home / "packed").mkdir()
    for name in ("native.safetensors", "runtime.json", "tokenizer.json"):
        (home / "packed" / name).write_text('{"what": "of a packed folder"}')
    for path in (made.rows, made.texts):
        shutil.copy(path, home)
    monkeypatch.chdir(home / "model")
    return home


def contents(home: Path) -> dict[str, bytes | str]:
    """Return the bytes of every file in a folder, and the target of every link."""
    paths = [path for path in home.rglob("*") if path.is_symlink() or path.is_file()]
    return {
        str(path.relative_to(home)): os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("writer", "place"), [(name, place) for name in WRITERS for place in (FILES if ", " in name else PLACES)]
)
def test_no_writer_replaces_what_it_reads_or_a_model_of_another_kind(writer, place, home, monkeypatch):
    monkeypatch.setattr(export, "PACKAGES", ())
    monkeypatch.setattr(export, "write_onnx", lambda graph, path: path.write_text("a graph"))  # which takes time
    monkeypatch.setattr(export, "graph_differences", lambda graph, path: [])
    if place == "own, relative":
        os.chdir(home)
    before = contents(home)
    out = {**PLACES, **FILES}[place](home)
    refused = ""
    try:
        WRITERS[writer](World(home / "model", home / "model", home / "rows.csv", home / "texts.txt", out))
    except (OSError, ValueError) as error:
        refused = str(error)
    after = contents(home)
    if (writer, place) == ("pack", "packed folder"):  # its own kind
        before = {name: x for name, x in before.items() if not name.startswith("packed/")}
    assert {name: after.get(name) for name in before} == before, "a file is gone, or another one is there"
    if refused:
        assert after == before
        assert re.search("name another|delete it", refused)
    elif writer not in ("embed", "export"):
        assert place == "around it" or writer == "pack", "only a folder without such files may be added to"


def test_a_record_replaces_records_alone(home):
    notes, record, empty = home / "notes.json", home / "record.json", home / "empty.json"
    notes.write_text('{"mine": 1}')
    empty.touch()
    for path in (record, record, empty):
        command("inspect", home / "model", "--out", path)
    assert record.read_bytes() == empty.read_bytes() != b""
    with pytest.raises(
        ValueError, match=r"notes\.json is no record or page of bertlite's: delete it, or name another"
    ):
        command("inspect", home / "model", "--out", notes)
    shutil.copy(record, home / "model")
    with pytest.raises(ValueError, match=r"record\.json would be replaced, and .*model is read: name another output"):
        command("inspect", home / "model", "--out", home / "model" / "record.json")
    page = home / "page.html"
    for _ in range(2):
        commands.attention(home / "model", "a b", html=page)
    page.write_text("<!doctype html><title>Mine</title>")
    with pytest.raises(ValueError, match="no record or page"):
        commands.attention(home / "model", "a b", html=page)


@pytest.mark.parametrize("status", ["running", "failed"])
@pytest.mark.parametrize("reads", ["model", "rows.csv"])
def test_an_unfinished_run_is_not_emptied_if_it_holds_what_is_read(status, reads, home):
    run = home / "run"
    run.mkdir()
    (run / "run.json").write_text(f'{{"status": "{status}"}}')
    shutil.move(home / reads, run)
    os.chdir(home)
    model, rows = ((run if reads == name else home) / name for name in ("model", "rows.csv"))
    before = contents(home)
    with pytest.raises(ValueError, match=f"{reads} would be replaced, and .*{reads} is read: name another output"):
        commands.finetune(model, rows, home / "texts.txt", run)
    assert contents(home) == before


def test_a_search_does_not_delete_its_texts_with_its_own_files(home):
    texts = home / ".out.unfinished" / "texts.txt"
    texts.parent.mkdir()
    shutil.move(home / "texts.txt", texts)
    with pytest.raises(ValueError, match=r"texts\.txt would be replaced, and .* is read: name another output"):
        bertlite.prune_to(home / "model", "60%", texts, home / "out", settings=SETTINGS)
    assert texts.exists()


def test_embeddings_remove_no_hidden_files_of_others(home):
    out = home / "out"
    out.mkdir()
    others = [out / name for name in (".mine.tmp", ".data.tmp.csv", ".part-00000.tmp", ".manifest.json.tmp")]
    left = [out / f"{name}.{'0' * 32}.tmp" for name in (".part-00000-of-00001.parquet", ".manifest.json")]
    for path in (*others, *left):
        path.write_text("x")
    assert embed(home / "other", home / "texts.txt", out)["complete"]
    assert [path.exists() for path in (*others, *left)] == [True] * 4 + [False] * 2


# Values of another kind: an error names the argument and what to give, before any work.

DOORS: dict[str, tuple[Callable[..., Any], str]] = {  # functions, and arguments of a fixed kind
    "attention": (commands.attention, "checkpoint text"),
    "convert": (commands.convert, "checkpoint folder"),
    "embed": (embed, "model files folder"),
    "evaluate": (bertlite.evaluate, "checkpoint data"),
    "export": (commands.export, "checkpoint folder"),
    "finetune": (commands.finetune, "checkpoint train dev folder"),
    "inspect": (commands.inspect, "checkpoint"),
    "load": (bertlite.runtime.load, "folder"),
    "from_pretrained": (BertForSequenceClassification.from_pretrained, "source"),
    "measure_speed": (commands.measure_speed, "checkpoint texts"),
    "pack": (bertlite.pack, "checkpoint folder"),
    "prune_to": (bertlite.prune_to, "checkpoint target texts folder"),
    "prune_vocabulary": (commands.prune_vocabulary, "checkpoint texts folder"),
    "save_pretrained": (lambda folder: make().save_pretrained(folder), "folder"),
    "tokenizer": (bertlite.BertTokenizer.from_pretrained, "source"),
}
MODEL = {("prune_to", "checkpoint"), ("prune_vocabulary", "checkpoint")}  # arguments that take a loaded model
WRONG: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "number": lambda: np.float64("nan"),
    "bytes": lambda: b"x",
    "rows": lambda: [{"text": "a", "label": 0}] * 40,
    "missing texts": lambda: [*some_texts(40), None],
    "frame": lambda: pytest.importorskip("pandas").DataFrame({"text": some_texts(40), "label": 0}),
    "model": make,
}


def fitting(w: World, names: str) -> dict[str, Any]:
    """Return arguments of the right kind."""
    paths = dict.fromkeys(("checkpoint", "source"), w.classifier) | dict.fromkeys(("data", "train", "dev"), w.rows)
    others = {"model": w.encoder, "files": w.texts, "folder": w.out, "text": "a b", "texts": ["a"], "target": "60%"}
    return {name: (paths | others)[name] for name in names.split()}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("door", "name"), [(door, name) for door in DOORS for name in DOORS[door][1].split()])
def test_values_of_another_kind_are_named(door, name, wrong, world):
    if wrong == "model" and (door, name) in MODEL:
        pytest.skip("it takes a loaded model, if its tokenizer comes along")
    function, names = DOORS[door]
    given = fitting(world, names)
    with pytest.raises(TypeError) as caught:
        function(**{**given, name: WRONG[wrong]()})
    said = rf"({name}|text \d+)" if name == "texts" else name
    assert re.match(rf"(?s){said}\b.* is .*; give ", str(caught.value)), str(caught.value)
    assert not world.out.exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: bertlite.prune_to(w.classifier, [], w.texts, w.out), "there is no target: give one such as 2x"),
        (lambda w: commands.measure_speed(w.classifier, some_texts(30), max_length=0), "max_length is 0; it must be"),
        (lambda w: bertlite.evaluate(w.classifier, w.rows, max_length=0), "max_length is 0; it must be an integer, 1"),
        (lambda w: bertlite.evaluate(w.classifier, w.rows, task="tagging"), "task 'tagging' is unknown; have: class"),
        (
            lambda w: commands.measure_speed(
                save(w.out, bertlite.BertForTokenClassification), [*zip(some_texts(30), some_texts(30), strict=True)]
            ),
            "texts holds pairs, and a tagger reads single texts: give a list of strings",
        ),
    ],
)
def test_values_that_cannot_be_are_named(call, message, world):
    with pytest.raises(ValueError, match=message):
        call(world)


def test_a_packed_folder_is_known(world, tmp_path):
    kernels_or_skip()
    packed = tmp_path / "packed"
    bertlite.pack(world.encoder, packed)
    message = r"packed for bertlite\.runtime\.load\(FOLDER\): name the checkpoint that it was made from"
    knowing = ("evaluate", "measure_speed", "inspect", "tokenizer")  # which read a packed folder themselves
    for function, names in (each for door, each in DOORS.items() if door not in knowing):
        for name in {"checkpoint", "source"} & {*names.split()}:
            with pytest.raises(FileNotFoundError, match=message):
                function(**{**fitting(world, names), name: packed})
    bertlite.optimize_for_inference(make().float(), backend="native").save(tmp_path / "optimised")
    with pytest.raises(FileNotFoundError, match=r"packed for bertlite\.inference\.InferenceModel\.load\(FOLDER\)"):
        commands.inspect(tmp_path / "optimised")
