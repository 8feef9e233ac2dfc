"""`bertlite inspect` predicts what loading a checkpoint does."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make, make_batch
from natively import native
from safetensors.torch import load, load_file, save_file

import bertlite
import bertlite.commands
from bertlite import BertForMaskedLM, BertModel, prune_heads, prune_neurons
from bertlite.checkpoint.names import DECODER, DECODER_BIAS, HEAD_BIAS
from bertlite.cli import main
from bertlite.opened.inspection import DIFFERS, FAILS, SAME, inspect
from bertlite.runtime.tasks import TOKENIZER, checksum_of
from tests.shipping.worlds import add_pooling, save

FILE = "model.safetensors"
Change = Callable[[dict[str, Any], dict[str, Any]], Any]  # of the tensors and the config, in place


def rename(old: str, new: str) -> Change:
    def change(state: dict[str, Any], config: dict[str, Any]) -> None:
        for name in list(state):
            state[re.sub(old, new, name)] = state.pop(name)

    return change


def drop(*names: str) -> Change:
    return lambda state, config: [state.pop(name) for name in list(state) if name.startswith(names)]


def nothing(state: dict[str, Any], config: dict[str, Any]) -> None: ...


def gamma_and_beta(state: dict[str, Any], config: dict[str, Any]) -> None:
    rename(r"LayerNorm\.weight$", "LayerNorm.gamma")(state, config)
    rename(r"LayerNorm\.bias$", "LayerNorm.beta")(state, config)
    state["embeddings.position_ids"] = torch.arange(40)[None]


def a_decoder_of_its_own(state: dict[str, Any], config: dict[str, Any]) -> None:
    state[DECODER] = torch.randn(97, 48, generator=torch.Generator().manual_seed(3))


def small(cls: type[Any] = BertModel, **changes: Any) -> Any:
    return make(cls, **changes).float()


PRUNED = {0: [1, 3], 2: [0]}
CASES: dict[str, tuple[Callable[[], Any], Change, tuple[str, str, str]]] = {
    # The last: outcomes in bertlite, and in transformers 4 and 5.
    "plain": (small, nothing, (SAME, SAME, SAME)),
    "a head": (lambda: small(BertForMaskedLM), nothing, (SAME, SAME, SAME)),
    "half": (lambda: small().half(), nothing, (SAME, SAME, SAME)),
    "gamma, beta and position_ids": (small, gamma_and_beta, (SAME, SAME, SAME)),
    "module.": (small, rename("^", "module."), (SAME, DIFFERS, DIFFERS)),
    "no pooler": (small, drop("pooler"), (SAME, SAME, SAME)),
    "a lost tensor": (small, drop("encoder.layer.1.output.LayerNorm.weight"), (FAILS, DIFFERS, DIFFERS)),
    "a layer more": (small, lambda _, config: config.update(num_hidden_layers=2), (FAILS, DIFFERS, DIFFERS)),
    "pruned heads": (lambda: prune_heads(small(), PRUNED), nothing, (SAME, SAME, FAILS)),
    "a layer without heads": (lambda: prune_heads(small(), {1: range(4)}), nothing, (SAME, FAILS, FAILS)),
    "pruned neurons": (lambda: prune_neurons(small(), {1: [0, 36]}), nothing, (SAME, FAILS, FAILS)),
    "pruned in secret": (
        lambda: prune_heads(small(), PRUNED),
        lambda _, config: config.pop("pruned_heads"),
        (FAILS, FAILS, FAILS),
    ),
    "pruned in name alone": (small, lambda _, config: config.update(pruned_heads=PRUNED), (FAILS, FAILS, DIFFERS)),
    "relative positions": (lambda: small(position_embedding_type="relative_key"), nothing, (SAME, SAME, DIFFERS)),
    "hardswish": (lambda: small(hidden_act="hardswish"), nothing, (SAME, FAILS, SAME)),
    "two dtypes": (
        small,
        lambda state, _: state.update({"pooler.dense.bias": state["pooler.dense.bias"].double()}),
        (FAILS, SAME, SAME),
    ),
    "the decoder's own bias": (
        lambda: small(BertForMaskedLM),
        lambda state, _: state.update({DECODER_BIAS: state.pop(HEAD_BIAS)}),
        (SAME, FAILS, SAME),
    ),
    "an untied decoder": (lambda: small(BertForMaskedLM, tie_word_embeddings=False), nothing, (SAME, SAME, SAME)),
    "an untied decoder, one bias": (
        lambda: small(BertForMaskedLM, tie_word_embeddings=False),
        drop(DECODER_BIAS),
        (SAME, SAME, DIFFERS),
    ),
    "a decoder that is tied in name": (lambda: small(BertForMaskedLM), a_decoder_of_its_own, (FAILS, DIFFERS, SAME)),
}


def write_case(case: str, folder: Path) -> Any:
    """Write the checkpoint of a case and return the model from before the change."""
    build, change, _ = CASES[case]
    model = build()
    model.save_pretrained(folder)
    state = load((folder / FILE).read_bytes())  # not mapped, for the file is written anew
    config = json.loads((folder / "config.json").read_text())
    change(state, config)
    save_file(state, folder / FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("case", CASES)
def test_bertlite_and_transformers_do_what_is_predicted(case, tmp_path):
    model = write_case(case, tmp_path)
    found = inspect(tmp_path)
    if case.startswith("gamma"):
        assert found["legacy_names"] == {"LayerNorm.gamma": 7, "LayerNorm.beta": 7, "embeddings.position_ids": 1}
    outcomes = tuple(found[who]["outcome"] for who in ("bertlite", "transformers 4", "transformers 5"))
    assert outcomes == CASES[case][2], found
    for who in ("bertlite", "transformers 4", "transformers 5"):
        assert found[who]["outcome"] == SAME or found[who]["notes"]
    assert found["class"] == type(model).__name__
    if outcomes[0] == FAILS:
        with pytest.raises(ValueError, match="does not fit") as refusal:
            type(model).from_pretrained(tmp_path)
        assert all(note in str(refusal.value) for note in found["bertlite"]["notes"])
    else:
        assert distance(type(model).from_pretrained(tmp_path), truth(case, model)) == 0
    transformers = pytest.importorskip("transformers")
    predicted = outcomes[int(transformers.__version__.split(".")[0]) - 3]
    cls = getattr(transformers, type(model).__name__)
    try:
        error = distance(cls.from_pretrained(tmp_path, attn_implementation="eager"), truth(case, model))
    except (RuntimeError, KeyError):
        assert predicted == FAILS
    else:
        assert (SAME if error < 1e-12 else DIFFERS) == predicted, error


def truth(case: str, model: Any) -> Any:
    """Return the model that the files of a case describe."""
    if case == "a decoder that is tied in name":
        own = BertForMaskedLM(replace(model.config, tie_word_embeddings=False))
        state = {**model.state_dict()}
        a_decoder_of_its_own(state, {})
        own.load_state_dict(state)
        return own.eval()
    return prune_heads(model, PRUNED) if case == "pruned in name alone" else model


@torch.no_grad()
def distance(got: Any, wanted: Any) -> float:
    batch = {**make_batch(), "attention_mask": None}
    return (got.double()(**batch)[0] - wanted.double()(**batch)[0]).abs().max().item()


@pytest.mark.parametrize("sharded", [False, True])
def test_the_report_holds_what_is_stored(sharded, tmp_path):
    model = prune_neurons(prune_heads(small(BertForMaskedLM), PRUNED), {1: [0, 36, 7]})
    model.save_pretrained(tmp_path)
    if sharded:
        state = load_file(tmp_path / FILE)
        table = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(state)}
        for file in set(table.values()):
            save_file({name: t for name, t in state.items() if table[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
        (tmp_path / FILE).unlink()
    found = inspect(tmp_path)
    assert (len(found["files"]) > 3) == sharded
    assert found["bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir() if path.suffix != ".json")
    assert found["heads"] == {"built": 4, "kept": [[0, 2], [0, 1, 2, 3], [1, 2, 3]]}
    assert found["neurons"] == {"built": 37, "kept": [37, 34, 37]}
    assert found["dtypes"] == {"float32": len(list(model.parameters()))}
    assert found["parameters"] == model.num_parameters()
    assert (found["num_hidden_layers"], found["hidden_size"], found["vocab_size"]) == (3, 48, 97)
    assert found["bertlite"] == {"outcome": SAME, "notes": []}


def test_weights_that_are_nan_are_refused_as_at_a_load(tmp_path):
    model = small()
    model.encoder.layer[1].output.dense.bias.data[3] = torch.inf
    model.save_pretrained(tmp_path)
    found = inspect(tmp_path)["bertlite"]
    assert found["outcome"] == FAILS
    assert "encoder.layer.1.output.dense.bias holds nan or inf" in found["notes"][0]


def test_the_command_prints_it(tmp_path, capsys):
    model = prune_heads(small(), {0: [1, 3], 1: range(4)})
    model.save_pretrained(tmp_path)
    save_file({**model.state_dict(), "foo.\nbar": torch.zeros(1)}, tmp_path / FILE)
    record = tmp_path / "record.json"
    assert main(["inspect", str(tmp_path), "--out", str(record)]) == 0
    printed = capsys.readouterr().out
    assert "layer 0 keeps 2 heads (0, 2), 37 neurons" in printed
    assert "layer 1 keeps 0 heads (none), 37 neurons" in printed
    assert "  not used, as no BERT has them: foo.\\u000abar\n" in printed
    assert "layer 2" not in printed
    assert "transformers 5: does not load it" in printed
    assert json.loads(record.read_text()) == inspect(tmp_path)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["heads"]["kept"][0] == [0, 2]


def test_the_exit_status_is_1_for_no_and_2_for_an_error(tmp_path, capsys):
    write_case("a lost tensor", tmp_path)
    assert main(["inspect", str(tmp_path)]) == 1
    assert "encoder.layer.1.output.LayerNorm.weight is missing" in capsys.readouterr().out
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-100])
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is damaged or cut short" in capsys.readouterr().err


def test_an_unknown_class_is_inspected_as_a_bert_model(tmp_path):
    small().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for named in (["BertForSomething"], ["Linear"], [3], None, []):
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": named}))
        assert inspect(tmp_path)["class"] == "BertModel"


@native
def test_a_packed_folder_says_what_it_was_made_from_and_other_functions_name_that(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sentence_transformers")
    monkeypatch.chdir(tmp_path)
    add_pooling(save(Path("encoder")))
    bertlite.pack("encoder", "packed", dtype="int8")
    found = bertlite.commands.inspect("packed")
    assert (found["kind"], found["dtype"], found["num_hidden_layers"]) == ("encoder", "int8", 3)
    assert (found["made"]["checkpoint"], found["made"]["bertlite"]) == ("encoder", bertlite.__version__)
    assert (kept := found["made"]["kept"]["mean cosine"]) > 0.99
    assert main(["inspect", "packed"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("packed: a packed encoder, int8\n  made from encoder by bertlite ")
    assert f"  mean cosine: {kept:.4f}\n" in printed
    with pytest.raises(FileNotFoundError, match=r"name the checkpoint that it was made from, encoder$"):
        bertlite.commands.export("packed", "e")

    # A folder of before says nothing about its checkpoint.
    about = json.loads(Path("packed/runtime.json").read_text())
    del about["made"], about["crc32"]
    checked = {**about, "crc32": checksum_of(about, Path("packed", TOKENIZER))}
    Path("packed/runtime.json").write_text(json.dumps(checked))
    assert bertlite.commands.inspect("packed")["made"] is None
    assert main(["inspect", "packed"]) == 0
    assert "no note of its checkpoint" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=r"name the checkpoint that it was made from$"):
        bertlite.commands.export("packed", "e")
