"""A checkpoint is a value: each command reads one commit, and each file once."""

import pickle
import re
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from conftest import make, set_entries
from natively import kernels_or_skip

import bertlite
from bertlite import BertConfig, BertForSequenceClassification, BertModel, BertTokenizer
from bertlite.attention_view.command import attention
from bertlite.checkpoint import files as checkpoint_files
from bertlite.checkpoint.files import Source
from bertlite.commands import PruneSettings
from bertlite.embed.command import embed
from bertlite.experiments import speed
from bertlite.experiments.budget.command import prune_to
from bertlite.experiments.budget.vocabulary import prune_vocabulary
from bertlite.experiments.command import finetune
from bertlite.experiments.data import DataSource
from bertlite.experiments.evaluate_command import evaluate
from bertlite.experiments.experiment import Cell, Experiment, Setting, prune_run
from bertlite.experiments.settings import Recipe
from bertlite.opened.checkpoint import Checkpoint
from bertlite.opened.inspection import inspect
from bertlite.parity.cases import Case
from bertlite.parity.check import check_all
from bertlite.shipping import pack as packing
from bertlite.shipping.convert import convert
from bertlite.shipping.export import export
from bertlite.shipping.folder import write_model
from bertlite.shipping.original import Original
from bertlite.shipping.pack import describe_checkpoint, pack
from bertlite.support import timing
from tests.shipping.worlds import add_pooling

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "fine", "bad", "poor", "film", "plot", "the", "a", "is"]
TEXTS = [f"the {one} {other} is {word}" for one in WORDS[9:] for other in WORDS[9:12] for word in WORDS[5:9]]
POOLING, SENTENCES = "1_Pooling/config.json", "config_sentence_transformers.json"
NAME = "someone/model"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a sentence encoder, a classifier, and labelled texts."""
    folder, tokenizer = tmp_path_factory.mktemp("world"), BertTokenizer({word: i for i, word in enumerate(WORDS)})
    classifier = make(BertForSequenceClassification, id2label={0: "no", 1: "yes"}).float()
    for name, model in (("encoder", classifier.bert), ("classifier", classifier)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        (folder / name / "README.md").write_text("---\nlicense: mit\n---\n")
    set_entries(add_pooling(folder / "encoder") / POOLING, include_prompt=False)
    set_entries(folder / "encoder" / SENTENCES, prompts={"query": "the "}, default_prompt_name="query")
    rows = [f"{text}\t{'yes' if text.split()[-1] in WORDS[5:7] else 'no'}" for text in TEXTS]
    (folder / "rows.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    return folder


class Hub:
    """A hub with one repository, to which a commit is pushed before each request that names none."""

    def __init__(self, given: Path, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.read, self.asked = set[str](), Counter[str]()
        self.pushed = 0

    def snapshot(self, commit: str) -> Path:
        """Return the folder of the cache with a commit."""
        place = self.folder / "snapshots" / commit
        if not place.exists():
            shutil.copytree(self.given, place)
        self.read.add(commit)
        return place

    def download(self, repo: str, name: str, *, subfolder: Any = None, revision: Any = None, **options: Any) -> str:
        from huggingface_hub import errors

        assert repo == NAME
        self.pushed += revision is None
        self.asked[name] += 1
        commit = revision or f"{self.pushed:040x}"
        path = self.snapshot(commit) / (subfolder or "") / name
        if not path.is_file():
            error: Any = errors.EntryNotFoundError("no")
            error.response = SimpleNamespace(headers={"X-Repo-Commit": commit})
            raise error
        return str(path)


@pytest.fixture
def hub_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Hub]:
    """Return a function that makes a folder the repository; other libraries load the commit that they are told to."""

    def make_hub(given: Path) -> Hub:
        hub, load = Hub(given, tmp_path / "hub"), Original.load.__func__  # type: ignore[attr-defined]

        def load_original(cls: Any, checkpoint: Checkpoint, *args: Any, **options: Any) -> Any:
            snapshot = hub.snapshot(str(checkpoint.pinned["revision"]))
            return load(cls, Checkpoint(snapshot), *args, **options)

        monkeypatch.setattr("huggingface_hub.hf_hub_download", hub.download)
        monkeypatch.setattr(checkpoint_files, "hub_answers", lambda: True)
        monkeypatch.setattr(Original, "load", classmethod(load_original))
        if find_spec("sentence_transformers"):
            from sentence_transformers import SentenceTransformer as Real

            def load_sentences(name: str, *, revision: Any = None, **options: Any) -> Any:
                return Real(str(hub.snapshot(revision)) if name == NAME else name, **options)

            monkeypatch.setattr("sentence_transformers.SentenceTransformer", load_sentences)
        return hub

    return make_hub


def train(name: Any, out: Path, world: Path) -> Any:
    source = DataSource(str(world / "rows.tsv"))
    return finetune(name, source, source, out, recipe=Recipe(epochs=1, batch_size=20))


def prune_in_cells(name: Any, out: Path, world: Path) -> Any:
    source = DataSource(str(world / "rows.tsv"))
    setting = Setting(name, "classification", source, source, calibration=8)
    return prune_run(Experiment(setting), [Cell("random", epochs=1)], out, save_model=True)


def time_quickly(name: Any, out: Path, world: Path) -> Any:
    with patch.multiple(speed, TIMING=0.1, JUDGING=0.1, ROUNDS=3), patch.object(timing, "FEWEST", 3):
        return speed.measure_speed(name, TEXTS, dtype="float32")


SETTINGS = PruneSettings(at=(2, 8), calibration=16, max_length=16)
COMMANDS: dict[str, tuple[str, Callable[[Any, Path, Path], Any]]] = {
    "pack": ("encoder", lambda name, out, world: pack(name, out)),
    "pack int8": ("classifier", lambda name, out, world: pack(name, out, dtype="int8")),
    "convert": ("encoder", lambda name, out, world: convert(name, out)),
    "export": ("encoder", lambda name, out, world: export(name, out)),
    "prune to": ("encoder", lambda name, out, world: prune_to(name, "60%", TEXTS, out, settings=SETTINGS)),
    "prune vocabulary": ("classifier", lambda name, out, world: prune_vocabulary(name, TEXTS, out)),
    "prune finetune": ("classifier", train),
    "prune run": ("classifier", prune_in_cells),
    "evaluate": ("classifier", lambda name, out, world: evaluate(name, world / "rows.tsv")),
    "evaluate --speed": ("classifier", time_quickly),
    "embed": ("encoder", lambda name, out, world: embed(name, world / "rows.tsv", out)),
    "attention": ("encoder", lambda name, out, world: attention(name, TEXTS[0])),
    "inspect": ("encoder", lambda name, out, world: inspect(name)),
    "parity": ("encoder", lambda name, out, world: [*check_all([Case()], "cpu", name)]),
}
NEEDS: dict[str, tuple[str, ...]] = {"export": ("onnx", "onnxscript", "onnxruntime")}
NEEDS |= {"pack": ("sentence_transformers",), "embed": ("sentence_transformers", "pyarrow")}
NEEDS |= dict.fromkeys(("pack int8", "parity", "evaluate --speed"), ("transformers",))
NEEDS |= dict.fromkeys(("prune to", "evaluate"), ("scipy",))
NEEDS |= dict.fromkeys(("prune finetune", "prune run"), ("accelerate", "scipy"))


def run_command(command: str, name: Any, out: Path, world: Path) -> Any:
    for package in NEEDS.get(command, ()):
        pytest.importorskip(package)
    if command.startswith("pack"):
        kernels_or_skip()
    return COMMANDS[command][1](name, out, world)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reads_one_commit_whatever_is_pushed_meanwhile(command, world, hub_of, tmp_path) -> None:
    hub = hub_of(world / COMMANDS[command][0])
    run_command(command, NAME, tmp_path / "out", world)
    assert len(hub.read) == 1 == hub.pushed


def own_reads(folder: Path, run: Callable[[], object]) -> Counter[str]:
    """Return how often bertlite itself opens each file of a folder; tokenizers and safetensors open theirs in Rust.

    Files that transformers reads through `bertlite.hf`, and parity's own models, do not count.
    """
    found, watched, package = Counter[str](), [True], str(Path(bertlite.__file__).parent)

    def watch(event: str, args: Any) -> None:
        if event == "open" and watched[0] and str(args[0]).startswith(str(folder)):
            callers = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1))]
            first = next(each for each in callers if "pathlib" not in each)
            others = [each for each in callers if re.search(r"bertlite/(hf|parity)/", each)]
            if first.startswith(package) and not others:
                found[str(Path(args[0]).relative_to(folder))] += 1

    sys.addaudithook(watch)  # for good, but it counts only here
    try:
        run()
    finally:
        watched[0] = False
    return found


# An export hashes the files too, parity makes several models, and a model that is timed is its library's.
READ_BY_OTHERS = ("export", "parity", "evaluate --speed")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in READ_BY_OTHERS])
def test_a_command_reads_each_file_once(command, world, tmp_path) -> None:
    """What is copied is read once more as bytes."""
    folder = shutil.copytree(world / COMMANDS[command][0], tmp_path / "given")
    found = own_reads(folder, lambda: run_command(command, str(folder), tmp_path / "out", world))
    copied = set(Checkpoint(folder).module_files) if command in ("convert", "prune to") else set()
    assert {"config.json", "model.safetensors"} <= found.keys()
    assert {name: times for name, times in found.items() if times > 1 + (name in copied)} == {}


def test_a_checkpoint_of_the_hub_is_described_in_few_requests(world, hub_of) -> None:
    hub = hub_of(world / "encoder")
    describe_checkpoint(Checkpoint(NAME))
    assert max(hub.asked.values()) == 1
    assert hub.asked.total() <= 20


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_held_is_written_whatever_becomes_of_the_folder(world, tmp_path) -> None:
    """A search takes hours: the card, the modules and the tokenizer are those of its beginning."""
    folder = shutil.copytree(world / "encoder", tmp_path / "given")
    checkpoint = Checkpoint(folder)
    checkpoint.hold()
    model, tokenizer = checkpoint.load(BertModel), checkpoint.tokenizer
    written = [POOLING, SENTENCES, "sentence_bert_config.json"]
    for name in (*written, "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("---\nlicense: other\n---\n")
    (folder / "modules.json").unlink()
    out = write_model(tmp_path / "out", model, checkpoint)
    for name in written:
        assert (out / name).read_bytes() == (world / "encoder" / name).read_bytes()
    assert "license: mit" in (out / "README.md").read_text()
    assert BertTokenizer.from_pretrained(out).get_vocab() == tokenizer.get_vocab()


def test_what_was_compared_is_what_is_packed(world, tmp_path, monkeypatch) -> None:
    """Weights that another program writes during the comparison are not packed."""
    pytest.importorskip("transformers")
    kernels_or_skip()
    folder, compare = shutil.copytree(world / "classifier", tmp_path / "given"), packing.largest_difference
    pack(folder, tmp_path / "wanted")

    def change(*args: Any) -> float:
        make(BertForSequenceClassification, id2label={0: "no", 1: "yes"}, hidden_act="relu").save_pretrained(folder)
        return compare(*args)

    monkeypatch.setattr(packing, "largest_difference", change)
    pack(folder, tmp_path / "out")
    for path in (tmp_path / "wanted").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_an_opened_checkpoint_is_taken_wherever_a_name_is(world) -> None:
    checkpoint = Checkpoint.of(world / "classifier")
    assert Checkpoint.of(checkpoint) is checkpoint
    assert checkpoint.model_class is BertForSequenceClassification
    assert BertConfig.from_pretrained(checkpoint) == checkpoint.config
    assert BertTokenizer.from_pretrained(checkpoint).get_vocab() == checkpoint.tokenizer.get_vocab()
    assert BertForSequenceClassification.from_pretrained(checkpoint).config.id2label == {0: "no", 1: "yes"}
    assert inspect(checkpoint) == inspect(str(world / "classifier"))
    with pytest.raises(TypeError, match="is opened already: leave out revision, token"):
        BertModel.from_pretrained(checkpoint, revision="main", token="t")


def test_a_copy_opens_it_again_and_a_source_keeps_its_options(world) -> None:
    checkpoint = Checkpoint.of(Source(str(world), subfolder="encoder"))
    assert (checkpoint.processing.modes, checkpoint.processing.include_prompt) == (("mean",), False)
    again = pickle.loads(pickle.dumps(checkpoint))
    assert again == checkpoint
    assert again.place is not checkpoint.place
    assert again.modules == checkpoint.modules


def test_values_that_a_caller_changes_are_not_the_next_ones(world) -> None:
    checkpoint = Checkpoint(world / "encoder")
    checkpoint.modules[0]["path"] = "elsewhere"
    checkpoint.place.values("config.json").clear()
    assert checkpoint.modules[0]["path"] == ""
    assert checkpoint.config.hidden_size == 48


def test_a_single_weights_file_is_named_where_another_library_would_load_it(tmp_path):
    make().save_pretrained(tmp_path)
    source = Checkpoint(tmp_path / "model.safetensors")
    for of_libraries in ("local", "pinned"):
        with pytest.raises(ValueError, match=re.escape(f"do not load: name {tmp_path}")):
            getattr(source, of_libraries)


def test_vectors_are_not_written_between_the_files_of_their_model(tmp_path):
    make().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"would be replaced, and .* is read: name another output"):
        embed(tmp_path, tmp_path / "texts.txt", tmp_path)
