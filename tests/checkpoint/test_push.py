"""push_to_hub: what is asked of huggingface_hub, and the files of one commit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
from conftest import assert_same, make

from bertlite import BertModel, BertTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]


def test_a_model_and_its_tokenizer_arrive_in_one_commit_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    api, arrived, commits, tokens = create_autospec(huggingface_hub.HfApi), tmp_path / "arrived", [], []

    def upload(*, folder_path: Path, **given: Any) -> str:
        arrived.mkdir(exist_ok=True)
        for path in folder_path.iterdir():
            (arrived / path.name).write_bytes(path.read_bytes())
        commits.append((*given.values(), sorted(path.name for path in folder_path.iterdir())))
        return "the commit"

    api.create_repo.return_value = SimpleNamespace(repo_id="me/name")
    api.upload_folder.side_effect = upload
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: tokens.append(token) or api)
    model = make(vocab_size=len(WORDS))
    model.prune_heads({1: [2]})
    options = {"private": True, "token": "hf_secret", "commit_message": "a pruned BERT", "revision": "small"}
    assert model.push_to_hub("name", **options) == "the commit"
    api.create_repo.assert_called_once_with("name", private=True, exist_ok=True)
    api.create_branch.assert_called_once_with("me/name", branch="small", exist_ok=True)
    BertTokenizer(WORDS).push_to_hub("name", create_pr=True, revision="small")
    api.create_branch.assert_called_once()
    assert tokens == ["hf_secret", None]
    assert commits == [
        ("me/name", "a pruned BERT", "small", False, ["config.json", "model.safetensors"]),
        ("me/name", "Upload tokenizer", "small", True, ["tokenizer.json", "tokenizer_config.json", "vocab.txt"]),
    ]
    again = BertModel.from_pretrained(arrived)
    assert again.config.pruned_heads == {1: (2,)}
    assert_same(again.state_dict(), model.state_dict(), atol=0)
    assert BertTokenizer.from_pretrained(arrived).get_vocab() == {word: i for i, word in enumerate(WORDS)}


def test_nothing_is_made_on_the_hub_for_a_model_that_cannot_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match="is on the meta device"):
        make().to("meta").push_to_hub("org/name")
