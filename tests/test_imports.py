"""Imports point one way, and `import bertlite` stays cheap.

Every import counts: those inside functions, those for types alone (under TYPE_CHECKING), and modules that are named in
a string, which `bertlite.cli` imports when a command runs.
"""

import ast
import importlib
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import bertlite
from bertlite.support.extras import PUBLIC, public_homes

PACKAGE = Path(bertlite.__file__).parent
LIBRARY = (  # a room imports from the rows above its own; inside a room modules import each other, without a cycle
    ("runtime",),
    ("support",),
    ("config",),
    ("stack",),
    ("checkpoint",),
    ("models", "tokenizer"),
    ("opened",),
    ("inference", "pruning"),
    ("bertlite",),
    ("hf",),
)
WORKSHOP = (
    ("attention_view", "causal", "parity"),
    ("shipping",),
    ("embed", "experiments"),
    ("commands",),
    ("cli",),
    ("__main__",),
)
ORDER = (*LIBRARY, *WORKSHOP)
ROW = {room: row for row, rooms in enumerate(ORDER) for room in rooms}
FILES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py"))}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


def room_of(module: str) -> str:
    """Return the room that a module lies in; "bertlite" for the package itself."""
    return module.split(".")[1] if "." in module else module


def imports(source: str, module: str, is_package: bool = False) -> set[str]:
    """Return every module of bertlite that this source imports or names in a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:  # `from bertlite import model` imports the module, `… import BertModel` a name
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in MODULES else base)
        elif isinstance(node, ast.Constant) and node.value in MODULES and node.value != "bertlite":
            found.add(node.value)
    return {name for name in found if name.split(".")[0] == "bertlite"}


GRAPH = {
    module: imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    for module, path in MODULES.items()
}
GRAPH["bertlite"] -= {module for module in MODULES if room_of(module) in sum(WORKSHOP, ())}  # for type checkers alone


def needed_by(module: str) -> set[str]:
    """Return all modules of bertlite that a module imports, directly or through others."""
    found, todo = set[str](), [module]
    while todo:
        new = GRAPH.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def test_the_scan_sees_every_kind_of_import() -> None:
    source = (
        "import torch\n"
        "import bertlite.models.base\n"
        "from bertlite import config, BertModel\n"
        "from . import runs\n"
        "from .stack.inputs import read_mask\n"
        "if TYPE_CHECKING:\n    import bertlite.hf\n"
        "class A:\n    from bertlite.stack.outputs import register\n    def f(self):\n        import bertlite.cli\n"
        "command('bertlite.parity.command', 'bertlite', 'bertlite.nothing')\n"
    )
    names = ("models.base", "config", "hf", "stack.outputs", "cli")
    near = ("support.runs", "support.stack.inputs")  # of relative imports
    wanted = {"bertlite", "bertlite.parity.command", *(f"bertlite.{name}" for name in (*names, *near))}
    assert imports(source, "bertlite.support.batching") == wanted
    relative = "from . import check\nfrom .. import models\nfrom ..config import BertConfig"
    found = {"bertlite.parity.check", "bertlite.models", "bertlite.config"}
    assert imports(relative, "bertlite.parity.cases") == found
    assert imports(relative, "bertlite.parity", is_package=True) == found


def test_every_room_has_a_row_every_row_a_room_and_there_are_few() -> None:
    assert {room_of(module) for module in MODULES} == set(ROW)
    assert len({*ROW} - {"bertlite", "__main__"}) <= 20


def test_a_room_imports_only_from_rooms_above_it() -> None:
    """So the library imports nothing of the workshop, and the runtime nothing else of bertlite."""
    edges = [(module, name) for module in MODULES for name in GRAPH[module] if room_of(name) != room_of(module)]
    wrong = [f"{module} imports {name}" for module, name in edges if ROW[room_of(name)] >= ROW[room_of(module)]]
    assert not wrong, "ORDER does not place above the room that imports it what " + "; ".join(sorted(wrong))


def test_the_tour_lists_the_rooms_in_the_order_of_imports() -> None:
    """CONTRIBUTING's table has every room once, none above one that it imports from."""
    rows = re.findall(r"^\| (`bertlite/.+?) \|", (PACKAGE.parent / ".github/CONTRIBUTING.md").read_text("utf-8"), re.M)
    rooms = [room for row in rows for room in re.findall(r"`bertlite/(\w+)(?:\.py|/)`", row)]
    assert sorted(rooms) == sorted({*ROW} - {"bertlite", "__main__"})
    assert [ROW[room] for room in rooms] == sorted(ROW[room] for room in rooms)


def test_no_modules_import_each_other() -> None:
    TopologicalSorter(GRAPH).prepare()  # raises CycleError, which names one


def test_files_need_no_model() -> None:
    support = {f"bertlite.support.{name}" for name in ("files", "screen")}
    light = {*support, "bertlite.checkpoint.faults", "bertlite.checkpoint.folders"}
    for module in ("support.files", "checkpoint.faults", "checkpoint.files", "checkpoint.folders"):
        assert needed_by(f"bertlite.{module}") <= light, module


def test_a_tokenizer_needs_no_model() -> None:
    files = {f"bertlite.checkpoint.{name}" for name in ("faults", "files", "folders", "hub")}
    families = {f"bertlite.checkpoint.{name}" for name in ("families", "names")}  # which say how many positions it has
    support = {f"bertlite.support.{name}" for name in ("activations", "files", "habits", "kinds", "screen")}
    allowed = {*files, *families, *support, "bertlite.config", "bertlite.runtime.processing"}
    for module in (name for name in MODULES if room_of(name) == "tokenizer"):
        assert {name for name in needed_by(module) if room_of(name) != "tokenizer"} <= allowed, module


def loaded_by(before: str, statement: str) -> set[str]:
    """Return the names that a statement adds to sys.modules after another, in a new interpreter."""
    code = f"{before}; import sys; old = {{*sys.modules}}; {statement}; print(*sys.modules.keys() - old)"
    command = [sys.executable, "-c", code]
    return set(subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True).stdout.split())


def foreign(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names) - {"bertlite"}


def test_imports_load_few_libraries() -> None:
    assert foreign(loaded_by("pass", "import bertlite")) == set()
    assert foreign(loaded_by("pass", "import bertlite.runtime")) <= {"numpy", "tokenizers"}


def test_a_public_name_loads_torch_and_what_it_needs_of_bertlite() -> None:
    loaded = loaded_by("import torch", "from bertlite import BertForMaskedLM")  # and of BertModel, beneath it
    assert "bertlite.models.heads" in loaded
    assert foreign(loaded) <= {"torch"}
    assert not loaded & {"torch.utils.checkpoint", "torch._dynamo", "torch._inductor", "torch.export"}
    assert not [each for each in loaded if re.match(r"bertlite\.(commands|inference|tokenizer|pruning)", each)]
    loaded = loaded_by("import torch", "from bertlite.pruning import with_pruned")
    assert not [each for each in loaded if re.match(r"bertlite\.(commands|inference|tokenizer|pruning\.)", each)]


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_has_the_names_that_it_imports_for_type_checkers(package: str) -> None:
    module, homes = importlib.import_module(package), public_homes(package)
    assert homes
    assert module.__all__ == sorted(homes)
    for name, home in homes.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
        assert name in dir(module)


def test_the_package_has_few_names_and_no_others() -> None:
    assert len(bertlite.__all__) <= 31
    assert set(dir(bertlite)) == {*bertlite.__all__, "__all__", "__version__"}
    assert not hasattr(bertlite, "kept_head")
    assert not hasattr(bertlite, "_names")
    with pytest.raises(ImportError, match="cannot import name 'BertModle' from 'bertlite'"):
        from bertlite import BertModle  # type: ignore[attr-defined]  # noqa: F401


def moved_names() -> list[tuple[str, str, str]]:
    """Return (old package, name, new package or name) from the changelog's table."""
    docs = PACKAGE.parent / "notebooks" / "docs"
    pages = [(docs / page).read_text(encoding="utf-8") for page in ("changelog.md", "migration.md")]
    tables = [re.findall(r"^\| (`bertlite.*`) \| (`\w+`.*) \| `([\w.]+)`.* \|$", page, re.M) for page in pages]
    found = tables[0]
    assert tables[1][-len(found) :] == found
    quoted = re.compile("`([^`]+)`").findall
    return [(old, name, new) for olds, names, new in found for old in quoted(olds) for name in quoted(names)]


def test_a_name_that_moved_is_in_its_new_home_and_an_error_gives_it() -> None:
    moved = moved_names()
    assert len(moved) > 50
    for old, name, new in moved:
        words = re.escape(f"module '{old}' has no attribute '{name}'; it is {new}")
        with pytest.raises(AttributeError, match=words):
            getattr(importlib.import_module(old), name)
        with pytest.raises(ImportError, match=words):
            exec(f"from {old} import {name}")
        package, _, last = new.rpartition(".")
        try:
            assert hasattr(importlib.import_module(new), name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(package), last)


def test_a_module_that_asks_bertlite_for_its_names_gets_an_attribute_error(monkeypatch: pytest.MonkeyPatch) -> None:
    shim = ModuleType("shim")
    exec("import bertlite\ndef __getattr__(name):\n    return getattr(bertlite, name)", vars(shim))
    monkeypatch.setitem(sys.modules, "shim", shim)
    with pytest.raises(ImportError, match="cannot import name 'densify' from 'shim'"):
        exec("from shim import densify")


def test_a_new_interpreter_finds_what_is_public() -> None:
    """By its name in a pickle, as a part of a package that nothing imported, and by a star."""
    pickled = "import pickle; pickle.loads(b'cbertlite\\nBertConfig\\n.').from_dict"
    part = "import bertlite; bertlite.inference.optimize_for_inference is bertlite.optimize_for_inference or 1 / 0"
    loaded_by("import torch", f"{pickled}; {part}; from bertlite import *; BertModel, token_budget_batches")


TWICE = {"compare", "describe", "fingerprint", "read_model"}


def test_a_name_means_one_thing() -> None:
    """Functions and classes at the top of modules, without hf's, which are named as transformers'.

    The command line calls `main` and `summary_lines` of any module.
    """
    homes: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body if room_of(module) != "hf" else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                homes.setdefault(node.name, set()).add(module)
    twice = {name for name, modules in homes.items() if len(modules) > 1} - {"main", "summary_lines"}
    assert twice <= TWICE, {name: sorted(homes[name]) for name in twice - TWICE}
    assert len(TWICE) <= 10
