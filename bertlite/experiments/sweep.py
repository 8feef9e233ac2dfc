"""Many cells in parallel processes; a sweep that was killed continues where it stopped."""

import fcntl
import multiprocessing
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import product, repeat
from pathlib import Path
from typing import Any

from bertlite.experiments.cell import Cell, Setting, parse_criterion
from bertlite.experiments.experiment import MODEL, Experiment
from bertlite.progress import Progress
from bertlite.records import is_finished

SEEDED = "random"  # the criterion that is run over every seed


def grid(
    criteria: Sequence[str],
    fractions: Sequence[float],
    *,
    repairs: Sequence[str] = (Cell.repair,),
    epochs: Sequence[float] = (0.0,),
    seeds: Sequence[int] = (0,),
    random_seeds: Sequence[int] = range(5),
    **others: object,
) -> list[Cell]:
    """Return every combination; "random" over `random_seeds`, the other criteria over `seeds`."""
    return [
        Cell(criterion, fraction, repair=repair, epochs=length, seed=seed, **others)  # type: ignore[arg-type]
        for criterion, fraction, repair, length in product(criteria, fractions, repairs, epochs)
        for seed in (random_seeds if parse_criterion(criterion)["criterion"] == SEEDED else seeds)
    ]


def sweep(
    setting: Setting,
    cells: Sequence[Cell],
    root: str | Path,
    *,
    processes: int = 1,
    device: str = "cpu",
    save_model: bool = False,
    progress: bool = False,
) -> list[Path]:
    """Run every cell that is not finished; return the folders of all, in the order of the cells.

    Each process computes on its share of the cores.  If one dies, or this one, the finished cells stay, and the next
    sweep over the same cells runs the others.

    Raises:
        ValueError, FileNotFoundError: the setting or a cell cannot be run; raised before any work.
        BlockingIOError: another sweep is writing to `root`.
    """
    experiment = Experiment(setting, device)
    for cell in cells:
        experiment.check(cell)
    folders = [experiment.folder(cell, root) for cell in cells]
    with lock_folder(Path(root)):
        todo = [
            cell
            for cell, folder in zip(cells, folders, strict=True)
            if not is_finished(folder) or (save_model and not (folder / MODEL).exists())
        ]
        before = len(cells) - len(todo)
        with Progress(len(cells), "cells", what="curve", done=before, shown=progress) as bar:
            if processes == 1:
                for cell in todo:
                    experiment.run(cell, root, save_model=save_model)
                    bar.advance()
            elif todo:
                threads = max(1, (os.cpu_count() or 1) // processes)
                with ProcessPoolExecutor(
                    processes,
                    multiprocessing.get_context("spawn"),
                    initializer=start_worker,
                    initargs=(setting, device, threads),
                ) as pool:
                    try:
                        scored = {
                            (cell.criterion, cell.seed, cell.prunes_neurons): cell for cell in todo if cell.steps == 1
                        }
                        for _ in pool.map(score_cell, scored.values(), repeat(str(root))):
                            pass  # once for all cells that share scores
                        for done in as_completed(
                            [pool.submit(run_cell, cell, str(root), save_model) for cell in todo]
                        ):
                            done.result()
                            bar.advance()
                    except BaseException:
                        pool.shutdown(cancel_futures=True)  # or waiting cells would run before the error is raised
                        raise
    return folders


@contextmanager
def lock_folder(root: Path) -> Iterator[None]:
    """Lock a folder against other sweeps; the lock of a killed process is gone with it.

    Raises:
        BlockingIOError: another sweep holds it.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another sweep is writing to {root}: wait for it, or name another folder") from None
        yield


experiment_of_process: Experiment


def start_worker(setting: Setting, device: str, threads: int) -> None:
    """Prepare a worker process, which ends with the process that started it, however that one ends."""
    import torch

    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)
    global experiment_of_process
    with warnings.catch_warnings(action="ignore"):  # the first process has said what there is to say of the data
        experiment_of_process = Experiment(setting, device)


def exit_with_parent(parent: Any) -> None:
    """Wait until the parent process is gone, then end this one."""
    parent.join()
    os._exit(1)


def score_cell(cell: Cell, root: str) -> None:
    """Compute the scores that a cell needs, in a worker process."""
    for neurons in {False, cell.prunes_neurons}:
        experiment_of_process.scores(cell, Path(root) / "scores", neurons)


def run_cell(cell: Cell, root: str, save_model: bool) -> None:
    """Run a cell, in a worker process."""
    experiment_of_process.run(cell, root, save_model=save_model)
