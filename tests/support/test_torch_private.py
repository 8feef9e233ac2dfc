"""bertlite/support/torch_private.py: whatever private name torch drops, bertlite is imported and computes the same."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from conftest import make, make_batch

import bertlite
from bertlite.stack.layouts import is_mapped
from bertlite.support import torch_private

PACKAGE = Path(bertlite.__file__).parent
PRIVATE = re.compile(r"torch(\.\w+)*\._[a-zA-Z]|torch\.ops\.(mkldnn|onednn)|from torch[\w.]* import .*\b_[a-z]")
NAMES = sorted(torch_private.FALLBACKS)


@pytest.fixture
def without() -> Iterator[Callable[[str], None]]:
    """Take a name out of torch; operators, which torch makes when they are read, become None."""
    patch = pytest.MonkeyPatch()

    def remove(path: str) -> None:
        place, _, name = path.rpartition(".")
        owner = attrgetter(place)(torch) if place else torch
        if path.startswith("ops."):
            patch.setattr(owner, name, None)
        else:
            patch.delattr(owner, name)
        importlib.reload(torch_private)

    yield remove
    patch.undo()
    importlib.reload(torch_private)


@pytest.mark.parametrize("path", NAMES)
def test_without_a_name_everything_computes_the_same(path, without):
    model, batch = make().float(), make_batch()
    packed = make(attn_implementation="packed").float()
    wanted = [run(**batch).last_hidden_state for run in (model, packed)]
    without(path)
    for run, want in zip((model, packed), wanted, strict=True):
        assert torch.equal(run(**batch).last_hidden_state, want)
    assert not is_mapped(batch["input_ids"])
    with pytest.raises(ValueError, match="attention_mask holds 2"):
        model(**{**batch, "attention_mask": batch["attention_mask"] * 2})
    torch_private.assert_async(torch.tensor(True), "it is so")


def test_what_takes_the_place_of_an_assertion_waits_and_raises(without):
    without("_assert_async")
    with pytest.raises(RuntimeError, match="it is not so"):
        torch_private.assert_async(torch.tensor(False), "it is not so")


def test_bertlite_is_imported_without_any_of_them():
    code = (
        "import torch\n"
        "from operator import attrgetter\n"
        f"for path in {[name for name in NAMES if not name.startswith('ops.')]}:\n"
        "    place, _, name = path.rpartition('.')\n"
        "    delattr(attrgetter(place)(torch) if place else torch, name)\n"
        "from bertlite import BertConfig, BertModel, optimize_for_inference\n"
        "config = BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)\n"
        "print(BertModel(config)(torch.ones(2, 3, dtype=torch.long)).last_hidden_state.shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([2, 3, 32])\n"


def test_no_other_module_names_what_is_private_to_torch():
    others = {
        f"{path.relative_to(PACKAGE)}:{i}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "torch_private.py"
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PRIVATE.search(line)
    }
    assert others == set()
    samples = ("torch._C.x", "torch.ops.mkldnn.data_ptr", "from torch.utils import _pytree", "import torch._dynamo")
    assert all(map(PRIVATE.search, samples))
