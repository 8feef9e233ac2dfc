"""bertlite/inference/native/mixed.py: layers that round most are in floats, and all others are of 8-bit integers."""

from itertools import pairwise

import pytest
import torch
from natively import check, make_native, native, natively, pruned

from bertlite import optimize_for_inference
from bertlite.inference.native import mixed
from bertlite.inference.support import MIXED
from bertlite.runtime.structs import Batch, Layer

pytestmark = native


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("layer", range(4))
def test_the_layer_that_rounds_most_is_in_floats(layer, reproducible):
    model = make_native(num_hidden_layers=4).float()
    with torch.no_grad():
        for i, each in enumerate(model.encoder.layer):
            if i != layer:  # it adds nothing
                each.attention.output.dense.weight.zero_()
                each.output.dense.weight.zero_()
    shape = natively(model, MIXED, reproducible=reproducible).model.encoder.weights.shape
    assert (shape.kept, shape.floats) == ((layer,), "float32" if reproducible else "bfloat16")


@pytest.mark.parametrize(("layers", "kept"), [(1, 1), (6, 2), (9, 3), (12, 3)])
def test_one_layer_in_four_is_in_floats(layers, kept):
    shape = natively(make_native(num_hidden_layers=layers), MIXED).model.encoder.weights.shape
    assert len(shape.kept) == kept


@pytest.mark.parametrize("name", ["avx512_bf16", "avx2", "baseline"])
def test_every_input_that_other_dtypes_take(name, batch):
    gates = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    model = pruned(make_native(position_embedding_type="relative_key"))
    check(model, MIXED, name, **batch, head_mask=gates, output_attentions=True, output_hidden_states=True)
    check(make_native(), MIXED, name, **batch)


@pytest.mark.parametrize("layer", range(3))
def test_layers_in_one_call_give_the_bits_of_one_call_each(layer, batch, monkeypatch):
    monkeypatch.setattr(mixed, "rounding_errors", lambda *_: [float(i == layer) for i in range(3)])
    quick = natively(make_native(), MIXED)
    whole, shape = quick.model.encoder.weights.model, quick.model.encoder.weights.shape
    assert shape.kept == (layer,)
    states = quick(batch["input_ids"], output_hidden_states=True).hidden_states
    for i, (x, wanted) in enumerate(pairwise(states)):
        found, one = torch.empty_like(wanted), shape.describe(quick.model.encoder.weights.data.data_ptr())
        one.layers, one.layer_count = (Layer * 1)(whole.layers[i]), 1
        starts = torch.arange(0, x[..., 0].numel() + 1, x.shape[1])
        given = Batch(tokens=x[..., 0].numel(), sequences=len(x), starts=starts.data_ptr(), hidden=x.data_ptr())
        given.output = found.data_ptr()
        quick.model.encoder.kernels.run(one, given, 1)
        assert torch.equal(found, wanted), f"layer {i}"
    out = quick(batch["input_ids"])
    assert torch.equal(out.pooler_output, quick.model.pooler(out.last_hidden_state))


def test_errors_are_measured_on_the_texts_that_are_given(monkeypatch):
    given, model, holder = [], make_native().float(), torch.nn.Sequential()
    monkeypatch.setattr(mixed, "rounding_errors", lambda x, lengths, *_: given.append((x, lengths)) or [1.0, 0.0, 0.0])
    holder.body, holder.tokenizer = model, lambda texts, **_: {"input_ids": [[2, 3], [], [5] * 99, [10**6]]}
    optimize_for_inference(holder, dtype=MIXED)
    optimize_for_inference(model, dtype=MIXED, sample=[[7, 8, 9]])
    optimize_for_inference(model, dtype=MIXED)
    assert [lengths for _, lengths in given] == [[2, 40, 1], [3], [40] * 8]
    assert torch.equal(given[1][0], model.embeddings(torch.tensor([[7, 8, 9]]))[0])


@pytest.mark.parametrize(
    ("sample", "fault"),
    [
        ([], "is empty"),
        ([[]], "is empty"),
        ([[5], [6, -3]], "has token id -3"),
        (["a text"], r"is \['a text'\]"),
        ({"input_ids": [[5]]}, "is {'input_ids': .*}"),
        ([5, 6], r"is \[5, 6\]"),
        ([[1.5]], r"is \[\[1.5\]\]"),
    ],
)
def test_a_sample_that_the_model_cannot_embed_is_refused(sample, fault):
    with pytest.raises(ValueError, match=rf"^sample .*{fault}; give token ids of texts, from 0 to 96$"):
        optimize_for_inference(make_native(), dtype=MIXED, sample=sample)


def test_a_tensor_of_token_ids_is_a_sample():
    model, ids = make_native(), [[7, 8, 9], [5, 6, 4]]
    found = [optimize_for_inference(model, dtype=MIXED, sample=each) for each in (ids, torch.tensor(ids))]
    assert len({each.model.base_model.encoder.weights.shape.kept for each in found}) == 1
