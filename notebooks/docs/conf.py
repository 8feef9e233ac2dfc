"""Settings of Sphinx: Markdown pages, and an API reference from docstrings.

scripts/docs      # into build/docs, warnings are errors; it imports the bertlite that is installed, the checkout's
"""

import re
from typing import Any

from docutils import nodes

from bertlite import __version__ as release

project = "bertlite"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"bertlite {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["pages.js"]
html_show_copyright = False
html_use_index = html_domain_indices = False  # pages that nothing links to
pygments_dark_style = "github-dark"  # furo's own underlines what is imported, as if it were a link
smartquotes = False  # which would make one dash of the two of --help
highlight_language = "text"  # of blocks that name none: commands, and what they print
default_role = "code"  # docstrings write `names` as Markdown does
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
python_use_unqualified_type_names = True
autodoc_default_options = {"exclude-members": "__new__"}  # of dataclasses
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # or "The record: …" would be the type of a result
autodoc_inherit_docstrings = False  # of torch and transformers
suppress_warnings = ["ref.python"]  # one name of two classes, bertlite's and bertlite.hf's

CODE = re.compile(r"(`[^`]*`)")
# 1.10 (1.07–1.15), 13,495 of 30,522; not 32 x 49 SST-2 (48%), nor 50 %, distilled
NUMBER = re.compile(r"[-+≈ ]*\d(?!.*%, )[^x]{,29}")
LONG = 40  # letters of a word that a line of a telephone may not hold


def escape(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Escape what reStructuredText would read into * | and _ outside code, since docstrings are plain text.

    The docstring of a table, which is that of dict or tuple, is dropped.
    """
    if what == "data" and found.__doc__ == type(found).__doc__:
        lines.clear()
    literal, before = False, ""
    for i, line in enumerate(lines):
        if line:
            literal, before = line[0] == " " and (literal or before.endswith("::")), line
        if literal:
            continue
        parts = CODE.split(line)
        parts[::2] = [re.sub(r"([*|\\])|(_)(?=\W|$)", lambda hit: "\\" + hit[0], part) for part in parts[::2]]
        lines[i] = "".join(parts)


def shorten(app: Any, what: str, name: str, found: Any, options: Any, call: str | None, returned: str | None) -> Any:
    """Write a default that is a function as …, since its repr is no Python, and types would then stay long."""
    return call and re.sub(r"<[^,]*>(?=[,)])", "...", call), returned


def mark_lines(app: Any, doctree: Any, page: str) -> None:
    """Give cells with a number or a short name a class that keeps them on one line, and long code one that breaks."""
    for cell in doctree.findall(nodes.entry):
        if NUMBER.fullmatch(text := cell.astext()) or len(text) <= 12:
            cell["classes"].append("number")
    for code in doctree.findall(nodes.literal):
        if any(len(word) > LONG for word in code.astext().split()):
            code["classes"].append("long")


def setup(app: Any) -> None:
    app.connect("doctree-resolved", mark_lines)
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-process-docstring", escape, priority=100)  # before napoleon
