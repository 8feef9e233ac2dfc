"""bertlite/inference/native: threads of torch's own count, other threads of Python, and other processes."""

import ctypes
import mmap
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import make_batch
from natively import kernels_or_skip, make_native, native, natively

from bertlite import optimize_for_inference
from bertlite.runtime.structs import Kernels

pytestmark = native
BATCH = make_batch(40, 33, lengths=(33,) * 40)


def test_torchs_count_is_asked_for(monkeypatch, set_threads):
    asked, run = [], Kernels.run

    def recording(self, model, batch, threads):
        asked.append(threads)
        return run(self, model, batch, threads)

    quick = natively(make_native(), torch.float32)  # which may run the self-test
    monkeypatch.setattr(Kernels, "run", recording)
    for count in (1, 2, 3):
        set_threads(count)
        quick(**BATCH)
    assert asked == [1, 2, 3]


def run_in_fork(work: Callable[[], bytes], seconds: float = 30) -> bytes:
    """Return the bytes that `work` returns in a forked process."""
    here, there = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: there.send_bytes(work()))
    child.start()
    try:
        assert here.poll(seconds), "the child hangs"
        return here.recv_bytes()
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("backend", ["plain", "native"])
def test_a_compiled_model_runs_in_a_forked_process(set_threads, backend):
    """Its own threads are gone there, which torch's operators would wait for."""
    set_threads(2)
    model = optimize_for_inference(make_native().float(), backend=backend)
    compiled = torch.compile(model, backend="eager")

    def run() -> bytes:
        return compiled(**BATCH).last_hidden_state.numpy().tobytes() + bytes([torch.get_num_threads()])

    wanted = run()
    assert run() == wanted
    assert run_in_fork(run)[-1] == 1


def test_a_model_that_is_unpickled_in_a_forked_process_runs_there(set_threads):
    set_threads(2)
    model = optimize_for_inference(make_native().float())
    model(**BATCH)

    def run() -> bytes:
        pickle.loads(pickle.dumps(model))(**BATCH)
        return bytes([torch.get_num_threads()])

    assert run_in_fork(run) == bytes([1])


def test_other_threads_of_python_run_meanwhile():
    """ctypes lets go of the interpreter in functions of a CDLL, and not in those of a PyDLL."""
    kernels = kernels_or_skip()
    assert {each._flags_ for each in (kernels._run, kernels._pack, kernels._linear)} == {ctypes.CDLL._func_flags_}
    assert ctypes.PyDLL._func_flags_ != ctypes.CDLL._func_flags_


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_thread_keeps_memory_up_to_a_limit_and_until_it_ends(set_threads):
    set_threads(1)
    quick, resident = natively(make_native(), torch.float32), {}

    def megabytes() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20

    def run() -> None:
        for name, sequences in (("little", 10), ("too much", 2400), ("kept", 1100)):
            quick(input_ids=torch.ones(sequences, 33, dtype=torch.long))
            resident[name] = megabytes()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    # "too much" would keep more than 128, and the allocator of a long run keeps 23 by itself
    assert resident["too much"] - resident["little"] < 40, resident
    assert resident["kept"] - resident["too much"] > 40, resident
    end = time.monotonic() + 10  # Python's thread ends before the system's
    while megabytes() - resident["little"] > 40:
        assert time.monotonic() < end, (resident, megabytes())
        time.sleep(0.01)
