"""Run the notebooks and store them with their printed texts and pictures.

    python -m scripts.make.notebooks               # all of them; about a minute on two cores
    python -m scripts.make.notebooks 02 07         # those whose names begin so

tests/test_notebooks.py compares: words are equal, numbers differ by rounding at most, and as many pictures are drawn.
In a cell with the tag `machine`, whose numbers depend on the machine (times, errors in half precision), numbers may
differ.
"""

import argparse
import ast
import base64
import hashlib
import io
import os
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from bertlite.support.files import write_text

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
MACHINE = "machine"  # the tag of a cell whose numbers depend on the machine
SECONDS = 600  # of a cell; on a machine at rest a whole notebook takes less than a minute
COLOURS = 256  # of a stored picture
RELATIVE = 0.01  # of a number with decimals; and one unit of its last digit: what another CPU's rounding may change
ABSOLUTE = 1e-9  # rounding errors in float64 are printed too, and no two machines agree about them
NUMBER = re.compile(r"(?<![A-Za-z_])[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "KINETO_LOG_LEVEL": "6",  # torch's profiler announces itself
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm misses widgets, which no notebook shows
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks whose names begin so (default: all)")
    args = parser.parse_args(argv)
    import nbformat

    for path in select(args.names):
        write_text(path, nbformat.writes(execute(path)) + "\n")
        print(path.name, flush=True)
    return 0


def select(names: Sequence[str]) -> list[Path]:
    """Return the notebooks whose file names begin with one of these; all without names.

    Raises:
        SystemExit: no notebook begins with a name.
    """
    every = sorted(NOTEBOOKS.glob("*.ipynb"))
    for name in names:
        if not any(path.name.startswith(name) for path in every):
            raise SystemExit(f"no notebook begins with {name!r}; there are {', '.join(path.stem for path in every)}")
    return [path for path in every if not names or path.name.startswith(tuple(names))]


def read(path: Path) -> Any:
    """Return a stored notebook."""
    import nbformat

    return nbformat.read(path, as_version=4)


def execute(path: Path) -> Any:
    """Run a notebook from its first cell to its last, on one thread and offline, and return it as it is stored.

    Raises:
        CellExecutionError: a cell raised.
        ValueError: a cell wrote a warning, or its output cannot be stored.
    """
    import nbclient

    notebook = read(path)
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        record_timing=False,
        coalesce_streams=True,  # where a text is cut depends on the clock
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path})
    heading = ""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            alt = alternative_text(cell.source) or heading
            cell.outputs = [stored_output(output, f"{path.name}, cell {cell.id}", alt) for output in cell.outputs]
        else:
            heading = (re.findall(r"^#+ (.*)", cell.source, re.MULTILINE) or [heading])[-1]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "sources": sources_hash(notebook),
    }
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    """Return the cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def sources_hash(notebook: Any) -> str:
    """Return a hash of the code: a notebook that was edited and not run has another one than it stores."""
    return hashlib.sha256("\0".join(cell.source for cell in code_cells(notebook)).encode()).hexdigest()[:16]


def stored_output(output: Any, where: str, alt: str) -> Any:
    """Return an output without what changes from run to run, its picture made small.

    Args:
        alt: the picture's alternative text, for readers without eyes.

    Raises:
        ValueError: the output is a warning, a widget, or an object that printed its address.
    """
    if output.output_type == "stream" and output.name == "stdout":
        return output
    data = output.get("data", {})
    if "image/png" in data:
        output.data = {"image/png": small_png(data["image/png"]), "text/plain": f"<a picture: {alt}>"}
        output.metadata = {"image/png": {"alt": alt}}
        return output
    raise ValueError(f"{where}: print text or draw with matplotlib; a {output.output_type} is not stored: {output}")


def alternative_text(source: str) -> str:
    """Return the titles and labels that the code of a cell gives its picture, in words; nothing if it gives none."""
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            named = [each.value for each in node.keywords if each.arg in ("title", "xlabel", "ylabel")]
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if called.removeprefix("set_").removeprefix("sup") in ("title", "xlabel", "ylabel"):
                named += node.args[:1]
            for text in named:
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                words = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
                found |= {" ".join(words.split()): None} if words.strip("… ") else {}
    return "; ".join(found)


def small_png(encoded: str) -> str:
    """Return a picture on white with a palette and without metadata, both base64."""
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGBA")
    flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    buffer = io.BytesIO()
    flat.quantize(COLOURS, kmeans=1, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def differences(stored: Any, fresh: Any) -> list[str]:
    """Return a line for each cell with other words, numbers or another number of pictures than is stored."""
    found = []
    for old, new in zip(code_cells(stored), code_cells(fresh), strict=True):
        before, after = printed(old), printed(new)
        same = [" ".join(NUMBER.sub("#", text).split()) for text in (before, after)]
        if same[0] != same[1]:
            found.append(f"cell {new.id}: stored {before!r}, now {after!r}")
        elif MACHINE not in new.metadata.get("tags", []):
            pairs = zip(NUMBER.findall(before), NUMBER.findall(after), strict=True)
            found += [f"cell {new.id}: stored {a}, now {b}" for a, b in pairs if not same_number(a, b)]
        if pictures(old) != pictures(new):
            found.append(f"cell {new.id}: {pictures(old)} pictures are stored, now there are {pictures(new)}")
    return found


def printed(cell: Any) -> str:
    """Return what a cell printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def pictures(cell: Any) -> int:
    """Return how many pictures a cell drew."""
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def same_number(a: str, b: str) -> bool:
    """Return whether two printed numbers differ by rounding at most; whole numbers must be the same."""
    x, y = (Decimal(text.replace(",", "").replace("−", "-")) for text in (a, b))
    last = max(int(each.as_tuple().exponent) for each in (x, y))  # the place of the last digit
    if last >= 0:
        return x == y
    return abs(float(x - y)) <= max(ABSOLUTE, RELATIVE * abs(float(x)) + 1.01 * 10.0**last)


if __name__ == "__main__":
    raise SystemExit(main())
