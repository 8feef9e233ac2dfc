"""Killed, out of disk, out of memory, not alone: what is on disk is the old state or the new, and can be gone on from.

Children are forked and really killed: before their n-th operation on the disk, as Python's audit events see them, or
by the kernel within a write, at the n-th byte of a file, which sees native code too.
"""

import ctypes
import errno
import os
import re
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import SIZES, assert_same, make, randomise_

from bertlite import BertConfig, BertModel, BertTokenizer, Embedder, prune_heads
from bertlite.embed.job import Job, Rows, embed_missing
from bertlite.support.runs import Run, read_runs

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")

WRITES = re.compile(
    r"os\.(mkdir|rename|remove|rmdir|link|symlink|chmod|truncate)|shutil\..*|tempfile\.mkstemp|ctypes\.dlsym"
)
GROWS = re.compile(r"os\.(mkdir|link|symlink)|tempfile\.mkstemp")  # what takes room; a rename or a removal takes none
FULL = 28  # a child's exit status where it said that the disk is full
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
MOST = 300  # steps, more than anything here takes

Work = Callable[[], object]
at_steps = pytest.mark.parametrize(  # of the disk, at which work is killed or fails
    "every", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["each fourth step", "each step"]
)


def in_child(work: Work) -> int:
    """Do something in a fork; returns its exit status, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(60)
            torch.set_num_threads(1)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at_once(one: Work, other: Work) -> None:
    """Do two things at the same time, each in a fork."""
    pid = os.fork()
    if pid == 0:
        os._exit(in_child(one))
    assert in_child(other) == 0
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def acting_at(step: int, operations: re.Pattern[str], act: Work, work: Work) -> Work:
    """Return a work that acts before its n-th operation on the disk, and before every one after it."""

    def watched() -> None:
        left = iter(range(step))

        def hook(event: str, args: tuple[Any, ...]) -> None:
            opens = event == "open" and isinstance(args[2], int) and args[2] & WRITING
            if (opens or operations.fullmatch(event)) and next(left, None) is None:
                act()

        sys.addaudithook(hook)
        work()

    return watched


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at_byte(size: int, work: Work) -> Work:
    def mortal() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        work()

    return mortal


def fails_at(step: int, work: Work) -> Work:
    """The n-th operation on the disk finds it full, and so does every one after it but the clearing up."""

    def no_space() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full() -> None:
        try:
            acting_at(step, GROWS, no_space, work)()
        except OSError as error:
            os._exit(FULL if error.errno == errno.ENOSPC else 1)

    return full


def tries(work: Callable[[int], Work], every: int, stopped: int, least: int) -> Iterator[int]:
    """Do works, each of which is stopped a step later, until one is not; yields the number of each try."""
    for step in range(0, MOST, every):
        status = in_child(work(step))
        yield step
        assert status in (0, stopped)
        if status == 0:
            break
    else:
        raise AssertionError(f"not done after {MOST} steps")
    assert step > least, "hardly anything was written"


def fills(work: Callable[[int], Work], every: int) -> Iterator[int]:
    """Do a work as often as it has steps, the disk full from each on; yields the number of each try."""
    yield from tries(lambda step: fails_at(step, work(step)), every, FULL, 1)


def kills(work: Callable[[int], Work], sizes: tuple[int, ...], every: int) -> Iterator[int]:
    """Do a work as often as it has steps, killed before each, and within files; yields the number of each try.

    `work` makes the work of a try from its number.
    """
    yield from tries(lambda step: acting_at(step, WRITES, die, work(step)), every, -signal.SIGKILL, 5)
    for number, size in enumerate(sizes, MOST):
        assert in_child(dies_at_byte(size, work(number))) == -signal.SIGXFSZ
        yield number


# Checkpoints --------------------------------------------------------------------------------------------------------


def assert_is(folder: Path, *models: BertModel) -> int:
    """Return which of these models a folder holds, whole."""
    loaded = BertModel.from_pretrained(folder)
    [which] = [i for i, model in enumerate(models) if model.config.pruned_heads == loaded.config.pruned_heads]
    assert_same(loaded.state_dict(), models[which].state_dict(), atol=0)
    return which


@pytest.fixture
def saves(tmp_path: Path) -> Any:
    """Return two models, the folder of a try, and what makes its work: the second model is saved over the first."""
    old, new = make(), prune_heads(make(), {0: [1], 2: [0, 3]})

    def place(number: int) -> Path:
        return tmp_path / str(number) / "model"

    def work(number: int) -> Work:
        old.save_pretrained(place(number))
        (place(number) / "vocab.txt").write_text("words")
        return lambda: new.save_pretrained(place(number))

    return old, new, place, work


@at_steps
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new(every, saves):
    old, new, place, work = saves
    outcomes = []
    for number in kills(work, (1, 300, 5000, 20_000), every):
        outcomes.append(assert_is(place(number), old, new))
        assert (place(number) / "vocab.txt").read_text() == "words"
        new.save_pretrained(place(number))  # what is left is no hindrance
        assert assert_is(place(number), old, new) == 1
        shutil.rmtree(place(number).parent)
    steps = outcomes[:-4]
    assert steps == sorted(steps)
    assert {*steps} == {0, 1}
    assert outcomes[-4:] == [0] * 4


def test_without_an_exchange_two_renames_lose_nothing_either(saves, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: SimpleNamespace())
    old, new, place, work = saves
    gone = 0
    for number in kills(work, (), 1):
        if place(number).exists():
            assert_is(place(number), old, new)
        else:  # killed between the two
            gone += 1
            [aside] = place(number).parent.glob(".model.*.new.old")
            [ready] = place(number).parent.glob(".model.*.new")
            assert (assert_is(aside, old, new), assert_is(ready, old, new)) == (0, 1)
    assert gone == 1
    assert [path.name for path in place(number).parent.iterdir()] == ["model"]


@at_steps
def test_a_save_into_the_working_directory_that_is_killed_leaves_no_mixture(every, saves):
    """The old checkpoint, the new one, or none that loads; what is missing then is beside it."""
    old, new, place, of_absolute = saves

    def work(number: int) -> Work:
        of_absolute(number)
        for shard in range(1, 6):  # which the save removes
            (place(number) / f"model-0000{shard}-of-00005.safetensors").touch()

        def save() -> None:
            os.chdir(place(number))
            new.save_pretrained(".")

        return save

    outcomes = []
    for number in kills(work, (300, 20_000), every):
        if (place(number) / "config.json").exists():
            outcomes.append(assert_is(place(number), old, new))
        else:
            [rest] = set(place(number).parent.iterdir()) - {place(number)}
            outcomes.append(None)
            for path in rest.iterdir():
                os.replace(path, place(number) / path.name)
            rest.rmdir()
            assert assert_is(place(number), old, new) == 1
        shutil.rmtree(place(number).parent)
    assert {*outcomes} == {0, None, 1}
    assert outcomes[-2:] == [0, 0]


@at_steps
def test_a_disk_that_is_full_at_any_step_keeps_the_old_checkpoint(every, saves):
    old, new, place, work = saves
    outcomes = []
    for number in fills(work, every):
        outcomes.append(assert_is(place(number), old, new))
        assert [path.name for path in place(number).parent.iterdir()] == ["model"]
    assert outcomes == [0] * (len(outcomes) - 1) + [1]


def test_of_two_writers_the_last_wins_whole(tmp_path):
    models = [prune_heads(make(), {layer: [1, 2]}) for layer in range(2)]
    folder = tmp_path / "model"
    models[0].save_pretrained(folder)
    at_once(*(lambda model=model: [model.save_pretrained(folder) for _ in range(15)] for model in models))
    assert_is(folder, *models)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# Runs ---------------------------------------------------------------------------------------------------------------


def experiment(folder: Path) -> None:
    with Run("prune", {"heads": 3}, folder=folder) as run:
        for step in range(3):
            run.log(step=step)
        run.save("masks.json", {"0": [1]})
        run.save_predictions([{"id": 0}, {"id": 1}])
        run.results["loss"] = 0.5


def unfinished(folder: Path) -> None:
    with Run("prune", {}, folder=folder) as run:
        run.log(step=-1)
        run.save("masks.json", {})
        (run.folder / "model").mkdir()
        (run.folder / "model/config.json").write_text("{}")
        raise RuntimeError


@at_steps
@pytest.mark.parametrize("there", [False, True], ids=["new", "again"])
def test_a_killed_run_is_read_up_to_where_it_came_and_done_again(there, every, tmp_path):
    """Where an unfinished one is there already, it is replaced; being killed at that is no hindrance either."""

    def work(number: int) -> Work:
        if there:
            with pytest.raises(RuntimeError):
                unfinished(tmp_path / str(number))
        return lambda: experiment(tmp_path / str(number))

    for number in kills(work, (1, 20, 500), every):
        folder = tmp_path / str(number)
        for record in read_runs(tmp_path, unfinished=True):
            steps = [line["step"] for line in record.metrics]
            if record.facts["status"] == "failed":
                assert steps in ([-1], [])
                continue
            assert steps == list(range(len(steps)))
            assert not record.finished or (steps == [0, 1, 2] and record.results == {"loss": 0.5})
            assert not record.finished or record.load("masks.json") == {"0": [1]}
            assert not record.finished or len(record.predictions) == 2
        if not (folder.exists() and [run for run in read_runs(tmp_path) if run.folder == folder]):
            experiment(folder)
        [done] = read_runs(tmp_path)
        assert done.results == {"loss": 0.5}
        shutil.rmtree(folder)


# Embedding ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def vectors(tmp_path: Path) -> Embedder:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    randomise_(BertModel(BertConfig(**{**SIZES, "vocab_size": len(words)}))).float().save_pretrained(tmp_path / "bert")
    BertTokenizer(words).save_pretrained(tmp_path / "bert")
    made = Embedder(tmp_path / "bert", max_tokens=40)
    assert made.dimension == SIZES["hidden_size"]  # loads the model
    return made


def job_of(vectors: Embedder, folder: Path, count: int) -> Callable[[Path], Job]:
    """Return what makes a job of so many texts, given where it writes."""
    lines = folder / "lines.txt"
    lines.write_text("".join(f"{' '.join('abcdefgh'[: i % 8 + 1])}\n" for i in range(count)))
    return lambda out: Job(vectors, Rows((lines,)), out, shard_rows=4)


@at_steps
@pytest.mark.parametrize("stops", [partial(kills, sizes=(1, 800)), fills], ids=["killed", "disk full"])
def test_an_embedding_that_is_stopped_loses_no_shard_and_mixes_none(vectors, stops, every, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    job = job_of(vectors, tmp_path, 11)
    embed_missing(job(tmp_path / "wanted"))
    wanted = {path.name: pq.read_table(path) for path in (tmp_path / "wanted").glob("*.parquet")}
    assert len(wanted) == 3
    for number in stops(lambda number: lambda: embed_missing(job(tmp_path / str(number))), every=every):
        out = tmp_path / str(number)
        assert stops is not fills or not list(out.glob(".*.tmp"))
        for path in out.glob("*.parquet"):
            assert pq.read_table(path).equals(wanted[path.name])
        manifest = embed_missing(job(out))
        assert (manifest["complete"], sum(manifest["shards"].values())) == (True, 11)
        assert {path.name for path in out.iterdir()} == wanted.keys()
        shutil.rmtree(out)


def test_two_embeddings_into_one_folder_make_one(vectors, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    job = job_of(vectors, tmp_path, 23)(tmp_path / "out")
    at_once(lambda: embed_missing(job), lambda: embed_missing(job))
    tables = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))]
    assert [name for table in tables for name in table["id"].to_pylist()] == list(range(23))
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("could not create a primitive")], ids=repr
)
def test_a_batch_that_memory_does_not_hold_is_halved_down_to_one_text(error, vectors, monkeypatch):
    """oneDNN says the same of a matmul that it cannot do at all: that error is raised as it is, for one text."""
    texts, encode, sizes, most = [*"abcdefgh"], vectors.encoder.encode, [], 2

    def scarce(texts: list[str], **options: Any) -> Any:
        sizes.append(len(texts))
        if len(texts) > most:
            raise error
        return encode(texts, **options)

    wanted = vectors.encode(texts)
    monkeypatch.setattr(vectors.encoder, "encode", scarce)
    assert abs(vectors.encode(texts) - wanted).max() < 1e-5
    assert sizes == [8, 4, 2, 2, 4, 2, 2]
    most, said = 0, "one text of 1 character does not fit into memory: .*max_length"
    with pytest.raises(type(error), match=said if isinstance(error, torch.OutOfMemoryError) else str(error)):
        vectors.encode(["a"])
