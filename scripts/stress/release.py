"""Build the wheel and the sdist and try them in an environment where nothing else is installed.

    python -m scripts.stress.release                   # this environment's torch, the newest of all else
    python -m scripts.stress.release --lowest PYTHON   # the oldest of all that pyproject.toml allows
    python -m scripts.stress.release --newest PYTHON   # the newest torch, the rest as in constraints.txt
    python -m scripts.stress.release --pages           # each page's commands after its install line alone

Makes an empty environment in a temporary folder, outside the checkout, and installs the wheel there without extras;
torch, which is large, is lent by the environment that runs this.  There `import bertlite` must work and import no
more than its dependencies, `bertlite --help` must run, a model must be saved and loaded again, and its version must
be `bertlite.__version__`.  With --lowest the wheel goes into PYTHON's environment, which has the oldest torch already
and is changed, and the tests of TESTS run there too.  With --newest so does the newest torch of the index, and what
developers install, at the versions of constraints.txt; all tests run there, and `bertlite parity`, which writes its
record into --out.  Takes minutes, --newest an hour, and a package index; exits 1 at the first step that fails.
`scripts/stress/hf_suites.py` runs transformers' own tests.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

from bertlite import __version__
from bertlite.parity.command import DEMO

ROOT = Path(__file__).resolve().parents[2]
TESTS = (  # files and folders of tests/
    *("test_config.py", "models", "pruning/test_pruning.py", "tokenizer", "checkpoint/test_checkpoint.py"),
    *("stack/test_attention.py", "stack/test_modules.py", "stack/test_packed.py"),
)
PAGES = {  # of the documentation: the extra that its install line names, and the tests that run its commands
    "README.md": ("cli", ("test_terminal.py",)),
    "notebooks/docs/own_data.md": ("cli", ("experiments/test_own_data.py",)),
    "notebooks/docs/notebooks.md": ("notebooks", ("test_notebooks.py",)),
    "notebooks/docs/quickstart.md": ("hf", ("parity/test_parity.py",)),
    "notebooks/docs/shipping.md": ("onnx", ("shipping/test_export.py",)),
}
TRY = """
import sys, tempfile, importlib.metadata, torch, bertlite
extras = {"transformers", "accelerate", "datasets", "pyarrow", "matplotlib", "scipy", "sklearn"} & sys.modules.keys()
assert not extras, extras
assert importlib.metadata.version("bertlite") == bertlite.__version__ == sys.argv[1], bertlite.__version__
sizes = dict(vocab_size=97, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=37)
model = bertlite.BertModel(bertlite.BertConfig(**sizes)).eval()
ids = torch.arange(22).view(2, 11)
pruned = bertlite.prune_heads(model, {0: [1]})
with tempfile.TemporaryDirectory() as folder:
    pruned.save_pretrained(folder)
    again = bertlite.BertModel.from_pretrained(folder)
    assert again(ids).last_hidden_state.equal(pruned(ids).last_hidden_state)
    compiled = torch.compile(again, fullgraph=True, backend="eager")
    assert compiled(ids).last_hidden_state.equal(pruned(ids).last_hidden_state)
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "to", "##ken"]
assert bertlite.BertTokenizer(words)("token")["input_ids"] == [2, 5, 6, 3]
print("bertlite", sys.argv[1], "on torch", torch.__version__, "in", bertlite.__file__)
"""


def lowest(requirements: Sequence[str]) -> list[str]:
    """Return the oldest release that each requirement allows: "torch>=2.6" -> "torch==2.6"."""
    form = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)(?:,.*)?")
    found = [form.fullmatch(each.replace(" ", "")) for each in requirements]
    return [f"{match[1]}=={match[2]}" for match in found if match]


def environment_with_torch(folder: Path) -> Path:
    """Make an environment that has the torch of this one and nothing else; return its Python."""
    venv.create(folder, with_pip=True)
    [there] = folder.glob("lib/python*/site-packages")
    torch = distribution("torch")
    for name in {file.parts[0] for file in torch.files or () if file.parts[0] != ".."}:
        (there / name).symlink_to(str(torch.locate_file(name)))
    return folder / "bin" / "python"


def step(*command: str | Path, cwd: Path = ROOT) -> None:
    print("==", *command, flush=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if "pytest" in command:
        clean |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        clean["OMP_NUM_THREADS"] = "1"  # the workers share the cores
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, env=clean)


def install(python: Path, *words: str | Path) -> None:
    step(python, "-m", "pip", "-q", "install", *words)


def run_tests(python: Path, folder: Path, names: Sequence[str]) -> None:
    """Run tests against the installed package, not the checkout."""
    install(python, "pytest", "hypothesis")
    files = [ROOT / "tests" / name for name in names]
    step(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "pythonpath=", *files, cwd=folder)


def check_contents(dist: Path) -> Path:
    """Return the wheel; exit if an archive lacks part of the package or its py.typed, or the sdist the tests."""
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "bertlite").rglob("*.py")} | {"bertlite/py.typed"}
    needed = {"README.md", "LICENSE", "tests/conftest.py", "scripts/test"}
    strange = {name for name in in_wheel if not name.startswith(("bertlite/", "bertlite-"))}
    if wrong := sorted(modules - in_wheel | (modules | needed) - in_sdist | strange):
        sys.exit(f"{wheel.name} or {sdist.name} lacks, or the wheel has beside the package, {', '.join(wrong)}")
    return wheel


def run_pages(folder: Path) -> None:
    """Run the commands of each page in an environment made by its install line, with pytest and a lent torch."""
    for number, (page, (extra, tests)) in enumerate(PAGES.items()):
        python = environment_with_torch(folder / str(number))
        install(python, f".[{extra}]")
        if f"pip install --no-deps {DEMO}" in (ROOT / page).read_text(encoding="utf-8"):
            install(python, "--no-deps", DEMO)
        run_tests(python, folder, tests)


def run_newest(python: Path, wheel: Path, out: Path | None, folder: Path) -> None:
    """Run the tests of the checkout with the newest torch, and parity, whose record names torch."""
    torch = version_in(python, "torch")
    pins = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    suffix = "" if f"torch=={torch}\n" in lines else f"-torch-{torch}"
    others = [line for line in lines if not line.startswith("torch==")]
    pins.write_text("".join([*others, f"torch=={torch}\n"]), encoding="utf-8")
    install(python, "-c", pins, f"{wheel}[dev]")
    install(python, "-c", pins, "--no-deps", DEMO)  # it asks for another torch
    step(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto", "--dist", "worksteal", "tests")
    record = f"parity-{version_in(python, 'transformers')}{suffix}.json"
    step(python, "-m", "bertlite", "parity", "--all", *(["--out", str(out.resolve() / record)] if out else []))


def version_in(python: Path, package: str) -> str:
    """Return the version of a package in another environment, without what follows a plus sign."""
    code = f"from importlib.metadata import version; print(version({package!r}).partition('+')[0])"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--lowest", type=Path, metavar="PYTHON", help="the oldest dependencies, and the tests")
    which.add_argument("--newest", type=Path, metavar="PYTHON", help="the newest torch, the tests and parity")
    which.add_argument("--pages", action="store_true", help="each page's install line and its commands, and no more")
    parser.add_argument("--out", type=Path, help="with --newest: the folder for the record of parity")
    args = parser.parse_args(argv)
    if args.out and not args.newest:
        parser.error("--out goes with --newest")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if args.pages:
            run_pages(folder)
            return 0
        step(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ROOT, cwd=folder)
        wheel = check_contents(folder / "dist")
        given = args.lowest or args.newest
        python = given or environment_with_torch(folder / "env")
        if given:
            step(python, "-m", "pip", "-q", "uninstall", "-y", "bertlite")  # pip keeps one of this version
        if args.newest:
            install(python, "--upgrade", "torch")
        needs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
        install(python, *(lowest(needs) if args.lowest else ()), wheel)
        step(python, "-m", "pip", "-q", "check")
        step(python, "-I", "-c", TRY, __version__, cwd=folder)
        step(python.parent / "bertlite", "--help", cwd=folder)
        if args.lowest:
            run_tests(python, folder, TESTS)
        if args.newest:
            run_newest(python, wheel, args.out, folder)
    print("the release is sound")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed: {' '.join(map(str, error.cmd))[:300]}")
