"""bertlite/inference/clients/verification.py: a copy that computes another model is an error; a right one never is."""

import copy

import pytest
import torch
from conftest import HEADED, make, make_batch
from natively import DTYPES, dtypes, kernels_or_skip, make_native
from torch import Tensor, nn

import bertlite
import bertlite.pruning
from bertlite import BertModel, causal, drop_layers, head_importance, optimize_for_inference
from bertlite.inference import InferenceModel
from bertlite.inference.clients.verification import add_noise_, random_inputs, verify, verify_model
from bertlite.parity.command import demo_checkpoint
from bertlite.stack import modules
from bertlite.stack.attention import attend


@dtypes
def test_a_fault_that_no_look_at_the_modules_finds_is_an_error(dtype, monkeypatch):
    kernels_or_skip()
    model = make_native().float()
    monkeypatch.setattr(modules, "drop_by", lambda part, x: x / 2)
    with pytest.raises(RuntimeError, match=r"does not compute this model: .* differs by up to .*rounding explains"):
        optimize_for_inference(model, dtype=dtype, backend="native")
    assert optimize_for_inference(model, dtype=dtype, backend="native", verify=False).compute_dtype == dtype


def test_a_window_of_attention_is_seen(monkeypatch):
    """With one of 64 tokens on each side, shorter sequences are alike."""
    model = make_native(max_position_embeddings=100).float()

    def window(q: Tensor, k: Tensor) -> Tensor:
        queries, keys = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
        return -1e9 * ((queries[:, None] - keys).abs() >= 64)[None, None].float()

    monkeypatch.setattr(modules, "attend", lambda q, k, v, inputs, bias, p: attend(q, k, v, inputs, window, p))
    with pytest.raises(RuntimeError, match="does not compute this model"):
        optimize_for_inference(model, backend="native")


class Tagger(nn.Module):
    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert, self.scale = bert, 1.0

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.scale * self.bert(ids, mask).last_hidden_state


def test_what_is_around_an_encoder_is_run_too():
    model = Tagger(make_native().float()).eval()
    quick = optimize_for_inference(model, backend="plain")
    quick.scale = 1.001
    original = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="for random tokens output differs by"):
        verify(original, quick, [(original.bert, quick.bert)], [quick.bert.model])


@dtypes
def test_a_trained_model_with_a_layer_less_is_another(dtype):
    model = BertModel.from_pretrained(demo_checkpoint() or pytest.skip("the MiniLM checkpoint is not installed"))
    kernels_or_skip()
    quick = optimize_for_inference(model, dtype=dtype, backend="native")
    for layer in (0, 2, 5):
        less = optimize_for_inference(drop_layers(model, [layer]), dtype=dtype, backend=quick.backend, verify=False)
        with pytest.raises(RuntimeError, match="does not compute this model: for random tokens last_hidden_state"):
            verify_model(model, less)


@pytest.mark.parametrize("cls", [*HEADED, bertlite.BertLMHeadModel], ids=lambda cls: cls.__name__)
def test_every_class_is_verified_by_its_head_too(cls):
    decoder = {"is_decoder": True, "add_cross_attention": True} if cls is bertlite.BertLMHeadModel else {}
    model = make_native(cls, **decoder).float().train()
    quick = optimize_for_inference(model)
    assert model.training
    wrong = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, parameter in wrong.named_parameters():
            if not name.startswith("bert."):
                parameter.mul_(2)
    with pytest.raises(RuntimeError, match="logits differs by up to"):
        verify_model(model, InferenceModel(wrong, quick.backend, torch.float32))


def test_weights_of_another_precision_are_another_model():
    model = make_native().float()
    with pytest.raises(RuntimeError, match="does not compute this model"):
        verify_model(model, InferenceModel(copy.deepcopy(model).bfloat16().float(), "plain", torch.float32))


def test_each_run_has_noise_of_its_own():
    model = make_native().float()
    noisy = copy.deepcopy(model)
    add_noise_(noisy, [noisy], torch.bfloat16)
    inputs = random_inputs([model.config], model.device)
    first, second, wanted = (each(**inputs).last_hidden_state for each in (noisy, noisy, model))
    assert all(
        float((a - b).detach().abs().max()) > 1e-3 for a, b in ((first, wanted), (second, wanted), (first, second))
    )


def test_the_noise_of_two_numbers_may_be_small_by_chance():
    kernels_or_skip()
    torch.manual_seed(7)  # of 60 seeds the one by which it is
    model = make_native(bertlite.BertForSequenceClassification, num_labels=1).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
        for part in model.modules():
            if isinstance(part, torch.nn.LayerNorm):
                part.weight.fill_(1)
    assert optimize_for_inference(model, dtype=torch.int8, backend="native").compute_dtype == torch.int8


@pytest.mark.parametrize("scale", [0, 30])
def test_weights_of_any_size_pass(scale):
    """With large ones rounding errors reach the size of the outputs; and so do models of sizes of one."""
    model = make_native(num_hidden_layers=6).float()
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.mul_(scale)
    for dtype in DTYPES:
        optimize_for_inference(model, dtype=dtype)
    ones = dict.fromkeys(("max_position_embeddings", "vocab_size", "type_vocab_size"), 1)
    optimize_for_inference(make(**ones, num_hidden_layers=0).float())


def test_numbers_that_are_not_finite_are_refused():
    model = make_native().float()
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight[3, 3] = torch.nan
    with pytest.raises(ValueError, match=r"the model's own last_hidden_state is not finite .*or pass verify=False"):
        optimize_for_inference(model)
    quick = optimize_for_inference(model, verify=False)
    assert quick(**make_batch()).last_hidden_state.isnan().any()
    with pytest.raises(RuntimeError, match=r"does not compute this model: .* differs by up to nan"):
        verify_model(make_native().float(), quick)


def test_a_model_that_takes_other_inputs_says_how_to_go_on():
    class Own(BertModel):
        def forward(self, pixels: Tensor) -> Tensor:  # type: ignore[override]
            return pixels

    with pytest.raises(TypeError, match=r"Own does not run on tokens, .*: pass verify=False"):
        optimize_for_inference(Own(make_native().config))


CHANGES = {
    "prune_heads": lambda model: bertlite.prune_heads(model, {0: [1]}),
    "prune_neurons": lambda model: bertlite.prune_neurons(model, {0: [1]}),
    "drop_layers": lambda model: drop_layers(model, [0]),
    "compact": bertlite.pruning.compact,
    "densify": bertlite.pruning.densify,
    "head_importance": lambda model: head_importance(model, [make_batch()], target="kl"),
    "ablated": lambda model: causal.ablated(model, {0: [1]}).__enter__(),
    "resize": lambda model: model.resize_position_embeddings(50),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_or_reads_layers_refuses_an_optimised_model(change):
    quick = optimize_for_inference(make_native().float(), dtype=torch.float32, verify=False)
    with pytest.raises(TypeError, match=r"made by optimize_for_inference, .*change the original model"):
        CHANGES[change](quick.model)
    if change != "resize":
        with pytest.raises(TypeError, match="made by optimize_for_inference"):
            CHANGES[change](quick)
