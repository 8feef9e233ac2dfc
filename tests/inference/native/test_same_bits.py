"""bertlite/inference/native: float32 and reproducible int8 give the same bits on every processor."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_batch, tensors
from natively import ROTARY, make_native, native, natively
from torch import Tensor

from bertlite import BertForSequenceClassification, BertModel, optimize_for_inference
from bertlite.inference import InferenceModel
from bertlite.inference.checks import MIXED
from bertlite.parity.command import demo_checkpoint
from bertlite.runtime.library import INSTRUCTION_SETS, NativeKernelsError, load_kernels, usable_sets

pytestmark = native
GOLDEN = Path(__file__).with_name("native_bits.json")
DTYPES = (torch.float32, torch.int8)
SETS = [name for name in INSTRUCTION_SETS if INSTRUCTION_SETS[name].rounds_once]
MODELS: dict[str, dict[str, Any]] = {
    "more inputs than are summed at once": {"intermediate_size": 1700, "hidden_act": "gelu_new"},
    "heads of 48": {"hidden_size": 144, "num_attention_heads": 3, "intermediate_size": 101, "hidden_act": "silu"},
    "a width that fills no vector": {"hidden_size": 60, "num_attention_heads": 3, "hidden_act": "tanh"},
    "disentangled": {"position_embedding_type": "disentangled", "position_buckets": 8, "max_relative_positions": 40},
    "relative": {"position_embedding_type": "relative_key_query"},
    "bucketed": {"position_embedding_type": "bucketed"},
    "rotary": {**ROTARY, "hidden_size": 60, "num_attention_heads": 3, "local_attention": 20},
}
SAMPLE = make_batch(25, 40, lengths=(*range(16, 41),))  # to which int8 is fitted
# tokens with ids of MiniLM: sentences, and one of the longest length
TEXTS = ([101, 7592, 2088, 102], [101, 1037, 2158, 2003, 2652, 1996, 6108, 1012, 102], [101, *range(1000, 1510), 102])


def batches() -> list[dict[str, Any]]:
    """Return padded sequences and a batch of one length whose mask, gates and weights are asked for."""
    generator = torch.Generator().manual_seed(0)
    masked = {**make_batch(4), "attention_mask": torch.rand(4, 1, 11, 11, generator=generator) > 0.4}
    gates = torch.rand(3, 4, 1, generator=generator, dtype=torch.float64).expand(-1, -1, 5)
    return [make_batch(5, 40, lengths=(40, 33, 17, 2, 1)), {**masked, "head_mask": gates, "output_attentions": True}]


def outputs(model: BertModel, dtype: torch.dtype, name: str, sample: Any = None) -> list[Tensor]:
    quick, heads = natively(model, dtype, name, True, sample), model.config.num_attention_heads
    found = []
    for batch in batches():
        if "head_mask" in batch:
            batch["head_mask"] = batch["head_mask"][..., :heads].float()
        found += tensors(quick(**batch)).values()
    return found


@pytest.mark.parametrize(("dtype", "sample"), [*((each, None) for each in (*DTYPES, MIXED)), (torch.int8, SAMPLE)])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", SETS)
def test_every_set_of_instructions_gives_the_same_bits(name, kind, dtype, sample):
    model = make_native(**MODELS[kind])
    ours, wanted = (outputs(model, dtype, each, sample) for each in (name, "baseline_exact"))
    assert len(ours) == len(wanted) > 3
    for mine, theirs in zip(ours, wanted, strict=True):
        assert torch.equal(mine, theirs), f"{(mine != theirs).sum()} of {mine.numel()} numbers differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SETS)
def test_a_trained_model_gives_the_bits_of_every_other_machine(name, dtype):
    """`native_bits.json` holds their hashes, by dtype and number of tokens."""
    folder = demo_checkpoint() or pytest.skip("the MiniLM checkpoint is not installed")
    quick = natively(BertModel.from_pretrained(folder), dtype, name, reproducible=True)
    found = {str(len(ids)): digest(quick(torch.tensor([ids])).last_hidden_state) for ids in TEXTS}
    assert found == json.loads(GOLDEN.read_text())[str(dtype)]


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from test_same_bits import packed_bits
print(packed_bits())
"""


def packed_bits() -> list[str]:
    """Return a hash of the packed layers of models with tables of distances, in each dtype."""
    made = [make_native(num_hidden_layers=2, **MODELS[kind]).float() for kind in ("disentangled", "bucketed")]
    options: list[dict[str, Any]] = [{"dtype": dtype, "reproducible": True, "verify": False} for dtype in DTYPES]
    quick = [optimize_for_inference(model, **each) for model in made for each in options]
    return [digest(each.base_model.encoder.weights.data) for each in quick]


def test_weights_are_packed_to_the_same_bits_whatever_multiplies_and_adds():
    """MKL and torch do it in other orders there, as on another processor or for more threads."""
    rooms = [str(path) for path in Path(__file__).parents[:3]]
    other = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"}
    program = [sys.executable, "-c", PROGRAM.format(path=rooms)]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, **other})
    assert done.stdout.strip() == str(packed_bits()), done.stderr


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.float().numpy().tobytes()).hexdigest()[:16]


def test_what_is_saved_stays_reproducible(tmp_path, monkeypatch):
    monkeypatch.delenv("BERTLITE_NATIVE", raising=False)  # which may name a set that is not
    model = make_native(BertForSequenceClassification).float()
    quick = optimize_for_inference(model, dtype=torch.int8, reproducible=True)
    quick.save(tmp_path)
    again, batch = InferenceModel.load(tmp_path), make_batch()
    assert again.model.bert.encoder.kernels is quick.model.bert.encoder.kernels is load_kernels(reproducible=True)
    assert torch.equal(again(**batch).logits, quick(**batch).logits)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("plain", torch.float32), ("plain", torch.int8), ("auto", torch.bfloat16)]
)
def test_what_is_not_reproducible_is_refused(backend, dtype):
    with pytest.raises(ValueError, match=f"{dtype} of backend '{backend}' is not reproducible: use float32 or int8"):
        optimize_for_inference(make_native().float(), dtype=dtype, backend=backend, reproducible=True)


def test_a_set_that_rounds_twice_is_not_taken(monkeypatch):
    monkeypatch.setattr("bertlite.runtime.library.processor_flags", frozenset)
    monkeypatch.delenv("BERTLITE_NATIVE", raising=False)
    twice = [each.name for each in usable_sets() if not each.rounds_once]
    assert usable_sets(reproducible=True)[-1].name == "baseline_exact"
    assert not {*twice} & {each.name for each in usable_sets(reproducible=True)}
    for name in twice:
        monkeypatch.setenv("BERTLITE_NATIVE", name)
        with pytest.raises(NativeKernelsError, match=f"BERTLITE_NATIVE='{name}' rounds twice"):
            load_kernels(reproducible=True)
