"""One model in many threads and processes, and the same twice: bit for bit what it is alone."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIZES, assert_same, make, make_batch
from torch import Tensor, nn

from bertlite import BertModel, BertTokenizer, Embedder, head_importance, optimize_for_inference, prune_heads
from bertlite.models.heads import BertForSequenceClassification

THREADS, ROUNDS = 4, 5
BATCHES = [
    make_batch(batch=size, length=length, seed=length, lengths=(length, *(3,) * (size - 1)))
    for size, length in ((1, 7), (2, 11), (3, 19), (5, 29))
]


@pytest.fixture(autouse=True)
def one_thread(set_threads) -> None:
    """Of torch's own, which do not survive a fork."""
    set_threads(1)


def vectors(model: nn.Module, **batch: Any) -> Tensor:
    with torch.inference_mode():
        return model(**batch).last_hidden_state.clone()


def loaded(folder: Path, backend: str) -> nn.Module:
    """A checkpoint of the tests' model in float32, two heads short, as one of the ways to run it."""
    prune_heads(make(), {1: [0, 2]}).float().save_pretrained(folder)
    if backend != "optimised":
        return BertModel.from_pretrained(folder, attn_implementation=backend)
    return optimize_for_inference(BertModel.from_pretrained(folder))


@pytest.fixture(params=["eager", "sdpa", "packed", "auto", "optimised"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> nn.Module:
    return loaded(tmp_path, request.param)


# Threads ------------------------------------------------------------------------------------------------------------


def together(*works: Any) -> list[Any]:
    """The results of works that begin at the same time, each in a thread."""
    barrier = threading.Barrier(len(works))

    def begin(work: Any) -> Any:
        torch.set_num_threads(1)
        barrier.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(begin, works))


def test_threads_that_share_a_model_get_what_one_gets(model):
    wanted = [vectors(model, **batch) for batch in BATCHES]

    def work(shift: int) -> list[tuple[int, Tensor]]:
        order = [(i + shift) % len(BATCHES) for i in range(ROUNDS * len(BATCHES))]
        return [(i, vectors(model, **BATCHES[i])) for i in order]

    for results in together(*(partial(work, shift) for shift in range(THREADS))):
        assert all(got.equal(wanted[i]) for i, got in results)


def test_a_thread_that_asks_for_more_does_not_give_it_to_others(tmp_path):
    model, batch = loaded(tmp_path, "auto"), BATCHES[1]

    def plain() -> bool:
        return all(model(**batch).attentions is None for _ in range(ROUNDS))

    def curious() -> bool:
        return all(len(model(**batch, output_attentions=True).attentions) == 3 for _ in range(ROUNDS))

    with torch.no_grad():
        assert together(plain, curious, plain, curious) == [True] * 4


def test_threads_may_load_at_the_same_time(tmp_path):
    make().save_pretrained(tmp_path)
    wanted = vectors(make(), **BATCHES[2])
    models = together(*(partial(BertModel.from_pretrained, tmp_path) for _ in range(THREADS)))
    assert all(vectors(model, **BATCHES[2]).equal(wanted) for model in models)


def test_threads_share_an_embedder(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(SIZES["vocab_size"] - 5))]
    make().float().save_pretrained(tmp_path)
    BertTokenizer(words).save_pretrained(tmp_path)
    embedder = Embedder(tmp_path)
    texts = [" ".join(f"w{i * j % 91}" for j in range(i % 9 + 1)) for i in range(23)]
    wanted = embedder.encode(texts)
    results = together(*(partial(embedder.encode, texts) for _ in range(THREADS)))
    assert all((got == wanted).all() for got in results)


# Processes ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_runs_the_model_it_inherits(model):
    wanted = [vectors(model, **batch) for batch in BATCHES]
    children = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                same = [vectors(model, **batch).equal(out) for batch, out in zip(BATCHES, wanted, strict=True)]
                status = 0 if all(same) else 2
            finally:
                os._exit(status)
        children.append(pid)
    assert [vectors(model, **batch).equal(out) for batch, out in zip(BATCHES, wanted, strict=True)] == [True] * 4
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]


# The same twice -----------------------------------------------------------------------------------------------------


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch raise where an operator is not deterministic, and fill memory with nan: an early read shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("backend", ["eager", "sdpa", "packed", "auto"])
def test_deterministic_algorithms_are_enough_and_repeat(backend):
    """Training and inference, packed too."""
    batch, labels = make_batch(batch=3, length=19, lengths=(19, 3, 7)), torch.tensor([0, 2, 1])
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        model = make(BertForSequenceClassification, num_labels=3, attn_implementation=backend).float().train()
        loss = model(**batch, labels=labels).loss
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        pruned = prune_heads(model.eval(), {0: [1], 2: range(4)})
        scores = head_importance(model, [{**batch, "labels": labels}])
        with torch.no_grad():
            found.append([loss.detach(), *grads, pruned(**batch).logits, scores])
    assert all(x.isfinite().all() for x in found[0])
    assert_same(*found, atol=0)
