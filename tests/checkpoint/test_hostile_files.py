"""Checkpoints that are damaged, lie or would run are refused by name, quickly, without memory and unrun."""

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from conftest import SIZES, make

from bertlite import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
    Embedder,
    prune_heads,
    prune_neurons,
)
from scripts.make import hostile

SECONDS = 5.0  # for a refusal that takes milliseconds: on a busy machine, and still far below building what is stated


def child(*command: Any, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, env=env, timeout=timeout
    )


@pytest.mark.parametrize("name", hostile.CASES)
def test_every_case_of_the_corpus_is_refused_by_name(name, tmp_path):
    folder = hostile.write(tmp_path, name)
    begun = time.perf_counter()
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        BertModel.from_pretrained(folder)
    assert time.perf_counter() - begun < SECONDS
    said = str(caught.value)
    assert hostile.CASES[name][1] in said
    assert str(folder) in said
    assert not (tmp_path / "canary").exists()
    if name in ("pickle with code", "pickle of 2018 with code"):  # what it would have run is named in one line
        assert "mkdir" in said.partition("nothing in it was run: ")[2]
        assert "\n" not in said
        assert "weights_only" not in said, "torch's advice to trust it"


def test_what_the_corpus_is_made_from_loads(tmp_path):
    """Or every case would be refused for one reason that is not its own."""
    hostile.config_of()(tmp_path)
    assert BertModel.from_pretrained(tmp_path).config.hidden_size == SIZES["hidden_size"]
    (shards := tmp_path / "shards").mkdir()
    hostile.shards()(shards)
    assert BertModel.from_pretrained(shards).config.hidden_size == SIZES["hidden_size"]


def test_the_canary_sings_where_a_pickle_is_run(tmp_path):
    """Or its silence would prove nothing."""
    folder = hostile.write(tmp_path, "pickle with code")
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "canary").is_dir()


# Numbers that are none ----------------------------------------------------------------------------------------------


CLASSIFIER, META = BertForSequenceClassification, {"device": "meta"}


@pytest.mark.parametrize(
    ("cls", "name", "value", "refused", "taken"),
    [
        (BertModel, "pooler.dense.weight", 1e5, {"dtype": "float16"}, {"dtype": "bfloat16"}),
        (BertModel, "pooler.dense.bias", torch.inf, {"dtype": "float64"}, META),
        (BertModel, "pooler.dense.bias", -torch.inf, {"dtype": "float64"}, META),
        (CLASSIFIER, "classifier.bias", torch.nan, {"dtype": "float64"}, {}),  # by a class that does not have it
    ],
)
def test_a_tensor_of_the_model_that_holds_no_numbers_is_named(cls, name, value, refused, taken, tmp_path):
    model = prune_heads(make(cls), {1: range(4)})  # whose query, key and value are empty, and hold no nan
    with torch.no_grad():
        model.get_parameter(name)[1] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"since\n  {name} holds nan or inf in {refused['dtype']}$"):
        cls.from_pretrained(tmp_path, **refused)
    assert BertModel.from_pretrained(tmp_path, **taken).pooler.dense.weight.is_meta == (taken is META)


def test_weights_whose_sum_alone_overflows_are_numbers(tmp_path):
    model = make().float()
    with torch.no_grad():
        model.pooler.dense.weight.fill_(3e38)
    model.save_pretrained(tmp_path)
    assert BertModel.from_pretrained(tmp_path).pooler.dense.weight[0, 0] == torch.tensor(3e38)


# Sizes --------------------------------------------------------------------------------------------------------------


def test_a_large_model_is_no_absurd_one(tmp_path):
    """A size above 65536 is fine where a tensor has it."""
    model = BertModel(BertConfig(**{**SIZES, "intermediate_size": 70_000, "num_hidden_layers": 1}))
    model.save_pretrained(tmp_path)
    assert BertModel.from_pretrained(tmp_path).config.intermediate_size == 70_000
    prune_neurons(model, {0: range(69_000)}).save_pretrained(tmp_path)  # nor where one had it
    assert BertModel.from_pretrained(tmp_path).config.intermediate_size == 70_000


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"num_hidden_layers": 64}, r"it has \d layers, not 64 as the config says"),
        ({"num_hidden_layers": 65}, r"num_hidden_layers is 65, but there are \d\d tensors in all"),
        ({"intermediate_size": 2**16}, "layer 0 has 37 of 65536 neurons"),
        ({"intermediate_size": 2**16 + 1}, r"intermediate_size is 65537, but no tensor is longer than 65536$"),
    ],
)
def test_a_size_is_absurd_from_where_no_file_of_these_tensors_has_it(stated, message, tmp_path):
    hostile.config_of(**stated)(tmp_path)
    with pytest.raises(ValueError, match=message):
        BertModel.from_pretrained(tmp_path)


# Memory and time ----------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys, torch
from bertlite import BertModel


cls = BertModel.from_pretrained
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for folder in sys.argv[1:]:
    try:
        cls(folder)
    except (ValueError, FileNotFoundError):
        continue
    print(folder, "loaded")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_refusing_takes_no_memory_to_speak_of(tmp_path):
    """The corpus states sizes up to 10**12; its files have 300 KB."""
    folders = [hostile.write(tmp_path, name) for name in hostile.CASES]
    ran = child("-c", PEAK, *folders)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 64 * 1024, f"{ran.stdout} KiB"  # torch's own lazy imports take 20 MiB


def test_loading_takes_no_more_memory_than_twice_the_file(tmp_path):
    large = {**SIZES, "vocab_size": 250_000}
    (tmp_path / "config.json").write_text(json.dumps(large))
    torch.save(BertModel(BertConfig(**large)).state_dict(), tmp_path / "pytorch_model.bin")
    size = (tmp_path / "pytorch_model.bin").stat().st_size
    ran = child("-c", PEAK, tmp_path)
    assert ran.returncode == 0, ran.stderr
    said, peak = ran.stdout.split("\n")[:2]
    assert said == f"{tmp_path} loaded"
    assert int(peak) * 1024 < 2 * size


@pytest.mark.slow
def test_changed_checkpoints_load_or_are_refused():
    ran = child("-W", "ignore", "-m", "scripts.stress.fuzz")
    assert ran.returncode == 0, ran.stderr[-3000:]
    for kind, counts in json.loads(ran.stdout).items():
        assert counts["refused"] > 20, kind
        assert counts["loaded"] > 1, kind  # the first is whole
        assert counts["refused"] + counts["loaded"] >= 40, kind
        assert counts["peak_kib"] < 64 * 1024, kind
        assert counts["seconds"] < SECONDS, kind


# Tokenizers ---------------------------------------------------------------------------------------------------------


def test_a_tokenizer_of_more_words_than_the_model_is_refused(tmp_path):
    make().save_pretrained(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(SIZES["vocab_size"] - 5))]
    BertTokenizer(words).save_pretrained(tmp_path)
    assert Embedder(tmp_path).encode(["w0 w91"]).shape == (1, SIZES["hidden_size"])
    BertTokenizer([*words, "more"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer has ids up to 97, but the model's vocab_size is 97: "):
        Embedder(tmp_path).encode(["w0"])


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "vocab.txt"])
@pytest.mark.parametrize("damage", [b"", hostile.POINTER, hostile.DEEP.encode(), b"\xff\xfe", b"[1]"])
def test_a_damaged_tokenizer_is_named(file, damage, tmp_path):
    BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "to"]).save_pretrained(tmp_path)
    if file == "vocab.txt":
        (tmp_path / "tokenizer.json").unlink()
    (tmp_path / file).write_bytes(damage)
    with pytest.raises(ValueError, match=f"{tmp_path}.*"):
        BertTokenizer.from_pretrained(tmp_path)
