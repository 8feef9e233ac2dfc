"""Many cells, in parallel processes; a sweep that was killed goes on where it was."""

import fcntl
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import product, repeat
from pathlib import Path
from typing import Any

from bertlite.lab.experiments.cell import Bench, Cell, Setting, options
from bertlite.records import is_finished

SEEDED = "random"  # the criterion that is run over every seed


def grid(
    criteria: Sequence[str],
    fractions: Sequence[float],
    *,
    repairs: Sequence[str] = ("none",),
    epochs: Sequence[float] = (0.0,),
    seeds: Sequence[int] = (0,),
    random_seeds: Sequence[int] = range(5),
    **others: object,
) -> list[Cell]:
    """Every combination; "random" over `random_seeds`, the other criteria over `seeds`."""
    return [
        Cell(criterion, fraction, repair=repair, epochs=length, seed=seed, **others)  # type: ignore[arg-type]
        for criterion, fraction, repair, length in product(criteria, fractions, repairs, epochs)
        for seed in (random_seeds if options(criterion)["criterion"] == SEEDED else seeds)
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
    """Do every cell that is not done yet; the folders of all, in the order of the cells.

    Each process computes on its share of the cores.  If one dies, or this one, the finished cells stay, and the next
    sweep over the same cells does the others.

    Raises:
        ValueError, FileNotFoundError: of the setting or of a cell; before any work.
        BlockingIOError: another sweep is writing to `root`.
    """
    from tqdm import tqdm

    bench = Bench(setting, device)
    for cell in cells:
        bench.check(cell)
    folders = [bench.folder(cell, root) for cell in cells]
    with alone(Path(root)):
        todo = [cell for cell, folder in zip(cells, folders, strict=True) if not is_finished(folder)]
        with tqdm(total=len(cells), initial=len(cells) - len(todo), unit="cell", disable=not progress) as bar:
            if processes == 1:
                for cell in todo:
                    bench.run(cell, root, save_model=save_model)
                    bar.update()
            elif todo:
                threads = max(1, (os.cpu_count() or 1) // processes)
                with ProcessPoolExecutor(
                    processes,
                    multiprocessing.get_context("spawn"),
                    initializer=begin,
                    initargs=(setting, device, threads),
                ) as pool:
                    try:
                        scored = {
                            (cell.criterion, cell.seed, cell.neurons > 0): cell for cell in todo if cell.steps == 1
                        }
                        for _ in pool.map(score, scored.values(), repeat(str(root))):
                            pass  # each once: cells that share scores find them
                        for done in as_completed([pool.submit(work, cell, str(root), save_model) for cell in todo]):
                            done.result()
                            bar.update()
                    except BaseException:
                        pool.shutdown(cancel_futures=True)  # or what waits would be done before the error is told
                        raise
    return folders


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold a folder against other sweeps; a killed process holds nothing."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another sweep is writing to {root}: wait for it, or name another folder") from None
        yield


bench_of_process: Bench


def begin(setting: Setting, device: str, threads: int) -> None:
    """Make a worker ready, and let it die with the process that started it, however that one ends."""
    import torch

    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)
    global bench_of_process
    bench_of_process = Bench(setting, device)


def end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def score(cell: Cell, root: str) -> None:
    for neurons in {False, cell.neurons > 0}:
        bench_of_process.scores(cell, Path(root) / "scores", neurons)


def work(cell: Cell, root: str, save_model: bool) -> None:
    bench_of_process.run(cell, root, save_model=save_model)
