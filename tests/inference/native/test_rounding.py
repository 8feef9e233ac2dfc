"""bertlite/inference/native/rounding.py: weights that are fitted to texts are nearer to the model."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from conftest import DISENTANGLED, assert_same, make_batch, tensors
from natively import ROTARY, kernels_or_skip, make_native, native, natively
from torch import Tensor

import bertlite
from bertlite import BertForSequenceClassification, BertForTokenClassification, optimize_for_inference
from bertlite.inference import InferenceModel
from bertlite.inference.native import rounding
from bertlite.inference.native.conversion import native_copy
from bertlite.inference.native.rounding import DAMPING, Rounded, fit, gram_matrix, read_sample, rotated, round_for
from bertlite.parity.compare import rms_distance
from bertlite.runtime.shapes import BLOCKS

pytestmark = native
SAMPLE = make_batch(60, 40, 7, lengths=tuple(range(11, 41)) * 2)
WIDE = {"hidden_size": 144, "num_attention_heads": 3, "intermediate_size": 101}  # heads of 48; neither is whole 64
MODELS: dict[str, dict[str, Any]] = {
    "heads of 48": WIDE,
    "padded heads": {"hidden_size": 120, "num_attention_heads": 3, "intermediate_size": 131},
    "disentangled": {**WIDE, "position_embedding_type": "disentangled", **DISENTANGLED},
    "rotary": {**WIDE, **ROTARY},
    "relative": {**WIDE, "position_embedding_type": "relative_key_query"},
    "bucketed": {**WIDE, "position_embedding_type": "bucketed"},
}


def trained(model: Any) -> Any:
    """Make the numbers of a random model as in trained ones: some inputs are much larger, and most go together."""
    random = torch.Generator().manual_seed(0)
    for name, x in model.named_parameters():
        if x.dim() == 2:
            x.data = 0.05 * torch.randn(x.shape, generator=random, dtype=x.dtype)
        elif name.endswith("LayerNorm.weight"):
            x.data = torch.randn(x.shape, generator=random, dtype=x.dtype).exp()
    words = model.base_model.embeddings.word_embeddings.weight
    words.data = words.data[:, :8] @ torch.randn(8, words.shape[1], generator=random, dtype=words.dtype)
    return model


def error(quick: InferenceModel, model: Any, inputs: Mapping[str, Any]) -> float:
    with torch.no_grad():
        found, truth = quick(**inputs), model(**inputs)
    return sum(rms_distance(a, b) for a, b in zip(tensors(found).values(), tensors(truth).values(), strict=True))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_fitted_model_is_nearer(kind: str, cut: bool) -> None:
    model = trained(make_native(**MODELS[kind], attn_implementation="eager"))
    if cut:  # a layer without heads, and one without neurons
        model = bertlite.prune_neurons(
            bertlite.prune_heads(model, {0: range(3), 1: [1]}), {0: [0, 36], 1: range(model.config.intermediate_size)}
        )
    batch = make_batch(80, 40, 3, lengths=(*range(1, 41),) * 2)  # of five texts chance decides
    plain, fitted = (natively(model, torch.int8, sample=sample) for sample in (None, SAMPLE))
    for options in ({}, {"first_token_only": True}):
        assert error(fitted, model, {**batch, **options}) < 0.97 * error(plain, model, {**batch, **options})
    assert fitted.config == model.config
    assert (plain.rounding, str(fitted.rounding).partition(" of ")[2]) == (
        "plain",
        "8 matrices" if cut else "12 matrices",
    )


@pytest.mark.parametrize("head", [BertForSequenceClassification, BertForTokenClassification])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_and_models_of_other_dtypes_are_fitted_and_stay_as_they_were(head: Any, dtype: torch.dtype) -> None:
    model = trained(make_native(head, **WIDE)).to(dtype).train()
    before, batch = {name: x.clone() for name, x in model.state_dict().items()}, make_batch(40, lengths=(11,) * 40)
    plain, fitted = (optimize_for_inference(model, dtype=torch.int8, sample=sample) for sample in (None, SAMPLE))
    truth = model.eval().double()
    assert error(fitted, truth, batch) < 0.95 * error(plain, truth, batch)
    assert repr(fitted).startswith(
        "InferenceModel(\n  backend='native', dtype=torch.int8, rounding='fitted in 12 of 12"
    )
    assert all(torch.equal(before[name], x.to(dtype)) for name, x in model.state_dict().items())
    with pytest.raises(ValueError, match=r"sample is for int8, and the dtype is torch\.float32: leave it out"):
        optimize_for_inference(model, dtype=torch.float32, sample=SAMPLE)


def test_columns_take_up_the_errors_of_those_before() -> None:
    """As the paper has it: with the inverse of the Gram matrix, column by column."""
    random = torch.Generator().manual_seed(0)
    target = 30 * torch.randn(7, 75, generator=random, dtype=torch.float64)
    x = torch.randn(300, 75, generator=random) @ torch.randn(75, 75, generator=random)
    gram = gram_matrix(x)
    assert torch.allclose(gram, x.double().T @ x.double(), atol=0.1)
    damped = gram + DAMPING * gram.diagonal().mean() * torch.eye(75)
    order = gram.diagonal().argsort(descending=True)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True)
    left, wanted = target[:, order].clone(), torch.empty_like(target)
    for i, column in enumerate(order):
        wanted[:, column] = left[:, i].round()
        off = (left[:, i] - wanted[:, column]) / upper[i, i]
        left[:, i:] -= off[:, None] * upper[i, i:]
    assert torch.equal(round_for(target, gram), wanted.char())


def test_a_matrix_whose_error_does_not_fall_keeps_its_plain_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(50, 128, generator=random), torch.randn(500, 128, generator=random)
    x @= torch.randn(128, 128, generator=random)
    held_out = torch.arange(500) % 5 == 4
    assert fit(weight, x, held_out) is not None
    x[:, 0] = torch.where(held_out, 1e3, 1e-3)
    assert fit(weight, x, held_out) is None
    assert fit(weight, x.fill_(torch.nan), held_out) is None

    monkeypatch.setattr(rounding, "fit", lambda *_: None)
    model = make_native(**WIDE)
    plain, kept = (natively(model, torch.int8, sample=sample) for sample in (None, SAMPLE))
    assert_same(kept(**make_batch()), plain(**make_batch()), atol=0)
    assert kept.rounding == "fitted in 0 of 12 matrices"


def test_integers_are_packed_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of every machine hold the same integers, scales, sums and factors."""
    seen: list[tuple[Tensor, Rounded]] = []

    def noted(weight: Tensor, x: Tensor, held_out: Tensor) -> Rounded:
        found = Rounded(
            torch.randint(-127, 128, weight.shape, dtype=torch.int8),
            torch.rand(len(weight)) + 0.5,
            torch.rand(weight.shape[1]) + 0.5,
        )
        seen.append((weight, found))
        return found

    monkeypatch.setattr(rounding, "fit", noted)
    model = make_native(**WIDE)
    packed = native_copy(model, torch.int8, kernels_or_skip("baseline"), SAMPLE).base_model.encoder.weights
    weights = packed.in_blocks(BLOCKS[0])
    assert len(seen) == 12
    for place, (weight, found) in enumerate(seen):
        i, name = place // 4, ("qkv", "output", "up", "down")[place % 4]
        outputs, inputs = weight.shape
        laid = weights.tensors()[f"layer {i} {name} words"].view(-1, -(-inputs // 4), 8, 4)  # 8 outputs in a block
        assert torch.equal(laid.transpose(1, 2).flatten(2).flatten(0, 1)[:outputs, :inputs], found.integers)
        assert torch.equal(weights.part(i, name, "scales")[:outputs], found.scales)
        assert torch.equal(weights.part(i, name, "sums")[:outputs], found.integers.sum(1).float() * found.scales)
        whole = inputs // 64 * 64
        assert torch.equal(weights.part(i, name, "factors")[:whole], found.factors[:whole] / 8)
        assert torch.equal(weights.part(i, name, "factors")[whole:inputs], found.factors[whole:])
    for blocks in BLOCKS:
        assert torch.equal(weights.in_blocks(blocks).in_blocks(BLOCKS[0]).data, weights.data)


def test_the_rotation_is_its_own_inverse_and_leaves_the_rest() -> None:
    for width in (0, 5, 64, 150):
        x = torch.randn(3, width, dtype=torch.float64)
        assert torch.allclose(rotated(rotated(x)), x)
        assert torch.equal(rotated(x)[:, width // 64 * 64 :], x[:, width // 64 * 64 :])


def test_a_tokenizers_output_is_a_sample_without_its_padding_and_a_large_one_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_native().config
    given = {
        "input_ids": torch.tensor([[5, 6, 0]] * 6),
        "token_type_ids": [[0, 1, 0]] * 6,
        "attention_mask": torch.tensor([[1, 1, 0]] * 6),
    }
    assert read_sample(given, config) == [[(5, 0), (6, 1)]] * 6
    assert read_sample([[7, 8], *[[5] * 99] * 5, []], config) == [[(7, 0), (8, 0)], *[[(5, 0)] * 40] * 5]
    monkeypatch.setattr(rounding, "MOST_TOKENS", 11 + 12 + 13 + 14 + 15 + 16)
    assert len(read_sample(SAMPLE, config)) == 6


@pytest.mark.parametrize(
    ("sample", "fault"),
    [
        ([], "has 0 texts; a hundred are better, and 5 the fewest"),
        ([[5]] * 4 + [[]], "has 4 texts; a hundred are better, and 5 the fewest"),
        ([[5], [6, -3]], "has token id -3"),
        ({"input_ids": [[5]], "token_type_ids": [[-1]]}, "has segment -1"),
        (["a text"], r"is \['a text'\]"),
        ({"ids": [[5]]}, "is {'ids': .*}"),
        ({"input_ids": [[5]], "token_type_ids": [[0, 0]]}, "is {'input_ids': .*}"),
        ([5, 6], r"is \[5, 6\]"),
        ([[1.5]], r"is \[\[1.5\]\]"),
    ],
)
def test_a_sample_that_is_none_is_refused(sample: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"^sample .*{fault}; give token ids of texts, from 0 to 96, or a tok"):
        optimize_for_inference(make_native(), dtype=torch.int8, sample=sample)
