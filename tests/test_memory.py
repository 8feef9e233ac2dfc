"""Load, infer, prune, save and reload, over and over: memory stays flat and no file stays open."""

import gc
import os
from pathlib import Path

import pytest
import torch
from conftest import make, make_batch

from bertlite import BertModel, optimize_for_inference, prune_heads, prune_neurons

ROUNDS, WARM = 60, 15  # what libraries keep of a few shapes is there after WARM
ALLOWED = 16 * 2**20  # bytes; a model that is not freed takes 1 MB in each round


def in_use() -> tuple[int, int]:
    """Return the bytes of this process in memory, mapped files included, and the number of its open files."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024, len(os.listdir("/proc/self/fd"))


@torch.inference_mode()
def run_round(number: int, folder: Path) -> None:
    """Run one round, with other heads, neurons and texts each time."""
    model = BertModel.from_pretrained(folder / "whole")
    batch = make_batch(3, (11, 24, 40)[number % 3], seed=number, lengths=(7, 1 + number % 11, 11))
    for name in ("eager", "sdpa", "packed", "auto"):
        model.set_attn_implementation(name)
        model(**batch)
    optimize_for_inference(model)(**batch)
    model = prune_neurons(prune_heads(model, {number % 3: [number % 4]}), {number % 3: range(number % 37)})
    model.save_pretrained(folder / "pruned")
    again = BertModel.from_pretrained(folder / "pruned")
    assert again(**batch).last_hidden_state.equal(model(**batch).last_hidden_state)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_rounds_leave_no_memory_and_no_file_behind(tmp_path):
    make(vocab_size=5003).float().save_pretrained(tmp_path / "whole")
    seen = []
    for number in range(ROUNDS):
        run_round(number, tmp_path)
        gc.collect()
        seen.append(in_use())
    memory, files = zip(*seen, strict=True)
    assert memory[-1] - max(memory[:WARM]) < ALLOWED
    assert files[-1] <= files[0]
