"""Find Chromium, and open pages in it without a window: for pictures, and for tests of pages.

It is the system's own: Playwright drives it, and downloads nothing.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

VARIABLE = "BERTLITE_CHROMIUM"
NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
ADVICE = f"no Chromium is installed: apt-get install chromium, or name one in {VARIABLE}"


def find_chromium() -> str | None:
    """Return the path of a Chromium or Chrome, of BERTLITE_CHROMIUM if that is set; None if there is none.

    Raises:
        FileNotFoundError: there is none where BERTLITE_CHROMIUM says.
    """
    named = os.environ.get(VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise FileNotFoundError(f"{VARIABLE} is {named!r}, which is no program")
        return found
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def missing() -> str | None:
    """Return the reason why no page can be opened here, with what to do; None if one can."""
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        return "Playwright is not installed: pip install playwright"
    return None if find_chromium() else ADVICE


@contextmanager
def open_chromium() -> "Iterator[Browser]":
    """Open a browser without a window.

    Raises:
        RuntimeError: there is none here, or no Playwright to drive it.
    """
    reason = missing()
    if reason:
        raise RuntimeError(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium())
        try:
            yield browser
        finally:
            browser.close()


def address(path: Path) -> str:
    return path.resolve().as_uri()
