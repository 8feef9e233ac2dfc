"""bertlite/inference/clients/bodies.py: encoders of transformers, and their holders, run optimised in their place."""

import copy
import pickle
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import EXACT, F64, SIZES, assert_same, randomise_
from natively import assert_near, kernels_or_skip
from torch import nn

import bertlite
from bertlite import optimize_for_inference
from bertlite.inference.clients.bodies import OptimizedBody
from bertlite.inference.clients.verification import layer_list
from bertlite.parity.reference import unrounded

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("bertlite.hf")

only_5 = pytest.mark.skipif(not hf.compat.V5, reason="about transformers 5")
SIZE = {name: size for name, size in SIZES.items() if name != "type_vocab_size"}
HEADS = {
    "Bert": "ForTokenClassification", "Roberta": "ForSequenceClassification", "XLMRoberta": "ForMaskedLM",
    "Camembert": "ForTokenClassification", "Data2VecText": "Model", "Ernie": "ForSequenceClassification",
    "Electra": "ForSequenceClassification", "DistilBert": "ForTokenClassification", "MPNet": "Model",
    "DebertaV2": "ForSequenceClassification", "RobertaPreLayerNorm": "ForTokenClassification",
    "XLMRobertaXL": "Model", "MegatronBert": "ForSequenceClassification", "ModernBert": "ForSequenceClassification",
    "NomicBert": "ForSequenceClassification", "Gte": "Model", "JinaEmbeddingsV3": "ForTokenClassification",
}  # fmt: skip
HEADS = {family: head for family, head in HEADS.items() if hasattr(transformers, f"{family}Config")}
TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
OWN = {
    "Electra": {"embedding_size": 21},
    "DebertaV2": {
        "relative_attention": True, "pos_att_type": "p2c|c2p", "share_att_key": True, "position_buckets": 6,
        "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    },
    "ModernBert": {"local_attention": 6, "classifier_pooling": "mean", **TOKENS},
    "Gte": {"pad_token_id": 0},
    "JinaEmbeddingsV3": {"pad_token_id": 0},
}  # fmt: skip
ROTARY = ("ModernBert", "NomicBert", "Gte", "JinaEmbeddingsV3")
DISTIL = {"dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 37, "vocab_size": 97, "max_position_embeddings": 40}


def model_of(family: str, **changes: Any) -> Any:
    """Make a random model of transformers in eval mode."""
    sizes = DISTIL if family == "DistilBert" else {**SIZE, **OWN.get(family, {})}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    return randomise_(getattr(transformers, family + HEADS[family])(config)).eval()


def batch_of(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 97, (3, 11))
    mask = (torch.arange(11) < torch.tensor([[11], [7], [4]])).long()
    return {"input_ids": ids.where(mask == 1, model.config.pad_token_id), "attention_mask": mask}


def real(x: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what an output says of tokens, if it says it of each position."""
    mask = batch["attention_mask"]
    return x[mask == 1] if x.shape[:2] == mask.shape else x


@pytest.mark.parametrize("family", HEADS)
def test_each_family_computes_what_it_did(family: str) -> None:
    if family == "ModernBert" and not hf.compat.V5:
        pytest.skip("in transformers 4 its float64 is float32 in more places")
    model = model_of(family).to(F64)
    model.set_attn_implementation("eager")  # the only one that returns attentions in 5
    before = {name: x.clone() for name, x in model.state_dict().items()}
    finite = family != "ModernBert"  # its eager softmax is float32, where the mask of float64 overflows
    quick, batch = optimize_for_inference(model, backend="plain", verify=finite), batch_of(model)
    options = {"output_hidden_states": True, "output_attentions": True}
    with unrounded(model):
        theirs = model(**batch, **options)
    ours = quick(**batch, **options)
    assert type(ours) is type(theirs)
    assert list(ours.keys()) == [name for name, x in theirs.items() if x != ()]
    assert_same(real(ours[0], batch), real(theirs[0], batch))
    last = -1 if family == "RobertaPreLayerNorm" and not hf.compat.V5 else None  # in 4 its norm is behind the encoder
    for mine, stock in [*zip(ours.hidden_states, theirs.hidden_states, strict=True)][:last]:
        assert_same(real(mine, batch), real(stock, batch))
    for mine, stock in zip(ours.attentions, theirs.attentions, strict=True):
        keys = batch["attention_mask"][:, None, :, None] == 1
        assert_same(mine * keys, stock * keys)
    packed = quick(**batch)  # without attentions padding is left out
    assert_same(real(packed[0], batch), real(theirs[0], batch))
    theirs, ours = (m(**batch, return_dict=False) for m in (model, quick))
    assert [type(x) for x in ours] == [type(x) for x in theirs]
    assert_same(model.state_dict(), before, atol=0)
    again = optimize_for_inference(model, backend="plain", verify=finite)
    assert_same(again(**batch)[0], packed[0], atol=0)  # after its hooks


@pytest.mark.parametrize("family", HEADS)
def test_each_family_runs_on_the_kernels(family: str) -> None:
    kernels_or_skip()
    model = model_of(family)
    batch = batch_of(model)
    quick, exact = optimize_for_inference(model, backend="native"), copy.deepcopy(model).to(F64)
    ours = quick(**batch)[0]
    assert_near(*({"out": real(each(**batch)[0], batch)} for each in (quick, model, exact)))
    for copied in (copy.deepcopy(quick), pickle.loads(pickle.dumps(quick))):
        assert_same(copied(**batch)[0], ours, atol=0)
    small = optimize_for_inference(model, dtype=torch.int8)(**batch)[0]  # verified when it was made
    assert small.dtype == torch.float32


@pytest.mark.parametrize("name", ["eager", "auto", "packed"])
def test_a_model_of_hf_keeps_its_heads_and_attention_that_were_chosen_after_it_was_made(name: str) -> None:
    model = randomise_(hf.BertForTokenClassification(transformers.BertConfig(**SIZE))).eval().to(F64)
    model.prune_heads({0: range(4), 1: [1, 3]})
    model.set_attn_implementation(name)
    quick, batch = optimize_for_inference(model, backend="plain"), batch_of(model)
    assert_same(real(quick(**batch).logits, batch), real(model(**batch).logits, batch))
    assert type(quick) is type(model)
    assert type(quick.bert) is OptimizedBody
    assert quick.bert.config.pruned_heads == model.config.pruned_heads


def test_what_changes_nothing_works_and_what_would_says_how_to_go_on() -> None:
    model = model_of("Bert")
    quick, batch = optimize_for_inference(model, backend="plain"), batch_of(model)
    before = quick(**batch).logits
    same = quick.to("cpu").cpu().float().eval().share_memory().to(torch.float32)
    assert_same(same(**batch).logits, before, atol=0)
    assert not quick.bert(**batch)[0].requires_grad
    assert (quick.bert.device.type, quick.bert.dtype) == ("cpu", torch.float32)
    ids, learns = batch["input_ids"], copy.deepcopy(quick).requires_grad_()
    for error, says, change in (
        *((RuntimeError, "move the original, and optimise that", each) for each in (quick.half, quick.double)),
        (RuntimeError, "move the original, and optimise that", lambda: quick.to("meta")),
        (RuntimeError, "train the original", quick.train),
        (RuntimeError, "gradients: train the original", lambda: learns(**batch)),
        (AttributeError, "has no 'encoder': keep the original", lambda: quick.bert.encoder),
        (RuntimeError, "save the original", quick.state_dict),
        (RuntimeError, "load into the original", lambda: quick.load_state_dict(model.state_dict())),
        (TypeError, "does not support encoder_hidden_states", lambda: quick.bert(ids, encoder_hidden_states=ids)),
        (TypeError, r"takes \d+ arguments, not 40", lambda: quick.bert(*[None] * 40)),
        (TypeError, "does not support is_causal", lambda: quick.bert(ids, is_causal=True)),
        (TypeError, "output_hidden_states is", lambda: quick.bert(ids, output_hidden_states=[1])),
        (TypeError, "bert is optimised already", lambda: optimize_for_inference(quick)),
    ):
        with pytest.raises(error, match=says):
            change()
    with torch.no_grad():
        assert_same(learns(**batch).logits, before, atol=0)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def alter(part: str, name: str, value: Any) -> Any:
    return lambda bert: setattr(bert.get_submodule(part), name, value)


def configure(name: str, value: Any) -> Any:
    return lambda bert: setattr(bert.config, name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda bert: bert.encoder.layer[2].train(), r"bert\.encoder\.layer\.2.* is in training mode; call \.eval"),
        (
            alter("encoder.layer.1.output", "dense", Scaled(37, 48).eval()),
            r"bert\.encoder\.layer\.1\.output\.dense is a .*Scaled, which would not be run: merge adapters",
        ),
        (
            configure("_attn_implementation", "mine"),
            "bert has attention 'mine', which would not be run; set it to 'sdpa'",
        ),
        (
            lambda bert: bert.encoder.layer[0].register_forward_hook(lambda *_: None),
            r"bert\.encoder\.layer\.0 has hooks, which would not be run: remove it first",
        ),
        (configure("is_decoder", True), "bert is a decoder"),
        (configure("is_causal", True), "bert is a decoder"),
        (lambda bert: bert.compile(), "bert was compiled by torch.compile: pass the model as it was before"),
        (lambda model: model.dropout.train(), "dropout is in training mode; call"),
        # what a config does not say of the modules
        (alter("embeddings.LayerNorm", "eps", 0.5), r"bert\.embeddings\.LayerNorm has eps 0\.5, where its config"),
        (alter("encoder.layer.1.output.LayerNorm", "eps", 0.5), r"layer\.1\.output\.LayerNorm has eps 0\.5"),
        (alter("encoder.layer.0.attention.self", "num_attention_heads", 2), r"self has num_attention_heads 2"),
        (alter("encoder.layer.0.intermediate", "intermediate_act_fn", nn.ReLU().eval()), "act_fn has class .*ReLU"),
        (alter("embeddings", "token_type_ids", torch.ones(1, 40).long()), "other values in token_type_ids"),
        (alter("embeddings", "position_ids", torch.arange(40).flip(0)[None]), "other values in position_ids"),
        (configure("layer_norm_eps", 0.5), "LayerNorm has eps 1e-12, where its config makes 0.5"),
        (lambda bert: bert.embeddings.register_buffer("more", torch.ones(1), persistent=False), "buffer 'more'"),
        (
            alter("encoder.layer.1.output.dense", "bias", None),
            "is not the BERT of its config; set there the fields that a line says to pass",
        ),
    ],
)
def test_what_would_not_be_run_is_refused_by_name(change: Any, message: str) -> None:
    model = model_of("Bert")
    change(model if "dropout" in message else model.bert)
    with pytest.raises((TypeError, ValueError), match=message):
        optimize_for_inference(model, backend="plain", verify=False)


def test_the_forward_of_its_class_on_a_module_is_no_other_and_anything_else_is() -> None:
    model = model_of("Bert")
    first, second = model.bert.encoder.layer[:2]
    model(**batch_of(model), output_hidden_states=True)
    first.forward = first.forward  # as transformers 5.0 leaves it after it has recorded hidden states
    optimize_for_inference(model, backend="plain")
    for other in (second.forward, lambda *args, **kwargs: type(first).forward(first, *args, **kwargs)):
        first.forward = other
        with pytest.raises(TypeError, match=r"layer\.0 has a forward of its own"):
            optimize_for_inference(model, backend="plain")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT's own code
def test_an_adapter_around_a_model_is_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZE))
    config = peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
    with pytest.raises(TypeError, match=r"is a peft\..*an adapter that would not be run: merge it first"):
        optimize_for_inference(peft.get_peft_model(model, config).eval())


def test_the_copy_has_a_config_of_its_own_and_obeys_it() -> None:
    model = model_of("Bert", attn_implementation="eager")
    quick, batch = optimize_for_inference(model, backend="plain"), batch_of(model)
    assert quick.config is quick.bert.config is not model.config
    quick.config.output_hidden_states = quick.config.output_attentions = True
    out, ids = quick(**batch), batch["input_ids"]
    assert len(out.hidden_states) == 1 + len(out.attentions) == 4
    quick.config.output_hidden_states = False
    model.config.output_hidden_states = True
    assert quick(**batch).hidden_states is None
    quick.config.return_dict = False
    assert type(quick.bert(ids)) is tuple
    quick.config.is_decoder = True
    with pytest.raises(RuntimeError, match="no causal attention"):
        quick.bert(ids)


@only_5
def test_keywords_that_the_original_ignores_are_ignored_and_those_it_reads_are_not() -> None:
    model = model_of("Electra")
    quick, batch = optimize_for_inference(model, backend="plain"), batch_of(model)
    theirs = model(**batch, labels=torch.tensor([0, 1, 1]), num_items_in_batch=3, anything=1)
    ours = quick(**batch, labels=torch.tensor([0, 1, 1]), num_items_in_batch=3, anything=1)
    torch.testing.assert_close(ours.loss, theirs.loss)
    with pytest.raises(TypeError, match="does not support is_causal"):
        quick(**batch, is_causal=True)
    gates, segments = torch.tensor([[0.0, 1.0, 0.0, 1.0]] * 3), torch.ones_like(batch["input_ids"])
    for family, unread in (("Electra", {"head_mask": gates}), ("DistilBert", {"token_type_ids": segments[:, None]})):
        model = model_of(family).to(F64)
        batch = {name: x for name, x in batch_of(model).items() if name not in unread}
        quick = optimize_for_inference(model, backend="plain")
        assert_same(real(quick(**batch, **unread)[0], batch), real(model(**batch, **unread)[0], batch))


def test_gradients_to_inputs_are_an_error() -> None:
    x = torch.randn(2, 5, 48, requires_grad=True)
    core = bertlite.BertModel(bertlite.BertConfig(**SIZE))
    for quick in (optimize_for_inference(each, backend="plain") for each in (model_of("Bert"), core)):
        with pytest.raises(RuntimeError, match=r"no gradients: train the original, or run this under torch\.no_grad"):
            quick(inputs_embeds=x)
        with torch.no_grad():
            assert not quick(inputs_embeds=x)[0].requires_grad


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "MPNet", *(each for each in HEADS if each in ROTARY)])
def test_the_layers_that_are_there_count_and_are_run_in_chunks(family: str) -> None:
    model = model_of(family, chunk_size_feed_forward=11).to(F64)
    del layer_list(model.base_model)[2:]
    quick, batch = optimize_for_inference(model, backend="plain"), batch_of(model)
    with unrounded(model) if hf.compat.V5 else nullcontext():
        wanted = model(**batch)[0]
    within = EXACT if hf.compat.V5 or family != "ModernBert" else 1e-5  # which is float32 in places
    assert_same(real(quick(**batch)[0], batch), real(wanted, batch), atol=within)


@pytest.mark.filterwarnings("ignore:.*activation_checkpointing:FutureWarning")  # the name of 4.57 too
def test_hooks_that_gradient_checkpointing_leaves_are_passed_over() -> None:
    model = model_of("Bert").to(F64)
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    quick, batch = optimize_for_inference(model, backend="plain"), batch_of(model)
    assert_same(real(quick(**batch)[0], batch), real(model(**batch)[0], batch))


@only_5
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_head_that_multiplies_by_the_word_embeddings_has_them(dtype: str | None) -> None:
    config = transformers.DebertaV2Config(**SIZE, **OWN["DebertaV2"], legacy=False)
    model = randomise_(transformers.DebertaV2ForMaskedLM(config)).eval()
    quick, batch = optimize_for_inference(model, dtype=dtype), batch_of(model)
    theirs, ours = (real(each(**batch).logits, batch) for each in (model, quick))
    assert (ours - theirs).abs().max() <= (1e-5 if dtype is None else 0.1) * theirs.abs().max()
    assert quick.get_input_embeddings().weight.dtype == torch.float32


@only_5
def test_another_attention_of_the_class_or_of_its_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = sys.modules[transformers.BertModel.__module__]
    functions, forward = stock.ALL_ATTENTION_FUNCTIONS, stock.BertSelfAttention.forward
    sdpa = functions["sdpa"]
    with monkeypatch.context() as patch:
        patch.setitem(functions, "sdpa", lambda *args, **more: sdpa(*args, **more))
        with pytest.raises(TypeError, match="bert has attention 'sdpa' with another function than transformers'"):
            optimize_for_inference(model_of("Bert"), backend="plain", verify=False)
    with monkeypatch.context() as patch:
        patch.setattr(stock.BertSelfAttention, "forward", lambda *args, **more: forward(*args, **more))
        with pytest.raises(TypeError, match=r"layer\.0\.attention\.self has a forward put on its class"):
            optimize_for_inference(model_of("Bert"), backend="plain", verify=False)
