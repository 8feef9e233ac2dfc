"""How Sphinx builds the documentation: Markdown pages, and an API reference from docstrings.

scripts/docs      # into build/docs, warnings are errors
"""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import bertlite  # noqa: E402, F401  # the checkout's, which is on the path only now

project = "bertlite"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "bertlite"
default_role = "code"  # docstrings write `names` as Markdown does
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
autodoc_inherit_docstrings = False  # of torch and transformers
suppress_warnings = ["ref.python"]  # one name of two classes, bertlite's and bertlite.hf's

CODE = re.compile(r"(`[^`]*`)")


def plain(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: what reStructuredText would read into * | and _ is escaped, outside `code`.

    A table has none of its own, but that of dict or tuple.
    """
    if what == "data" and found.__doc__ == type(found).__doc__:
        lines.clear()
    for i, line in enumerate(lines):
        parts = CODE.split(line)
        parts[::2] = [re.sub(r"([*|\\])|(_)(?=\W|$)", lambda hit: "\\" + hit[0], part) for part in parts[::2]]
        lines[i] = "".join(parts)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain, priority=100)  # before napoleon
