"""The documentation's pages in a browser: a button copies code; pictures open, and follow the dark mode."""

import shutil
from pathlib import Path
from typing import Any

STATIC = Path(__file__).resolve().parents[2] / "notebooks" / "docs" / "_static"
PAGE = """<link rel="stylesheet" href="pages.css"><script src="pages.js"></script>
<body data-theme="auto"><div class="content">
<div class="highlight"><pre>first <b>line</b>
second</pre></div>
<img alt="a picture" src="picture.png">
</div></body>"""


def test_a_button_copies_code_and_pictures_follow_the_dark_mode(browser: Any, tmp_path: Path) -> None:
    shutil.copytree(STATIC, tmp_path, dirs_exist_ok=True)
    (tmp_path / "page.html").write_text(PAGE)
    filters = {}
    for scheme in ("light", "dark"):
        rights = ["clipboard-read", "clipboard-write"]
        with browser.new_context(color_scheme=scheme, permissions=rights) as context:
            opened = context.new_page()
            opened.goto((tmp_path / "page.html").as_uri())
            opened.hover(".highlight")
            opened.click("button")
            opened.wait_for_selector("text=Copied")
            assert opened.locator("a > img").evaluate("image => image.parentElement.href == image.src")
            assert opened.evaluate("navigator.clipboard.readText()") == "first line\nsecond"
            filters[scheme] = opened.locator("img").evaluate("image => getComputedStyle(image).filter")
    assert filters == {"light": "none", "dark": "invert(0.93) hue-rotate(180deg)"}
