"""scripts/measure/curves.py: a record of `bertlite prune compare` as a picture."""

import json

import pytest

from bertlite.experiments.experiment import Cell

pytest.importorskip("matplotlib")

from scripts.measure import curves

BASE = {**vars(Cell()), "calibration": 512, "at_least": 1, "mcc": 0.5, "low": 0.4, "high": 0.6}


def test_no_axis_cuts_an_interval():
    rows = [BASE | {"mcc": 0.0, "low": None, "high": None}, BASE | {"low": -0.25, "high": 0.75}]
    figure = curves.curves(rows, "mcc")
    low, high = figure.axes[0].get_ylim()
    assert low < -0.25 < 0.75 < high
    curves.pyplot().close(figure)


def test_a_record_is_drawn_in_both_formats(tmp_path):
    record = {"headline": "mcc", "rows": [BASE], "dense": {"mcc": 0.7}}
    (tmp_path / "rows.json").write_text(json.dumps(record))
    assert curves.main([str(tmp_path / "rows.json"), str(tmp_path / "drawn")]) == 0
    assert (tmp_path / "drawn.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "drawn.svg").read_text()


def test_curves_have_short_names_and_markers_and_a_legend_outside():
    """For print: names tell only differences, lines differ without colours, and the legend covers no data."""
    changes = [{}, {"criterion": "random"}, {"calibration": 4096}, {"at_least": 0}, {"epochs": 1, "repair": "refit"}]
    changes += [{"criterion": name} for name in ("fisher", "magnitude", "confidence")]
    figure = curves.curves([BASE | change for change in changes], "mcc", 0.7)
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    ways = ["", ", 4096 examples", ", epochs 1", ", ≥ 0 a layer"]
    assert shown == [
        "confidence", "fisher", "magnitude", *(f"{BASE['criterion']}{way}" for way in ways), "random", "dense",
    ]  # fmt: skip
    assert legend.get_title().get_text() == "unless named: ≥ 1 a layer, 512 examples, not retrained"
    lines = [line for panel in figure.axes for line in panel.lines if line.get_marker() in curves.MARKERS]
    assert len({(line.get_marker(), line.get_linestyle()) for line in lines}) == len(changes)
    figure.canvas.draw()
    assert legend.get_window_extent().y1 <= min(panel.get_tightbbox().y0 for panel in figure.axes)
    curves.pyplot().close(figure)
