"""bertlite.hf beside transformers' own BERT: every class bit for bit, registration, remote code."""

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.bert import modeling_bert
from transformers.utils import direct_transformers_import

import bertlite.hf
from bertlite.hf import compat
from bertlite.models.remote import AUTO_CLASSES
from bertlite.parity.reference import stock_class
from tests.clients.checks.common import V5, equal, tiny
from tests.clients.checks.interchange import elsewhere

pytestmark = pytest.mark.clients
CONFIG = transformers.BertConfig
NAMES = [(auto, cls) for auto, cls in AUTO_CLASSES.items() if auto != "AutoModelWithLMHead"]  # which 4 warns of


def found_class(auto: str, cls: str) -> type[Any]:
    """The class that an Auto class makes for a BERT."""
    small = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    config = transformers.BertConfig(**small, is_decoder=cls == "BertLMHeadModel")
    return type(getattr(transformers, auto).from_config(config))


@pytest.mark.parametrize(("auto", "cls"), NAMES)
def test_registration_is_for_the_block_and_no_longer(auto: str, cls: str) -> None:
    stocks, ours = getattr(transformers, cls), getattr(bertlite.hf, cls)
    assert found_class(auto, cls) is stocks, "importing alone changed something"
    with bertlite.hf.registered():
        assert found_class(auto, cls) is ours
        with bertlite.hf.registered():
            assert found_class(auto, cls) is ours
        assert found_class(auto, cls) is ours, "the inner block undid the outer one"
    assert found_class(auto, cls) is stocks


def test_register_and_unregister_can_be_repeated() -> None:
    try:
        bertlite.hf.register()
        bertlite.hf.register()
        assert found_class("AutoModel", "BertModel") is bertlite.hf.BertModel
        mappings = {auto.__name__: auto._model_mapping for auto in compat.auto_classes()}
        known = {auto: found[CONFIG] for auto, found in mappings.items() if CONFIG in found}
        ours = {auto: cls.__name__ for auto, cls in known.items() if cls.__module__ == "bertlite.hf.modeling"}
        assert ours.items() <= AUTO_CLASSES.items(), "the code of a folder names each class that an Auto class makes"
        with bertlite.hf.registered():
            pass
        assert found_class("AutoModel", "BertModel") is bertlite.hf.BertModel, "the block undid what stood before it"
    finally:
        bertlite.hf.unregister()
    bertlite.hf.unregister()
    assert found_class("AutoModel", "BertModel") is transformers.BertModel


def test_classes_are_found_by_name_for_the_block_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned = tiny(tmp_path, "BertForSequenceClassification", pruned=True)
    monkeypatch.setitem(sys.modules, "transformers", transformers)  # which comes back after the test
    folder = str(Path(transformers.__file__).parent)
    first = direct_transformers_import(folder)  # as transformers' processing_utils does
    assert first is not transformers
    assert first.BertModel is modeling_bert.BertModel
    modules = [first, transformers, transformers.models.bert, modeling_bert]
    names = [*AUTO_CLASSES.values(), "BertPreTrainedModel"]
    with bertlite.hf.registered():
        pass  # Auto classes look names up, which modules of transformers then keep
    before = [vars(module).get(name) for module in modules for name in names]
    with bertlite.hf.registered(), bertlite.hf.registered(everywhere=True):
        with bertlite.hf.registered(everywhere=True), bertlite.hf.registered():
            pass
        second = direct_transformers_import(folder)
        for module in (*modules, second, importlib.import_module("transformers")):
            assert all(getattr(module, name) is getattr(bertlite.hf, name) for name in names)
        scope: dict[str, Any] = {}
        exec("from transformers import BertForSequenceClassification", scope)
        model = scope["BertForSequenceClassification"].from_pretrained(pruned)
        assert type(model) is bertlite.hf.BertForSequenceClassification
        assert model.config.pruned_heads
        with pytest.raises(ValueError, match=r"is bertlite's own now: call bertlite.hf.unregister\(\)"):
            stock_class("BertModel")
    assert [vars(module).get(name) for module in modules for name in names] == before
    for name in names:
        assert getattr(second, name) is getattr(transformers, name) is getattr(modeling_bert, name)
    with bertlite.hf.registered():
        with bertlite.hf.registered(everywhere=True):
            assert transformers.BertModel is bertlite.hf.BertModel
        assert transformers.BertModel is before[names.index("BertModel")]
        assert found_class("AutoModel", "BertModel") is bertlite.hf.BertModel, "the inner block undid the outer one"


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("how", ["ends", "fails", "is undone"])
def test_a_block_ends_no_registration_of_another_thread(how: str, everywhere: bool) -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with suppress(KeyError), bertlite.hf.registered(everywhere=True):
            entered.set()
            left.wait(9)
            if how == "fails":
                raise KeyError

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(9)
    with bertlite.hf.registered(everywhere=everywhere):
        assert transformers.BertModel is bertlite.hf.BertModel
        if how == "is undone":
            bertlite.hf.register()
            bertlite.hf.unregister()
        left.set()
        thread.join()
        assert found_class("AutoModel", "BertModel") is bertlite.hf.BertModel
        assert (transformers.BertModel is bertlite.hf.BertModel) == everywhere
    assert found_class("AutoModel", "BertModel") is transformers.BertModel is modeling_bert.BertModel
    assert modeling_bert.BertModel is not bertlite.hf.BertModel


def test_blocks_of_many_threads_leave_nothing() -> None:
    def enter(number: int) -> bool:
        with bertlite.hf.registered(everywhere=number % 3 == 0):
            return found_class("AutoModel", "BertModel") is bertlite.hf.BertModel

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(enter, range(60)))
    assert found_class("AutoModel", "BertModel") is transformers.BertModel is modeling_bert.BertModel


def test_a_class_that_was_registered_before_comes_back() -> None:
    class BertModel(transformers.BertModel):
        pass

    transformers.AutoModel.register(transformers.BertConfig, BertModel, exist_ok=True)
    try:
        with bertlite.hf.registered():
            assert found_class("AutoModel", "BertModel") is bertlite.hf.BertModel
        assert found_class("AutoModel", "BertModel") is BertModel
    finally:
        transformers.AutoModel._model_mapping._extra_content.pop(transformers.BertConfig)
    assert found_class("AutoModel", "BertModel") is transformers.BertModel


def test_remote_code_is_used_only_where_it_is_trusted(tmp_path: Path) -> None:
    dense, pruned = tiny(tmp_path), tiny(tmp_path, pruned=True)
    for path in (dense, pruned):
        bertlite.hf.export_remote_code(path)
    asked = ("ours", True, dense), ("stocks", False, dense), ("stocks-pruned", False, pruned)  # by trust, and folder
    seen = elsewhere(tmp_path, *asked)
    assert seen["ours"]["own"].endswith("hf.modeling")
    assert seen["stocks"]["own"] == "transformers.models.bert.modeling_bert"
    equal(torch.tensor(seen["ours"]["out"]), torch.tensor(seen["stocks"]["out"]), what="ours and stock's")
    if V5:
        assert "RuntimeError" in seen["stocks-pruned"]["error"]
    else:
        assert seen["stocks-pruned"]["own"] == "transformers.models.bert.modeling_bert"
