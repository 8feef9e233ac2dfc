"""The contexts and settings of torch around a call change no byte of what it writes, and no result of a comparison."""

import copy
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same, make, make_batch
from natively import kernels_or_skip, make_native
from worlds import add_pooling, save

from bertlite import BertForSequenceClassification, BertModel, optimize_for_inference
from bertlite.inference import InferenceModel
from bertlite.parity.cases import Case
from bertlite.parity.check import check
from bertlite.parity.families import save_random
from bertlite.shipping.convert import convert
from bertlite.shipping.pack import pack
from bertlite.support.contexts import own_context

KINDS: dict[str, dict[str, Any]] = {
    "bert": {},
    "deberta": {"position_embedding_type": "disentangled"},
    "mpnet": {"position_embedding_type": "bucketed"},
}
SAMPLE = [[(7 * i + j * j) % 97 for j in range(3 + i)] for i in range(25)]  # to which int8 is fitted
NUMBERS = [
    (torch.bfloat16, False),
    *((dtype, same) for dtype in (torch.float32, torch.int8) for same in (False, True)),
]


@contextmanager
def setting(change: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


CONTEXTS: list[Callable[[], Any]] = [
    lambda: torch.autocast("cpu", torch.bfloat16),
    torch.inference_mode,
    torch.no_grad,
    lambda: setting(torch.set_default_dtype, torch.float64, torch.get_default_dtype()),
    lambda: torch.device("meta"),
    lambda: setting(torch.use_deterministic_algorithms, True, False),
]


@contextmanager
def all_at_once() -> Iterator[None]:
    with ExitStack() as stack:
        for context in CONTEXTS:
            stack.enter_context(context())
        yield


def bytes_in(folder: Path) -> dict[str, int]:
    """Return a hash of each file; records name the time."""
    others = ("README.md", "report.json")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in others)
    assert files
    return {path.relative_to(folder).as_posix(): zlib.crc32(path.read_bytes()) for path in files}


def hashes(tensors: Iterable[Any]) -> list[int]:
    return [zlib.crc32(x.numpy().tobytes()) for x in tensors]


def saved(model: Any, folder: Path) -> dict[str, int]:
    (model.save if isinstance(model, InferenceModel) else model.save_pretrained)(folder)
    return bytes_in(folder)


Ways = dict[str, Callable[[Path], Any]]


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Ways:
    """Return each way to make or move an optimised model, by name; it takes an empty folder."""
    kernels_or_skip()
    ways, folder = Ways(), tmp_path_factory.mktemp("sources")

    def converted(model: Any, options: Any, out: Path) -> Any:
        return saved(optimize_for_inference(model, **options), out)

    for kind, fields in KINDS.items():
        model = make_native(BertForSequenceClassification, num_hidden_layers=2, **fields).float()
        for dtype, same in NUMBERS:
            verify = dtype in (torch.float32, torch.int8) and not same
            options = {"dtype": dtype, "reproducible": same, "verify": verify, "backend": "native"}
            ways[f"{kind} {dtype} {same}"] = partial(converted, model, options)
        ways[f"fitted {kind}"] = partial(converted, model, {"dtype": torch.int8, "sample": SAMPLE})
    model.save_pretrained(folder / "model")
    quick = optimize_for_inference(model, dtype=torch.int8)
    quick.save(folder / "quick")
    pickled, batch = pickle.dumps(quick), make_batch()

    def loaded(out: Path) -> Any:
        found = BertForSequenceClassification.from_pretrained(folder / "model")
        assert all(x.requires_grad and not x.is_inference() for x in found.parameters()), "it can be trained"
        return saved(found, out)

    return ways | {
        "save": lambda out: saved(quick, out),
        "load": lambda out: saved(InferenceModel.load(folder / "quick"), out),
        "unpickle": lambda out: saved(pickle.loads(pickled), out),
        "copy": lambda out: saved(copy.deepcopy(quick), out),
        "from_pretrained": loaded,
        "plain": lambda out: hashes(optimize_for_inference(model, backend="plain").model.state_dict().values()),
        "run": lambda out: hashes(quick(**batch).to_tuple()),
    }


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Ways:
    """Return each way that runs another library, for a comparison, by name."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sentence_transformers")
    kernels_or_skip()
    folder = tmp_path_factory.mktemp("checkpoints")
    add_pooling(save(folder / "bert"))
    save_random(save(folder / "deberta"), "deberta-v2", "small")
    theirs = transformers.AutoModel.from_pretrained(folder / "deberta").eval()

    def body(out: Path) -> Any:
        quick = optimize_for_inference(theirs, dtype=torch.int8)
        return hashes([quick.model.base_model.encoder.weights.data]), quick.output_type, quick.gap

    def packed(name: str, out: Path) -> Any:
        return pack(folder / name, out, dtype="int8", reproducible=True), bytes_in(out)

    def checked(out: Path, dtype: str, *feature: str) -> Any:
        return check(Case("BertModel", "sdpa", "padded", dtype, *feature), "cpu", folder / "bert").rows

    return {
        "body": body,
        "pack a BERT": partial(packed, "bert"),
        "pack a DeBERTa": partial(packed, "deberta"),
        "convert": lambda out: (convert(folder / "deberta", out), bytes_in(out)),
        "check": lambda out: checked(out, "float32"),
        "check gradients": lambda out: checked(out, "float64", "gradients"),
    }


def found_in(ways: Ways, folder: Path) -> dict[str, Any]:
    found = {}
    for i, (name, way) in enumerate(ways.items()):
        (folder / str(i)).mkdir(parents=True)
        found[name] = way(folder / str(i))
    return found


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, value in found.items() if value != wanted[name]] == []


def test_a_conversion_gives_the_same_bytes_in_all_contexts(conversions, tmp_path, set_threads):
    before = found_in(conversions, tmp_path / "before")
    with all_at_once():
        found = found_in(conversions, tmp_path / "found")
    assert_equal(found, before)
    for count in (1, 2):  # torch's products depend on it; here they wait for each other
        set_threads(count)
        few = {name: way for name, way in conversions.items() if name.startswith("deberta")}
        assert_equal(found_in(few, tmp_path / str(count)), {name: before[name] for name in few})


def test_a_comparison_with_another_library_is_the_same_in_all_contexts(libraries: Ways, tmp_path: Path) -> None:
    before = found_in(libraries, tmp_path / "before")
    with all_at_once():
        found = found_in(libraries, tmp_path / "found")
    assert_equal(found, before)


def test_the_callers_contexts_are_left_and_come_back() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with all_at_once():
        before = torch.ones(()).device, torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        with own_context(gradients=True):
            out = weight @ torch.ones(2, 2, dtype=torch.float32)
            assert (out.dtype, out.device.type, out.requires_grad) == (torch.float32, "cpu", True)
        with pytest.raises(ValueError, match="unknown"):
            optimize_for_inference(make(BertModel), backend="other")
        assert (torch.ones(()).device, torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")) == before
    assert_same(out, torch.full((2, 2), 2.0), atol=0)
