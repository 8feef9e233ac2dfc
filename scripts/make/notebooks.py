"""Run the notebooks and store them with what they print and draw.

    python -m scripts.make.notebooks               # all of them; about a minute on two cores
    python -m scripts.make.notebooks 02 07         # those whose names begin so
    python -m scripts.make.notebooks --check       # change nothing; exit 1 if a notebook has other outputs than stored

tests/test_notebooks.py makes the same comparison: words are equal, numbers are equal but for rounding, and pictures
look alike.  In a cell with the tag `machine`, whose numbers depend on the machine (times, errors in half precision),
numbers and pictures may differ.
"""

import argparse
import base64
import hashlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertlite.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
MACHINE = "machine"  # the tag of a cell whose numbers depend on the machine
SECONDS = 600  # of a cell; on a machine at rest a whole notebook takes less than a minute
COLOURS = 256  # of a stored picture
RELATIVE = 0.01  # of a number with decimals; and one unit of its last digit: what another CPU's rounding may change
ABSOLUTE = 1e-9  # rounding errors in float64 are printed too, and no two machines agree about them
UNLIKE = 0.02  # mean difference of two small grey pictures, 1 is black against white; another font moves it by less
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
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stored outputs are not fresh")
    args = parser.parse_args(argv)
    paths = select(args.names)
    stale = []
    with Progress(len(paths), "notebooks") as progress:
        for path in paths:
            stored, fresh = read(path), execute(path)
            found = [] if not args.check else differences(stored, fresh)
            stale += [path.name] if found else []
            if not args.check:
                write(fresh, path)
            progress.print("\n".join([f"{path.name}: {path.stat().st_size / 1e3:.0f} KB", *found]))
            progress.advance()
    if stale:
        print(f"not fresh: {', '.join(stale)}; run python -m scripts.make.notebooks", file=sys.stderr)
    return int(bool(stale))


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


def write(notebook: Any, path: Path) -> None:
    """Replace a stored notebook, all of it or nothing."""
    import nbformat

    beside = path.with_suffix(".part")
    nbformat.write(notebook, beside)
    beside.replace(path)


def execute(path: Path) -> Any:
    """Run a notebook from its first cell to its last, on one thread and offline, and return it as it is stored.

    Raises:
        CellExecutionError: a cell raised.
        ValueError: a cell wrote a warning, or what it printed or drew cannot be stored.
    """
    import nbclient

    notebook = read(path)
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path})
    for cell in code_cells(notebook):
        cell.outputs = merge_text([stored_output(output, f"{path.name}, cell {cell.id}") for output in cell.outputs])
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


def stored_output(output: Any, where: str) -> Any:
    """Return an output without what changes from run to run, its picture made small.

    Raises:
        ValueError: the output is a warning, a widget, or an object that printed its address.
    """
    if output.output_type == "stream" and output.name == "stdout":
        return output
    data = output.get("data", {})
    if "image/png" in data:
        output.data = {"image/png": small_png(data["image/png"]), "text/plain": "<a picture>"}
        output.metadata = {}
        return output
    raise ValueError(f"{where}: print text or draw with matplotlib; a {output.output_type} is not stored: {output}")


def merge_text(outputs: Sequence[Any]) -> list[Any]:
    """Return the outputs, with text that came in pieces in one: where a text is cut depends on the clock."""
    merged: list[Any] = []
    for output in outputs:
        if merged and output.output_type == merged[-1].output_type == "stream":
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def small_png(encoded: str) -> str:
    """Return a picture with a palette and without metadata, both base64."""
    from PIL import Image

    flat = picture(encoded).quantize(COLOURS, kmeans=1, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    flat.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def picture(encoded: str) -> Any:
    """Return a picture on white."""
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def differences(stored: Any, fresh: Any) -> list[str]:
    """Return a line for each cell whose fresh outputs are not the stored ones."""
    before, after = code_cells(stored), code_cells(fresh)
    if [cell.source for cell in before] != [cell.source for cell in after]:
        return ["the notebooks have different cells"]
    found = []
    for old, new in zip(before, after, strict=True):
        may_vary = MACHINE in new.metadata.get("tags", [])
        problem = text_difference(printed(old), printed(new), may_vary) or picture_difference(old, new, may_vary)
        if problem:
            found.append(f"cell {new.id}: {problem}")
    return found


def printed(cell: Any) -> str:
    """Return what a cell printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def text_difference(old: str, new: str, numbers_vary: bool) -> str | None:
    """Return how two texts differ, or None if they have the same words and, but for rounding, the same numbers."""
    words_before, words_after = (" ".join(NUMBER.sub("#", text).split()) for text in (old, new))
    if words_before != words_after:
        return f"stored {old!r}, now {new!r}"
    pairs = [] if numbers_vary else zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    apart = [f"stored {a}, now {b}" for a, b in pairs if not same_number(a, b)]
    return "; ".join(apart) or None


def same_number(a: str, b: str) -> bool:
    """Return whether two printed numbers are equal but for rounding; whole numbers must be the same."""
    if a == b:
        return True
    if not any(mark in a + b for mark in ".e"):
        return False
    x, y = (float(text.replace(",", "").replace("−", "-")) for text in (a, b))
    return abs(x - y) <= max(ABSOLUTE, RELATIVE * abs(x) + 1.01 * max(last_digit(a), last_digit(b)))


def last_digit(text: str) -> float:
    """Return what one unit of the last digit of a printed number is worth."""
    mantissa, _, exponent = text.partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def picture_difference(old: Any, new: Any, may_vary: bool) -> str | None:
    """Return how the pictures of two cells differ, or None if there are as many and they look alike."""
    before, after = pictures(old), pictures(new)
    if len(before) != len(after):
        return f"{len(before)} pictures are stored, now there are {len(after)}"
    apart = [] if may_vary else [unlikeness(a, b) for a, b in zip(before, after, strict=True)]
    if any(each > UNLIKE for each in apart):
        return f"a picture looks different (by {max(apart):.3f}, {UNLIKE} allowed)"
    return None


def pictures(cell: Any) -> list[str]:
    """Return the pictures that a cell drew."""
    return [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]


def unlikeness(a: str, b: str) -> float:
    """Return the mean difference of two pictures, shrunk and grey: 0 for the same, 1 for black against white."""
    import numpy as np

    small = [np.asarray(picture(each).convert("L").resize((48, 48)), dtype=float) / 255 for each in (a, b)]
    return float(np.abs(small[0] - small[1]).mean())


if __name__ == "__main__":
    raise SystemExit(main())
