"""bertlite/shipping: ONNX graphs compute what the model does, or are not kept, and OpenVINO reads them."""

import json
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make, set_entries
from torch import Tensor, nn
from worlds import PRUNED, add_pooling, read, save

import bertlite
from bertlite import BertForSequenceClassification, BertModel
from bertlite.cli import main, parser
from bertlite.cli.parts import subcommands
from bertlite.models import heads
from bertlite.shipping import onnx
from bertlite.shipping.export import SHAPES, export
from bertlite.shipping.onnx import INPUTS, Graph
from bertlite.support.extras import install_hint

TINY = {"num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 37}
CLASSES = [BertModel, *(getattr(heads, name) for name in heads.__all__)]


def needs(*packages: str) -> None:
    """Skip the test where one of these packages, or of those of the export, is not installed."""
    for package in (*onnx.PACKAGES, *packages):
        pytest.importorskip(package)


# Graphs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_graph_without_empty_matrices_computes_what_the_pruned_model_does(cls):
    changes = {"is_decoder": True} if cls.__name__ == "BertLMHeadModel" else {}
    model = make(cls, **PRUNED, **changes).float()
    graph = Graph(model)
    for batch, length in SHAPES:
        inputs = graph.sample(batch, min(length, graph.longest))
        with torch.no_grad():
            wanted = model(**inputs, **({"use_cache": False} if changes else {}))
            found = graph(**inputs)
        assert graph.outputs == tuple(wanted)
        for a, b in zip(found, wanted.to_tuple(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # float32
    assert all(module.weight.numel() for module in graph.modules() if isinstance(module, nn.Linear))


def test_samples_have_padding_and_a_sequence_of_nothing_else():
    inputs = Graph(make().float()).sample(4, 9)
    assert inputs["attention_mask"].sum(1).tolist() == [9, 5, 0, 9]
    assert (inputs["input_ids"][0] != inputs["input_ids"][1]).any()


def test_a_model_with_cross_attention_is_refused():
    model = make(heads.BertLMHeadModel, is_decoder=True, add_cross_attention=True)
    with pytest.raises(ValueError, match="with cross-attention cannot be exported"):
        Graph(model)


# What is refused, whatever is installed ------------------------------------------------------------------------------


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a file be written and run by the graph itself, so that no other library is needed; return a function.

    It changes what is computed at length 11.
    """
    graphs, changes = [], [0.0]

    def write(graph: Graph, path: Path) -> None:
        graphs.append(graph)
        path.write_text("a graph")

    def run(inputs: dict[str, Tensor]) -> list[Tensor]:
        *others, last = graphs[-1](**inputs)
        return [*others, last + changes[-1] * (inputs["input_ids"].shape[-1] == 11)]

    for name, value in {"PACKAGES": (), "write_onnx": write, "load_onnx": lambda path: run}.items():
        monkeypatch.setattr(f"bertlite.shipping.export.{name}", value)
    return changes.append


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    return save(folder, BertForSequenceClassification, **PRUNED, num_labels=3)


@pytest.mark.parametrize("change", [1e-3, float("nan")])
def test_a_graph_that_computes_something_else_is_not_kept(change, source, tmp_path, pretend):
    pretend(change)
    with pytest.raises(ValueError, match=r"the graph computes other outputs .* logits at 2x11: error (1\.0e-03|nan)"):
        export(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert main(["export", str(source), "--out", str(tmp_path / "out")]) == 2


def test_a_package_that_is_missing_is_named_with_its_extra(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", str(source), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said == f"bertlite export: the export needs onnxscript, which is not installed: {install_hint('onnx')}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [{"return_dict": False}, {"output_hidden_states": True, "output_attentions": True}])
def test_commands_ask_for_the_outputs_that_they_read_whatever_the_config_says(flags, tmp_path, pretend, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = add_pooling(save(Path("model")))
    set_entries(Path("model/config.json"), **flags)
    Path("texts.txt").write_text("a b\nc\n")
    assert main(["export", "model", "--out", "graphs"]) == 0
    assert read(Path("graphs/export.json"))["outputs"] == ["last_hidden_state", "pooler_output"]
    assert read(Path("graphs/modules.json")) == read(source / "modules.json")
    assert main(["attention", "model", "a b", "--out", "page.html"]) == 0
    pytest.importorskip("pyarrow")
    assert main(["embed", "model", "texts.txt", "--out", "vectors"]) == 0


def test_a_folder_of_something_else_is_left_alone(source, tmp_path, pretend):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="does not hold an export of this checkpoint"):
        export(source, tmp_path / "out")
    other = save(tmp_path / "other")
    export(source, tmp_path / "graphs")
    with pytest.raises(FileExistsError, match="name another folder"):
        export(other, tmp_path / "graphs")


def test_the_folder_has_the_record_and_what_loaders_need(source, tmp_path, pretend, capsys):
    out = tmp_path / "out"
    words = ["export", str(source), "--out", str(out), "--json"]
    assert main(words) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == read(out / "export.json")
    assert record["class"] == "BertForSequenceClassification"
    assert (record["inputs"], record["outputs"]) == (["input_ids", "attention_mask", "token_type_ids"], ["logits"])
    assert [(shape["batch"], shape["length"]) for shape in record["shapes"]] == [(1, 1), (2, 11), (4, 5), (3, 40)]
    assert all(shape["outputs"]["logits"]["ok"] for shape in record["shapes"])
    names = {"onnx/model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "export.json"}
    assert names == {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert read(out / "config.json")["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    assert read(out / "tokenizer.json")["truncation"] is None


def test_the_checkpoints_own_folder_gets_the_graph_alone(source, tmp_path, pretend):
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model_quantized.onnx").write_text("somebody's")
    (folder / "onnx" / "model.onnx").write_text("somebody's")
    with pytest.raises(ValueError, match=r"onnx holds model\.onnx, which is of another kind: name another folder"):
        export(folder, folder)
    (folder / "onnx" / "model.onnx").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    export(folder, folder)
    (folder / "onnx" / "model.onnx").write_text("old")
    export(folder, folder)  # twice: the checkpoint is the same
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after.pop("export.json")
    assert after == before
    assert (folder / "onnx" / "model.onnx").read_text() == "a graph"
    assert (folder / "onnx" / "model_quantized.onnx").read_text() == "somebody's"


def test_the_commands_of_the_page_are_examples_of_help():
    """And those are run by tests/test_terminal.py."""
    page = (Path(__file__).parents[2] / "notebooks" / "docs" / "shipping.md").read_text(encoding="utf-8")
    shown = [line.removeprefix("bertlite ") for line in page.splitlines() if line.startswith("bertlite ")]
    top = subcommands(parser())
    known = {line for each in (*top.values(), *subcommands(top["prune"]).values()) for line in each.examples}
    assert len(shown) == 4
    assert set(shown) <= known


# The real format -----------------------------------------------------------------------------------------------------


def exported(cls: Any, folder: Path, **changes: Any) -> tuple[Any, Path]:
    """Export a model and return it with the file, whose record says that it was compared."""
    save(folder / "model", cls, **{**TINY, **changes})
    out = folder / "out"
    with torch.autocast("cpu", torch.bfloat16):  # which the graph must not have
        assert export(folder / "model", out)["class"] == cls.__name__
    return cls.from_pretrained(folder / "model"), out / onnx.FILE


def check(model: Any, run: onnx.Forward) -> None:
    """Run a graph on batches of shapes that its export did not see, and compare."""
    graph = Graph(model)
    for batch, length in ((1, 2), (5, 3), (2, 39), (7, 17)):
        inputs = graph.sample(batch, length, seed=batch)
        with torch.no_grad():
            wanted = model(**inputs, **graph.options).to_tuple()
        for found, each in zip(run(inputs), wanted, strict=True):
            torch.testing.assert_close(found, each, rtol=0, atol=2e-5)  # float32, other kernels: 7e-6 seen


UNLIKE = (BertModel, heads.BertLMHeadModel)  # an encoder with two outputs, and a decoder


@pytest.mark.parametrize(
    "cls",
    [cls if cls in UNLIKE else pytest.param(cls, marks=pytest.mark.slow) for cls in CLASSES],
    ids=lambda cls: cls.__name__,
)
def test_every_class_pruned_is_run_at_shapes_that_were_not_traced(cls, tmp_path):
    """And its graph names inputs, outputs and axes."""
    needs()
    from onnx import load

    changes: dict[str, Any] = {"pruned_heads": {0: (1, 3)}, "pruned_neurons": {0: (0, 5)}}
    if cls is BertModel:  # the others' layers are the same
        changes = {**PRUNED, "num_hidden_layers": 3, "position_embedding_type": "relative_key_query"}
    if cls is heads.BertLMHeadModel:
        changes["is_decoder"] = True
    model, path = exported(cls, tmp_path, **changes)
    check(model, onnx.load_onnx(path))
    assert str(Path(bertlite.__file__).parent).encode() not in path.read_bytes(), "it tells of this machine"
    found, graph = load(path).graph, Graph(model)
    axes = {each.name: [axis.dim_param for axis in each.type.tensor_type.shape.dim] for each in found.input}
    assert axes == {name: [*graph.axes] for name in INPUTS}
    assert tuple(each.name for each in found.output) == graph.outputs


@pytest.mark.parametrize("own_format", [False, True], ids=["the ONNX file", "made from it"])
def test_openvino_reads_the_file(own_format, tmp_path):
    """And writes its own format from it, as the page says."""
    needs("openvino")
    import openvino

    model, path = exported(heads.BertForPreTraining, tmp_path, **{**PRUNED, "num_hidden_layers": 3})
    if own_format:
        graph, path = openvino.convert_model(path), tmp_path / "openvino_model.xml"
        openvino.save_model(graph, path, compress_to_fp16=False)
    served = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(inputs: dict[str, Tensor]) -> list[Tensor]:
        found = served({name: x.numpy() for name, x in inputs.items()})
        return [torch.from_numpy(found[name]) for name in Graph(model).outputs]

    check(model, run)


@pytest.mark.clients
@pytest.mark.optional
@pytest.mark.parametrize(
    ("backend", "module"), [("onnx", "optimum.onnxruntime"), ("openvino", "optimum.intel.openvino")]
)
def test_sentence_transformers_runs_the_graph(backend, module, tmp_path):
    needs(*([backend] if backend == "openvino" else []))
    for package in ("sentence_transformers", module):
        if find_spec(package.partition(".")[0]) is None:
            pytest.skip(f"{package} is not installed")
        pytest.importorskip(package)
    from sentence_transformers import SentenceTransformer

    source = add_pooling(save(tmp_path / "model", **TINY, pruned_heads={0: (1,)}))
    set_entries(source / "1_Pooling" / "config.json", word_embedding_dimension=TINY["hidden_size"])
    export(source, tmp_path / "out")
    if backend == "openvino":
        import openvino

        graph = openvino.convert_model(tmp_path / "out" / onnx.FILE)
        openvino.save_model(graph, tmp_path / "out" / "openvino" / "openvino_model.xml", compress_to_fp16=False)
    options = {
        "onnx": {"provider": "CPUExecutionProvider"},
        "openvino": {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}},
    }
    model = SentenceTransformer(str(tmp_path / "out"), backend=backend, device="cpu", model_kwargs=options[backend])
    texts = ["a b c", "d " * 30, "e"]
    wanted = bertlite.Embedder(source).encode(texts)
    assert model.max_seq_length == 24
    assert float(abs(model.encode(texts) - wanted).max()) < 1e-5  # float32 of unit vectors, other kernels
