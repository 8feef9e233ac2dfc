"""Another default dtype or device of torch changes no result: what converts, loads or copies names its own."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import assert_same, inputs_of, make_batch
from natively import kernels_or_skip, make_native

from bertlite import BertForSequenceClassification, BertModel, optimize_for_inference
from bertlite.inference import InferenceModel

DEFAULTS = ("float64", "bfloat16", "meta")


@contextmanager
def default(name: str) -> Iterator[None]:
    """Let torch have another default dtype, or make tensors on the meta device, where nothing says otherwise."""
    if name == "meta":
        with torch.device("meta"):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize(
    ("dtype", "positions"),
    [(torch.float32, "absolute"), (torch.bfloat16, "disentangled"), (torch.int8, "absolute")],
    ids=str,
)
def test_an_optimised_model_is_the_same_under_another_default(
    name: str, dtype: torch.dtype, positions: str, tmp_path: Path
) -> None:
    kernels_or_skip()
    model = make_native(BertForSequenceClassification, position_embedding_type=positions).float()
    batch = make_batch()
    quick = optimize_for_inference(model, dtype=dtype, backend="native")
    quick.save(tmp_path)
    pickled, wanted = pickle.dumps(quick), quick(**batch).logits
    ways = (
        lambda: InferenceModel.load(tmp_path),
        lambda: pickle.loads(pickled),
        lambda: copy.deepcopy(quick),
        lambda: optimize_for_inference(model, dtype=dtype, backend="native"),
        lambda: optimize_for_inference(model, dtype=dtype, backend="native", verify=False),
    )
    for way in ways:
        with default(name):
            found = way()
            inside = found(**batch).logits
        assert_same(inside, wanted, atol=0)
        assert_same(found(**batch).logits, wanted, atol=0)


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_model_is_loaded_as_its_file_has_it(name: str, tmp_path: Path) -> None:
    model, batch = make_native(BertModel).float(), inputs_of()
    model.save_pretrained(tmp_path)
    with default(name):
        loaded = BertModel.from_pretrained(tmp_path)
        found = loaded(**batch).last_hidden_state
    assert_same(loaded.state_dict(), model.state_dict(), atol=0)
    assert_same(found, model(**batch).last_hidden_state, atol=0)
