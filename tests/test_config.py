"""A BertConfig is right when it is made, and stays as it was made."""

import json
import pickle
import re
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from conftest import SIZES

from bertlite import BertConfig
from bertlite.config import OWN

REFUSED = [  # field, value, what the message says besides the field's name
    ("vocab_size", 0, "is 0; it must be 1 to"),
    ("vocab_size", 97.0, "97.0, a float; it must be an integer"),
    ("vocab_size", True, "True, a bool; it must be an integer"),
    ("hidden_size", None, "None, a NoneType"),
    ("hidden_size", 49, "hidden_size 49 is not a multiple of num_attention_heads 4"),
    ("num_hidden_layers", -1, "is -1; it must be 0 to"),
    ("num_attention_heads", 0, "is 0; it must be 1 to"),
    ("intermediate_size", -37, "is -37"),
    ("max_position_embeddings", 0, "is 0"),
    ("type_vocab_size", 0, "is 0"),
    ("hidden_act", "foo", "'foo' is unknown; have: gelu"),
    ("hidden_act", len, "must be a string"),
    ("hidden_dropout_prob", 1.5, "is 1.5; a probability lies between 0 and 1"),
    ("hidden_dropout_prob", float("nan"), "is nan"),
    ("hidden_dropout_prob", "0.1", "'0.1', a str; it must be a number"),
    ("attention_probs_dropout_prob", -0.1, "is -0.1"),
    ("classifier_dropout", 2, "is 2"),
    ("initializer_range", -0.02, "is -0.02; it must be 0 or more"),
    ("initializer_range", float("nan"), "is nan"),
    ("layer_norm_eps", 0, "is 0; it must be above 0"),
    ("layer_norm_eps", float("nan"), "is nan"),
    ("pad_token_id", 97, "97 is outside the vocabulary, 0 to 96"),
    ("pad_token_id", -1, "-1 is outside"),
    ("pad_token_id", "0", "an integer or null"),
    ("position_embedding_type", "bogus", "'bogus' is unknown; have: absolute, relative_key, relative_key_query"),
    ("problem_type", "ranking", "'ranking' is unknown; have: None, regression"),
    ("embedding_size", -1, "is -1; it must be 1 to"),
    ("pooler_act", "foo", "'foo' is unknown; have: gelu"),
    ("chunk_size_feed_forward", -1, "is -1"),
    ("add_cross_attention", True, "is_decoder"),
    ("tie_word_embeddings", 1, "1, a int; it must be true or false"),
    ("return_dict", None, "it must be true or false"),
    ("num_labels", 0, "is 0; it must be 1 to"),
    ("id2label", {}, "is {}; name at least one label"),
    ("id2label", ["a", "b"], "must be a mapping"),
    ("id2label", {"first": "a"}, "its keys must be integers"),
    ("label2id", ["a", "b"], "must be a mapping"),
    ("extra", ["a"], "must be a mapping"),
    ("pruned_heads", {0: [4]}, "layer 0 has no head 4: it was built with 4 heads, 0 to 3"),
]


@pytest.mark.parametrize(("name", "value", "says"), REFUSED, ids=[f"{name}={value}" for name, value, _ in REFUSED])
def test_a_bad_value_is_refused_by_name_and_value(name: str, value: Any, says: str) -> None:
    BertConfig(**SIZES)  # the rest is fine
    with pytest.raises(ValueError, match=says) as refusal:
        BertConfig(**{**SIZES, name: value})
    if name != "pruned_heads":  # which says "layer" and "head"
        assert name in str(refusal.value)


def test_the_smallest_and_odd_but_possible_values_are_accepted() -> None:
    smallest = {**dict.fromkeys(SIZES, 1), "num_hidden_layers": 0, "pad_token_id": None}
    smallest |= {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 1, "initializer_range": 0}
    config = BertConfig(**smallest)
    assert {name: getattr(config, name) for name in smallest} == smallest


def test_fields_are_keywords_and_misspelt_ones_a_TypeError() -> None:
    with pytest.raises(TypeError, match="hiden_size"):
        BertConfig(hiden_size=48)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        BertConfig(97)  # type: ignore[misc]


def test_a_config_is_frozen_and_replaced(config: BertConfig) -> None:
    with pytest.raises(
        FrozenInstanceError, match=r"replace\(config, hidden_size=96\) .*from_pretrained\(…, hidden_size=96"
    ):
        config.hidden_size = 96  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="odd cannot be assigned"):
        del config.odd  # type: ignore[attr-defined]
    assert replace(config, hidden_size=96).hidden_size == 96
    assert config.hidden_size == 48
    with pytest.raises(ValueError, match="hidden_size 50"):
        replace(config, hidden_size=50)  # a change is checked like any value


def test_what_was_passed_in_can_change_without_changing_the_config() -> None:
    heads, names, extra = {0: [1]}, {0: "no", 1: "yes"}, {"ours": 1}
    config = BertConfig(**SIZES, pruned_heads=heads, id2label=names, extra=extra)
    heads[0].append(2)
    heads[1] = [0]
    names[2] = "maybe"
    extra["theirs"] = 2
    assert config.pruned_heads == {0: (1,)}
    assert config.id2label == {0: "no", 1: "yes"}
    assert config.extra == {"ours": 1}


# pruned heads


def test_pruned_heads_are_sorted_merged_and_named_once() -> None:
    """And the keys of JSON are strings."""
    config = BertConfig(**SIZES, pruned_heads={1: [3, 0, "3"], "1": ["2"], 2: []})
    assert config.pruned_heads == {1: (0, 2, 3)}


# labels


def test_labels_have_names_and_numbers(config: BertConfig) -> None:
    assert (config.num_labels, config.id2label) == (2, {0: "LABEL_0", 1: "LABEL_1"})
    assert config.label2id == {"LABEL_0": 0, "LABEL_1": 1}
    names = {0: "no", 1: "yes", 2: "maybe"}
    for given in ({str(i): name for i, name in names.items()}, names):
        named = BertConfig(**SIZES, id2label=given)
        assert (named.num_labels, named.id2label) == (3, names)
        assert named.label2id == {"no": 0, "yes": 1, "maybe": 2}
    assert BertConfig(**SIZES, num_labels=3, id2label=names) == named
    with pytest.raises(ValueError, match="num_labels is 4 but id2label names 3"):
        BertConfig(**SIZES, num_labels=4, id2label=names)
    stated = BertConfig(**SIZES, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1, "ja": 1})
    assert stated.label2id == {"no": 0, "yes": 1, "ja": 1}


def test_num_labels_may_be_replaced_while_nobody_chose_the_names(config: BertConfig) -> None:
    three = replace(config, num_labels=3)
    assert three == BertConfig(**SIZES, num_labels=3)
    assert three.label2id == {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}
    with pytest.raises(ValueError, match="num_labels is 3 but id2label names 2"):
        replace(config, id2label={0: "no", 1: "yes"}, num_labels=3)


def test_overriding_the_labels_replaces_the_names_of_another_count() -> None:
    saved = {**SIZES, "id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    assert BertConfig.from_dict(saved).num_labels == 3
    assert BertConfig.from_dict(saved, num_labels=3).id2label == {0: "a", 1: "b", 2: "c"}
    assert BertConfig.from_dict(saved, num_labels=2).id2label == {0: "LABEL_0", 1: "LABEL_1"}
    renamed = BertConfig.from_dict({**saved, "num_labels": 3}, id2label={0: "x", 1: "y"})
    assert (renamed.num_labels, renamed.label2id) == (2, {"x": 0, "y": 1})


# dictionaries and files


def test_unknown_fields_are_kept_and_written_back(tmp_path: Any) -> None:
    saved = {**SIZES, "model_type": "bert", "architectures": ["BertModel"], "my_own": {"deep": [1, 2]}}
    config = BertConfig.from_dict(saved)
    assert config.extra == {"architectures": ["BertModel"], "my_own": {"deep": [1, 2]}}
    assert {**config.to_dict(), **saved} == config.to_dict()
    (tmp_path / "config.json").write_text(config.to_json_string(), encoding="utf-8")
    assert BertConfig.from_json_file(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("pos_att_type", "p2p", "'p2p' is unknown; have: c2p, p2c, c2p|p2c"),
        ("position_buckets", -1, "is -1; it must be 0 (none) to"),
        ("max_relative_positions", 5, "is 5; with position_buckets 8 it must be 6 to"),  # no logarithm of less
    ],
)
def test_disentangled_positions_have_fields_of_their_own(field: str, value: Any, message: str) -> None:
    fits = {"pos_att_type": "c2p", "position_buckets": 8, "max_relative_positions": 6}
    BertConfig(position_embedding_type="disentangled", **fits)
    with pytest.raises(ValueError, match=re.escape(message)):
        BertConfig(position_embedding_type="disentangled", **{**fits, field: value})


def test_a_config_survives_JSON_and_pickle() -> None:
    other = {"is_decoder", "add_cross_attention", "attn_implementation", "num_labels", "extra"}
    defaults = {name: value for name, value in vars(BertConfig()).items() if name not in other}
    changed = {name: not value for name, value in defaults.items() if isinstance(value, bool)}
    changed |= {name: value / 4 for name, value in defaults.items() if isinstance(value, float)}
    changed |= {
        **SIZES,
        "hidden_act": "relu",
        "pad_token_id": None,
        "position_embedding_type": "disentangled",
        "classifier_dropout": 0.4,
        "chunk_size_feed_forward": 6,
        "pooler_act": "relu",
        "pooler_dropout": 0.25,
        "pooling": "mean",
        "zeros": ["factor.bias"],
        "local_layers": [1],
        "local_rotary_base": 20.0,
        "local_attention": 5,
        "embedding_size": 128,
        "pos_att_type": "c2p",
        "position_buckets": 8,
        "max_relative_positions": 40,
        "norm_rel_ebd": "layer_norm",
        "pruned_heads": {0: (1,), 2: (0, 1, 2, 3)},
        "pruned_neurons": {1: (5, 36)},
        "id2label": {0: "x", 1: "y", 2: "z"},
        "label2id": {"x": 0, "y": 1, "z": 2},
        "problem_type": "regression",
    }
    assert set(changed) | other == {field.name for field in fields(BertConfig)}  # none is forgotten here
    config = BertConfig(**changed)
    for name, value in changed.items():
        assert getattr(config, name) == value != getattr(BertConfig(), name)
    assert BertConfig.from_dict(json.loads(config.to_json_string())) == config
    assert BertConfig.from_dict(config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_config_is_saved_and_read_without_weights(tmp_path: Any) -> None:
    config = BertConfig(**SIZES, pruned_heads={1: [0]})
    config.save_pretrained(tmp_path / "new")
    assert BertConfig.from_pretrained(tmp_path / "new") == config
    assert BertConfig.from_pretrained(tmp_path, subfolder="new", num_labels=3).num_labels == 3
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        BertConfig.from_pretrained(tmp_path)
    roberta = {**SIZES, "model_type": "roberta", "pad_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(roberta), encoding="utf-8")
    found = BertConfig.from_pretrained(tmp_path)
    assert found.positions_skip_padding
    assert found.max_position_embeddings == SIZES["max_position_embeddings"] - 2


def test_the_backend_is_never_saved(config: BertConfig) -> None:
    chosen = replace(config, attn_implementation="eager")
    assert "attn_implementation" not in chosen.to_dict()
    assert chosen.to_dict() == config.to_dict()
    assert BertConfig.from_dict({**SIZES, "attn_implementation": "eager"}).attn_implementation == "auto"
    assert BertConfig.from_dict(SIZES, attn_implementation="eager").attn_implementation == "eager"


def test_an_override_that_is_no_field_is_a_TypeError() -> None:
    with pytest.raises(TypeError, match="no field hiden_size, torch_dtype"):
        BertConfig.from_dict(SIZES, torch_dtype="float32", hiden_size=1)
    with pytest.raises(TypeError, match="no field extra"):
        BertConfig.from_dict(SIZES, extra={})
    config = BertConfig.from_dict({**SIZES, "hidden_dropout_prob": 0.1}, hidden_dropout_prob=0.0)
    assert config.hidden_dropout_prob == 0.0


FILES = [
    ("not json", "is not JSON"),
    (b"\xff\xfe", "is not JSON"),
    ("", "is not JSON"),
    ("[1, 2]", "holds a JSON list"),
    ("null", "holds a JSON NoneType"),
    (json.dumps({**SIZES, "model_type": "roberta"}), "a 'roberta' model, not a 'bert': load it with bertlite"),
    ("{}", "does not state vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, max_"),
    (json.dumps({k: v for k, v in SIZES.items() if k != "intermediate_size"}), "does not state intermediate_size;"),
    (json.dumps({**SIZES, "hidden_act": "foo"}), "hidden_act 'foo' is unknown"),
]


@pytest.mark.parametrize(("text", "says"), FILES, ids=[says for _, says in FILES])
def test_a_bad_file_is_refused_with_its_name(tmp_path: Any, text: str | bytes, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=says) as refusal:
        BertConfig.from_json_file(path)
    assert str(path) in str(refusal.value)


def test_a_size_that_the_file_lacks_may_be_an_override(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match="config"):
        BertConfig.from_json_file(path)
    path.write_text(json.dumps({k: v for k, v in SIZES.items() if k != "vocab_size"}))  # as old as those of 2018
    assert BertConfig.from_json_file(path, vocab_size=97) == BertConfig(**SIZES)


def test_fields_and_defaults_are_those_of_transformers() -> None:
    theirs = pytest.importorskip("transformers").BertConfig()
    ours = BertConfig()
    only_ours = {"attn_implementation", "extra", "pruned_heads", "position_embedding_type", *OWN}
    compared = {field.name for field in fields(BertConfig)} - only_ours
    assert len(compared) > 20
    assert {name: getattr(ours, name) for name in compared} == {name: getattr(theirs, name, "?") for name in compared}
