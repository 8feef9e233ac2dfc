"""One small model, no two of whose sizes are equal, and helpers to compare outputs.

Shapes:  B 2 sequences · S 11 positions · D 48 hidden · L 3 layers · N 4 heads · H 12 head dim · I 37 · V 97 words
         T 5 token types · P 40 positions · 6 labels · 7 choices
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import bertlite
from bertlite import BertConfig, BertModel
from bertlite.cli import main
from bertlite.models import heads
from bertlite.stack.attention import BACKENDS, Requirements
from bertlite.support import timing

F64 = torch.float64
# Backends that run here.
ON_CPU = [name for name, backend in BACKENDS.items() if not (backend.missing and backend.missing(Requirements()))]
HEADED: list[Any] = [getattr(heads, name) for name in heads.__all__ if name != "BertLMHeadModel"]  # encoders
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # the first words of a vocabulary
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LABELS, CHOICES, NONE = 6, 7, -100
EXACT = 1e-12  # float64: on this model rounding reaches 3e-15, LayerNorm eps 1e-11 for 1e-12 in one layer 4e-12
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 40,
    "type_vocab_size": 5,
}
HEADS: dict[str, dict[int, list[int]]] = {  # to prune
    "none": {},
    "the first layer and more": {0: [0, 1, 2, 3], 1: [0, 1, 2], 2: [1]},
    "none, by name": {0: []},
    "one": {1: [2]},
    "some": {0: [1, 3], 2: [0]},
    "a whole layer": {1: [0, 1, 2, 3]},
    "every head": {layer: [0, 1, 2, 3] for layer in range(3)},
}


@torch.no_grad()
def randomise_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw weights that make every part matter: as made, biases are zero and LayerNorm does nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_((1 if name.endswith("LayerNorm.weight") else 0) + 0.2 * noise)
    return model


DISENTANGLED = {  # with projections of distances apart, and positions added too
    "pos_att_type": "c2p|p2c",
    "position_buckets": 4,
    "max_relative_positions": 9,
    "norm_rel_ebd": "layer_norm",
}


def make(cls: Any = BertModel, config: BertConfig | None = None, **changes: Any) -> Any:
    """Make a random model in float64 and eval mode; `changes` are fields of its config."""
    if changes.get("position_embedding_type") == "disentangled":
        changes = {**DISENTANGLED, **changes}
    return randomise_(cls(replace(config or BertConfig(**SIZES), **changes))).double().eval()


def make_batch(batch: int = 2, length: int = 11, seed: int = 1, lengths: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Make token ids, token types and a right-padded mask; by default the second sequence has 7 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = lengths or (length, *(7,) * (batch - 1))
    return {
        "input_ids": torch.randint(1, SIZES["vocab_size"], (batch, length), generator=generator),
        "token_type_ids": torch.randint(0, SIZES["type_vocab_size"], (batch, length), generator=generator),
        "attention_mask": (torch.arange(length) < torch.tensor(lengths)[:, None]).long(),
    }


def make_batches(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Make sequences of lengths 13 down to 7, in batches of at most 10."""
    whole = make_batch(count, 13, seed, tuple(13 - i % 7 for i in range(count)))
    return [{name: x[start : start + 10] for name, x in whole.items()} for start in range(0, count, 10)]


@torch.no_grad()
def seen_by(module: nn.Module, model: Any, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return what a module reads, then what it returns, at the real tokens of batches that a model runs."""
    seen: list[tuple[Tensor, ...]] = []
    with module.register_forward_hook(lambda _, args, out: seen.append((*args, out))):
        for batch in batches:
            model(**batch, output_hidden_states=True)  # of every token in the last layer too
    real = [batch["attention_mask"].bool() for batch in batches]
    return [torch.cat([x[mask] for x, mask in zip(each, real, strict=True)]) for each in zip(*seen, strict=True)]


def inputs_of(name: str = "BertModel") -> dict[str, Tensor]:
    """Make a batch for a class, whose second sequence is padded on the right."""
    if name != "BertForMultipleChoice":
        return make_batch()
    return {name: x.unflatten(0, (2, CHOICES)) for name, x in make_batch(2 * CHOICES).items()}


def words(classes: int = SIZES["vocab_size"]) -> Tensor:
    """Draw labels at some positions, (B, S)."""
    draw = torch.Generator().manual_seed(3)
    labels = torch.randint(0, classes, (2, 11), generator=draw)
    return labels.masked_fill(torch.rand(2, 11, generator=draw) > 0.4, NONE)


def labels_of(name: str) -> dict[str, Tensor]:
    """Return labels for a class, of make_batch()'s sequences."""
    return {
        "BertModel": {},
        "BertLMHeadModel": {"labels": words()},
        "BertForMaskedLM": {"labels": words()},
        "BertForMultipleChoice": {"labels": torch.tensor([6, 2])},
        "BertForNextSentencePrediction": {"labels": torch.tensor([1, 0])},
        "BertForPreTraining": {"labels": words(), "next_sentence_label": torch.tensor([0, 1])},
        "BertForQuestionAnswering": {"start_positions": torch.tensor([2, 5]), "end_positions": torch.tensor([3, 6])},
        "BertForSequenceClassification": {"labels": torch.tensor([5, 0])},
        "BertForTokenClassification": {"labels": words(LABELS)},
    }[name]


class OnCuda(Tensor):
    """A tensor here that says it is on a GPU."""

    is_cuda, is_cpu = True, False


def tensors(out: Any, path: str = "") -> dict[str, Tensor]:
    """Return {place: tensor} of everything in an output, a tuple or a dict."""
    if isinstance(out, Tensor):
        return {path: out}
    items = out.items() if isinstance(out, Mapping) else enumerate(out)
    return {k: v for name, part in items if part is not None for k, v in tensors(part, f"{path}.{name}").items()}


def assert_same(got: Any, wanted: Any, atol: float = EXACT) -> None:
    """Assert that both hold the same tensors in the same places, within `atol`; 0 means bit for bit."""
    got, wanted = tensors(got), tensors(wanted)
    assert list(got) == list(wanted)
    assert got, "nothing to compare"
    for place in wanted:

        def named(text: str, place: str = place) -> str:
            return f"{place}: {text}"

        torch.testing.assert_close(got[place], wanted[place], rtol=0, atol=atol, msg=named)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference between two tensors, to show that something made one."""
    return (a.double() - b.double()).abs().max().item()


def full_outputs(model: nn.Module, batch: Mapping[str, Any], **options: Any) -> Any:
    """Return all outputs that a model has, without gradients."""
    with torch.no_grad():
        return model(**batch, output_hidden_states=True, output_attentions=True, **options)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return {parameter: gradient of the loss} of the parameters that have one."""
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


class GradientWatch(TorchFunctionMode):
    """Note how each gradient that comes back to torch's attention lies, and how the result lay.

    Axes of size 1 are left out: they lie anywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: list[list[int]] = []
        self.gradients: list[list[int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is nn.functional.scaled_dot_product_attention and out.requires_grad:
            out.register_hook(partial(self.note, strides(out)))
        return out

    def note(self, result: list[int], gradient: Tensor) -> None:
        self.results.append(result)
        self.gradients.append(strides(gradient))


def strides(x: Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def count_runs(model: Any) -> Counter[int]:
    """Count for each layer how often its attention runs: once in a forward, and once more if it is computed again."""
    runs: Counter[int] = Counter()
    for i, layer in enumerate(model.base_model.encoder.layer):
        layer.attention.register_forward_pre_hook(lambda module, args, i=i: runs.update([i]))
    return runs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run every eighth test")


@pytest.hookimpl(trylast=True)  # after those that are marked slow have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):  # some of every room
        items[:] = items[::8]


@pytest.fixture(autouse=True)
def the_same_random_numbers() -> None:
    """Let every test draw the same numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Set the number of torch's threads, by a call, for the rest of a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let measurements have 3 rounds, whose quartiles are the least, the middle and the most."""
    monkeypatch.setattr(timing, "FEWEST", 3)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gates be learned in 5 steps, where their numbers do not matter."""
    monkeypatch.setattr("bertlite.pruning.importance.measurements.STEPS", 5)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a folder of the benchmark, in which the model of bert-base's shape is a tiny one."""
    pytest.importorskip("transformers")
    from bertlite.parity import reference

    sizes = {"vocab_size": 1000, "max_position_embeddings": 512, "num_hidden_layers": 2}
    sizes |= {"hidden_size": 96, "num_attention_heads": 6}  # heads of 16, which the native kernels take
    sizes |= {"intermediate_size": 160}  # rows of whole blocks of llama.cpp, of 32
    reference.base_shaped(tmp_path / "base", **(SIZES | sizes))
    return tmp_path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Open Chromium, or the browser that BERTLITE_CHROMIUM names, without a window; Playwright downloads nothing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    named = os.environ.get("BERTLITE_CHROMIUM")
    found = next(filter(None, map(shutil.which, [named] if named else CHROMIUM)), None)
    if found is None:
        pytest.skip(f"no {named or 'Chromium'} here: apt-get install chromium, or name one in BERTLITE_CHROMIUM")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found)
        yield opened
        opened.close()


@pytest.fixture
def config() -> BertConfig:
    return BertConfig(**SIZES)


@pytest.fixture
def model() -> BertModel:
    return make()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return make_batch()


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the backend of every kernel that runs, one name per layer, in order: proof that a path was taken."""
    run: list[str] = []

    def recording(name: str) -> Any:
        kernel = BACKENDS[name].kernel

        def record(*args: Any) -> Any:
            run.append(name)
            return kernel(*args)

        return record

    for name, backend in list(BACKENDS.items()):
        monkeypatch.setitem(BACKENDS, name, replace(backend, kernel=recording(name)))
    return run


def interrupt(*_: Any, **__: Any) -> Any:
    """Do as Ctrl-C does."""
    raise KeyboardInterrupt


@pytest.fixture
def assert_refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Return a function that asserts that a command ends with status 2 and says a message."""

    def check(message: str, *words: Any) -> None:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2, words
        assert message in capsys.readouterr().err

    return check


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that saves a model of random weights with a tokenizer, in the working directory."""
    from blocks import given

    monkeypatch.chdir(tmp_path)
    tokenizer = given(tmp_path)["tokenizer"]

    def save(name: str, cls: str, change: Any = lambda model: model, **fields: Any) -> Any:
        config = BertConfig(**{**SIZES, "max_position_embeddings": 64, "type_vocab_size": 2, **fields})
        model = change(randomise_(getattr(bertlite, cls)(config)).float().eval())
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        return model

    return save


def set_entries(path: Path, **entries: Any) -> None:
    """Set entries of a JSON file, which may be new."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**known, **entries}), encoding="utf-8")
