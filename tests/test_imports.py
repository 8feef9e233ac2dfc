"""Imports point one way, and `import bertlite` stays cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bertlite

PACKAGE = Path(bertlite.__file__).parent
ORDER = (  # a module imports from the rows above its own, or within its own folder
    (
        "bertlite.activations",
        "bertlite.batching",
        "bertlite.cache",
        "bertlite.folders",
        "bertlite.outputs",
        "bertlite.packing",
    ),
    ("bertlite.config",),
    ("bertlite.attention",),
    ("bertlite.inputs", "bertlite.modules"),
    ("bertlite.model",),
    ("bertlite.heads", "bertlite.pruning", "bertlite.checkpoint", "bertlite.tokenization"),
    ("bertlite.importance", "bertlite.inference"),
    ("bertlite.public",),
    ("bertlite",),
    ("bertlite.measure", "bertlite.record"),
    (
        "bertlite.attention_view",
        "bertlite.embed",
        "bertlite.experiments",
        "bertlite.hf",
        "bertlite.inspection",
        "bertlite.parity",
    ),
    ("bertlite.bench",),
    ("bertlite.cli",),
    ("bertlite.__main__",),
)
ROW = {name: row for row, names in enumerate(ORDER) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """The entry of ORDER that a module belongs to: itself, or the folder under bertlite that it lies in."""
    return ".".join(module.split(".")[:2])


def imported_at_once(tree: ast.Module, module: str, is_package: bool) -> set[str]:
    """The modules of bertlite that an import of this one runs: not those imported within functions, nor for types."""
    found: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:  # `from bertlite import model` imports the module, `… import BertModel` the names
                inner = f"{base}.{alias.name}"
                is_module = any((PACKAGE.parent / f"{inner.replace('.', '/')}{end}").exists() for end in (".py", ""))
                found.add(inner if is_module else base)
        else:
            todo += ast.iter_child_nodes(node)
    return {name for name in found if name.split(".")[0] == "bertlite"}


def test_the_scan_sees_every_kind_of_import() -> None:
    tree = ast.parse(
        "import torch\n"
        "import bertlite.model\n"
        "from bertlite import config, BertModel\n"
        "from . import attention\n"
        "from .heads import BertForMaskedLM\n"
        "if True:\n    from bertlite.modules import linear\n"
        "class A:\n    from bertlite.outputs import register\n    def f(self):\n        import bertlite.cli\n"
        "if TYPE_CHECKING:\n    import bertlite.hf\n"
        "def g():\n    from bertlite.pruning import densify\n"
    )
    names = ("model", "config", "attention", "heads", "modules", "outputs")
    wanted = {"bertlite", *(f"bertlite.{name}" for name in names)}
    assert imported_at_once(tree, "bertlite.checkpoint", is_package=False) == wanted
    relative = ast.parse("from . import check\nfrom .. import heads\nfrom ..config import BertConfig")
    assert imported_at_once(relative, "bertlite.parity.cases", is_package=False) == {
        "bertlite.parity.check",
        "bertlite.heads",
        "bertlite.config",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_module_imports_only_from_above(path: Path) -> None:
    module = module_of(path)
    unit = unit_of(module)
    assert unit in ROW, f"{unit} has no place in ORDER"
    for name in imported_at_once(ast.parse(path.read_text(encoding="utf-8")), module, path.name == "__init__.py"):
        other = unit_of(name)
        assert other in ROW, f"{other} has no place in ORDER"
        assert ROW[other] < ROW[unit] or other == unit != name, f"{module} imports {name}, which is not above it"


def test_the_table_matches_the_files() -> None:
    """The core is there, under these names; what is not written yet may be absent."""
    core = ("activations", "config", "attention", "modules", "model", "outputs", "heads", "pruning", "checkpoint")
    assert {f"bertlite.{name}" for name in core} <= {unit_of(module_of(path)) for path in FILES}


def test_no_two_modules_import_each_other() -> None:
    graph = {
        module_of(path): imported_at_once(
            ast.parse(path.read_text(encoding="utf-8")), module_of(path), path.name == "__init__.py"
        )
        for path in FILES
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    assert done >= set(graph)


def loaded_by(*statements: str) -> set[str]:
    """What is in sys.modules after these statements, in a new interpreter."""
    code = "; ".join([*statements, "import sys", "print('\\n'.join(sys.modules))"])
    env_free = [sys.executable, "-c", code]
    path = str(PACKAGE.parent)
    done = subprocess.run(env_free, cwd=path, capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_import_bertlite_loads_nothing_else() -> None:
    python, ours = loaded_by("pass"), loaded_by("import bertlite")
    assert {name for name in ours - python if name.partition(".")[0] not in sys.stdlib_module_names} == {"bertlite"}


def test_the_public_names_load_torch_and_bertlite_alone() -> None:
    torch_alone, ours = loaded_by("import torch"), loaded_by("from bertlite import BertModel")
    assert {"torch", "bertlite.model"} <= ours
    top = {name.partition(".")[0] for name in ours}
    assert not top & {"transformers", "matplotlib", "huggingface_hub", "safetensors", "tokenizers", "accelerate"}
    new = top - {name.partition(".")[0] for name in torch_alone} - set(sys.stdlib_module_names)
    assert new == {"bertlite"}
    lazy = {"torch.utils.checkpoint", "torch._dynamo", "torch._inductor", "torch.export"}
    assert not (ours - torch_alone) & lazy
    assert {name for name in ours - torch_alone if name.startswith("numpy")} == set()


def test_what_is_public_is_there_and_nothing_else() -> None:
    assert sorted(bertlite.__all__) == list(bertlite.__all__)
    assert all(hasattr(bertlite, name) for name in bertlite.__all__)
    assert set(bertlite.__all__) <= set(dir(bertlite))
    assert not hasattr(bertlite, "kept_head")
    assert not hasattr(bertlite, "_names")
    with pytest.raises(ImportError, match="cannot import name 'BertModle' from 'bertlite'"):
        from bertlite import BertModle  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    "use",
    [
        "from bertlite import *; BertModel, token_budget_batches",
        "import bertlite; bertlite.pruning.prune_heads is bertlite.prune_heads or 1 / 0",
        "from bertlite import pruning; pruning.densify",
        "import bertlite; help(bertlite)",
        "import bertlite, pickle; pickle.loads(pickle.dumps(bertlite.BertModel)) is bertlite.BertModel or 1 / 0",
        "import pickle; pickle.loads(b'cbertlite\\nBertConfig\\n.').from_dict",
    ],
)
def test_a_new_interpreter_finds_what_is_public(use: str) -> None:
    done = subprocess.run([sys.executable, "-c", use], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if "help" in use:
        assert "class BertModel(" in done.stdout
