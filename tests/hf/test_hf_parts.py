"""Parts of bertlite.hf are built, called and hooked as transformers' are, and one's own classes are made of them."""

import copy
import inspect
import pickle
from typing import Any, ClassVar

import pytest
import torch
import transformers
from conftest import F64, assert_same, inputs_of, randomise_
from pairs import BOTH, CACHE, CROSS, FORMS, V5, B, L, N, S, config_of, model_of, only_5, ours_of, pair, states_of
from torch import Tensor, nn
from transformers import pytorch_utils
from transformers.models.bert import modeling_bert as stock

from bertlite import hf
from bertlite.hf import v4


def added_mask() -> Tensor:
    allowed = inputs_of()["attention_mask"].bool()[:, None, None]
    return torch.zeros(allowed.shape, dtype=F64).masked_fill(~allowed, torch.finfo(F64).min)


STATES = torch.randn(B, S, 48, generator=torch.Generator().manual_seed(3), dtype=F64)
LAYERS = ["BertSelfAttention", "BertAttention", "BertLayer", "BertEncoder"]
ON_STATES = ["BertIntermediate", "BertPooler", "BertPredictionHeadTransform", "BertLMPredictionHead"]
PARTS: dict[str, tuple[Tensor, ...]] = {  # with inputs
    **dict.fromkeys(LAYERS, (STATES, added_mask())),
    **dict.fromkeys((*ON_STATES, "BertOnlyMLMHead"), (STATES,)),
    "BertEmbeddings": (inputs_of()["input_ids"],),
    "BertSelfOutput": (STATES, STATES),
    "BertOutput": (STATES[..., :37], STATES),
    "BertOnlyNSPHead": (STATES[:, 0],),
    "BertPreTrainingHeads": (STATES, STATES[:, 0]),
}


def parts_of(name: str, backend: str = "eager", given: Any = (), **changes: Any) -> tuple[Any, Any]:
    """Make transformers' part, of the config and what else is given, and ours with its weights."""
    config = config_of(backend=backend, **changes)
    theirs, ours = (getattr(library, name)(config, **dict(given)).to(F64).eval() for library in (stock, hf))
    ours.load_state_dict(randomise_(theirs).state_dict())
    return theirs, ours


def alike(got: Any, wanted: Any) -> None:
    """Assert that two returns have the same form and values."""
    assert type(got) is type(wanted)
    if isinstance(wanted, Tensor):
        assert_same(got, wanted)
    elif wanted is not None:
        values = [tuple(each.values()) if hasattr(each, "values") else each for each in (got, wanted)]
        assert len(values[0]) == len(values[1])
        for have, want in zip(*values, strict=True):
            alike(have, want)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_built_of_a_config_and_is_one_of_transformers(name: str) -> None:
    theirs, ours = parts_of(name)
    assert isinstance(ours, getattr(stock, name))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [key for key, _ in ours.named_buffers()] == [key for key, _ in theirs.named_buffers()]
    assert next(iter(inspect.signature(type(ours)).parameters)) == "config"
    twin = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    assert_same(dict(twin.state_dict()), dict(ours.state_dict()), atol=0)
    alike(ours(*PARTS[name]), theirs(*PARTS[name]))


@only_5
@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", LAYERS[:2])
def test_attention_alone_is_causal_if_its_argument_says_so(name: str, is_causal: bool, is_decoder: bool) -> None:
    theirs, ours = parts_of(name, "sdpa", {"is_causal": is_causal}, is_decoder=is_decoder)
    alike(ours(STATES), theirs(STATES))


@only_5
@pytest.mark.parametrize("name", LAYERS)
def test_a_part_of_a_decoder_takes_a_cache_by_the_names_of_every_version(name: str) -> None:
    numbered = {} if name == "BertEncoder" else {"layer_idx": 0}
    theirs, ours = parts_of(name, "sdpa", numbered, is_decoder=True)
    config, outs = config_of(backend="sdpa", is_decoder=True), []
    for part, named in ((theirs, CACHE), (ours, CACHE), (ours, "past_key_values"), (ours, "cache")):
        cache, x = transformers.DynamicCache(config=config), STATES
        part(x[:, :-1], **{named: cache})
        out = part(x[:, -1:], **{named: cache})
        outs.append(out if isinstance(out, Tensor) else out[0])
        assert cache.get_seq_length() == S
    for out in outs[1:]:
        assert_same(out, outs[0])
    with pytest.raises(TypeError, match="not both"):
        ours(STATES, cache=cache, past_key_values=cache)


@FORMS
def test_a_wrapped_part_of_a_decoder_is_given_the_cache(form: Any) -> None:
    model = model_of(form, backend="sdpa", is_decoder=True)
    ids, seen = inputs_of()["input_ids"], []
    wanted = model(ids).last_hidden_state
    for part in (model.encoder, model.encoder.layer[1], model.encoder.layer[2].attention):

        def forward(*args: Any, run: Any = part.forward, **options: Any) -> Any:
            seen.append(run)
            return run(*args, **options)

        part.forward = forward
    first = model(ids[:, :-1], use_cache=True)
    last = model(ids[:, -1:], past_key_values=first[2])
    assert_same(torch.cat([first.last_hidden_state, last.last_hidden_state], 1), wanted)
    assert len(set(seen)) == 3


@only_5
@pytest.mark.parametrize("where", ["encoder", "layer", "attention"])
def test_a_part_of_transformers_in_a_decoder_is_given_the_cache(where: str) -> None:
    theirs, ours = pair("BertModel", "sdpa", is_decoder=True)
    if where == "encoder":
        ours.encoder = theirs.encoder
    elif where == "layer":
        ours.encoder.layer[1] = theirs.encoder.layer[1]
    else:
        ours.encoder.layer[1].attention = theirs.encoder.layer[1].attention
    ids = inputs_of()["input_ids"]
    first = ours(ids[:, :-1], use_cache=True)
    last = ours(ids[:, -1:], **{CACHE: first[2]})
    assert_same(last.last_hidden_state, theirs(ids).last_hidden_state[:, -1:])


def test_embeddings_count_from_the_length_of_what_came_before() -> None:
    theirs, ours = parts_of("BertEmbeddings")
    ids = inputs_of()["input_ids"]
    for name in ("past_key_values_length", f"{CACHE}_length"):
        alike(ours(ids, **{name: 5}), theirs(ids, **{f"{CACHE}_length": 5}))
    ours.position_ids += 2  # as for weights of another model
    alike(ours(ids), theirs(ids, position_ids=torch.arange(S)[None] + 2))


@FORMS
def test_an_encoder_obeys_a_head_mask_of_transformers_4(form: Any) -> None:
    model = model_of(form, backend="eager")
    gate = torch.linspace(-0.5, 1.5, L * N, dtype=F64).view(L, N)
    x = model.embeddings(inputs_of()["input_ids"], inputs_of()["token_type_ids"])
    out = model.encoder(x, added_mask(), head_mask=model.get_head_mask(gate, L), return_dict=False)
    assert isinstance(out, tuple)
    assert_same(out[0], model(**inputs_of(), head_mask=gate)[0])


def test_layers_of_v4_return_tuples_and_chunks_are_the_whole() -> None:
    config = config_of(backend="eager", chunk_size_feed_forward=4)
    layer = randomise_(v4.BertLayer(config)).to(F64).eval()
    out = layer(STATES, added_mask(), None, None, None, None, True)
    assert isinstance(out, tuple)
    assert [x.shape for x in out] == [(B, S, 48), (B, N, S, S)]
    layer.chunk_size_feed_forward = 0
    assert_same(layer(STATES, added_mask())[0], out[0])
    assert_same(layer.feed_forward_chunk(layer.attention(STATES, added_mask())[0]), out[0])


def test_v4_is_bertlite_hf_under_transformers_4() -> None:
    assert (v4.BertLayer is hf.BertLayer) is not V5
    model, other = (model_of(form, "BertForMaskedLM") for form in (v4, hf))
    assert_same(dict(model(**inputs_of(), output_attentions=True)), dict(other(**inputs_of(), output_attentions=True)))
    gate = torch.linspace(0, 1, N, dtype=F64)
    given = list(inputs_of().values())[:1]
    assert_same(model.bert(*given, None, None, None, gate)[0], other.bert(*given, head_mask=gate)[0])


# Hooks


@BOTH
@pytest.mark.parametrize("changes", [{}, CROSS], ids=["encoder", "decoder"])
def test_hooks_see_what_they_see_in_the_installed_transformers(backend: str, changes: dict[str, Any]) -> None:
    if changes and not V5 and backend == "sdpa":
        pytest.skip("4.57's causal mask overflows in float64")
    seen: list[dict[str, Any]] = []
    for model in pair("BertModel", backend, **changes):
        outputs: dict[str, Any] = {}
        for name, part in model.named_modules():
            if name.endswith(("self", "attention", "crossattention")) or type(part).__name__ == "BertLayer":
                part.register_forward_hook(lambda part, args, out, name=name, to=outputs: to.update({name: out}))
        model(**inputs_of(), **(states_of() if changes else {}), use_cache=False)
        seen.append(outputs)
    assert list(seen[0]) == list(seen[1])
    assert len(seen[0]) >= 3 * L
    for name, wanted in seen[0].items():
        alike(seen[1][name], wanted)
    if backend == "eager":
        assert seen[1]["encoder.layer.1.attention.self"][1].shape == (B, N, S, S)


@FORMS
@BOTH
def test_a_hook_that_returns_hidden_states_alone_changes_nothing_else(form: Any, backend: str) -> None:
    model = model_of(form, backend=backend)
    wanted = model(**inputs_of(), output_attentions=True)
    for part in (model.encoder, model.encoder.layer[1], model.encoder.layer[2].attention):
        part.register_forward_pre_hook(lambda part, args: args[0])
    assert_same(dict(model(**inputs_of(), output_attentions=True)), dict(wanted), atol=0)


# Parts that are another's


@FORMS
def test_a_replaced_attention_is_given_the_mask_and_its_weights_are_returned(form: Any) -> None:
    class Uniform(nn.Module):
        def forward(self, hidden_states: Tensor, attention_mask: Any = None, **others: Any) -> tuple[Tensor, Tensor]:
            weights = attention_mask.softmax(-1).expand(B, N, S, S)
            return weights.mean(1) @ hidden_states, weights

    model, mask = model_of(form, backend="eager"), inputs_of()["attention_mask"][1]
    model.encoder.layer[1].attention.self = Uniform()
    out = model(**inputs_of(), output_attentions=True)
    assert_same(out.attentions[1][1, 0, 0], mask.to(F64) / mask.sum())
    packed = ours_of("BertModel", "packed")
    packed.encoder.layer[1].attention.self = Uniform()
    with pytest.raises(ValueError, match="packed attention runs only bertlite's own layers"):
        packed(**inputs_of())
    assert_same(model(**inputs_of(), first_token_only=True)[0], out[0][:, :1])
    model.encoder.layer[-1].attention.self = Uniform()
    with pytest.raises(ValueError, match="first_token_only=True runs only bertlite's own layers"):
        model(**inputs_of(), first_token_only=True)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
def test_a_function_around_a_layer_changes_nothing(backend: str) -> None:
    model = ours_of("BertModel", backend)
    inputs = inputs_of()
    inputs["attention_mask"][1] = 0  # a query that may look at nothing
    wanted = dict(model(**inputs, output_attentions=True))
    for layer in model.encoder.layer:
        plain = layer.forward
        layer.forward = lambda x, attention_mask=None, *args, plain=plain, **options: plain(
            x, attention_mask, *args, **options
        )
    assert_same(dict(model(**inputs, output_attentions=True)), wanted, atol=0)


# Classes


def test_positional_arguments_are_those_of_the_installed_transformers() -> None:
    theirs, ours = pair("BertModel")
    ids, mask, types = (inputs_of()[name] for name in ("input_ids", "attention_mask", "token_type_ids"))
    embedded = theirs.embeddings.word_embeddings(ids)
    given = (None, mask, types, None, embedded) if V5 else (None, mask, types, None, None, embedded)
    assert_same(dict(ours(*given)), dict(theirs(*given)))
    with pytest.raises(TypeError, match="multiple values for argument 'inputs_embeds'"):
        ours(*given, inputs_embeds=embedded)
    with pytest.raises(TypeError, match="positional arguments"):
        ours(*given, *[None] * 30)


class Elsewhere(hf.BertPreTrainedModel):
    """Runs none of our parts, as LAVIS's Q-Former and BLIP's and ALBEF's decoders do."""

    _tied_weights_keys: ClassVar = {"decoder.weight": "words.weight"}  # 5 ties by this table alone

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.pruned: list[Any] = []
        self.init_weights()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.words

    def get_output_embeddings(self) -> nn.Linear:
        return self.decoder

    def _prune_heads(self, heads_to_prune: Any) -> None:
        self.pruned.append(heads_to_prune)


def test_a_class_of_parts_of_its_own_is_tied_and_pruned_by_itself() -> None:
    model = Elsewhere(config_of())
    assert model.decoder.weight is model.words.weight
    model.prune_heads({0: [1, 3]})
    assert model.pruned == [{0: (1, 3)}]


WRONG = {
    "add_cross_attention": True,
    "position_embedding_type": "rope",
    "hidden_act": "geglu",
    "num_attention_heads": 5,
    "problem_type": "ranking",
    "pad_token_id": -1,
    "type_vocab_size": 0,
}


@pytest.mark.parametrize("field", WRONG)
def test_a_class_of_ones_own_has_the_config_that_it_wants(field: str) -> None:
    config = config_of()
    vars(config)[field] = WRONG[field]  # 5.10 itself refuses to set some
    Elsewhere(config)
    for cls in (hf.BertModel, hf.BertLayer)[: 1 if field == "type_vocab_size" else 2]:  # an attention does not read it
        with pytest.raises(ValueError, match=field if field == "add_cross_attention" else str(WRONG[field])):
            cls(config)


# What transformers 5 has lost


def test_functions_that_cut_do_what_those_of_transformers_do() -> None:
    gone, index = hf.find_pruneable_heads_and_indices([0, 2, 3], 3, 2, {2})
    assert gone == {0, 3}
    assert index.tolist() == [2, 3]
    layer = nn.Linear(6, 5)
    for rows, dim in ((torch.tensor([0, 3]), 0), (torch.tensor([1, 2, 5]), 1)):
        theirs, ours = (lib.prune_linear_layer(layer, rows, dim) for lib in (pytorch_utils, hf))
        assert_same(dict(ours.state_dict()), dict(theirs.state_dict()), atol=0)
        assert (ours.in_features, ours.out_features) == (theirs.in_features, theirs.out_features)
    if not V5:
        found = pytorch_utils.find_pruneable_heads_and_indices([0, 2, 3], 3, 2, {2})
        assert found[0] == gone
        assert found[1].equal(index)


def test_a_star_import_takes_classes_and_functions_and_no_modules():
    names: dict[str, Any] = {}
    exec("from bertlite.hf import *", names)
    assert names["BertModel"] is hf.BertModel
    assert all(callable(each) for name, each in names.items() if name != "__builtins__")
