"""The page of `bertlite attention` in a real browser, used as people use it: mouse, keyboard, touch, screen reader."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIZES, make
from torch import Tensor

from bertlite import BertConfig, BertTokenizer, prune_heads
from bertlite.attention_view import AttentionMaps, attention_maps, page
from bertlite.cli import main

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "on", "a", "mat", "."]
TEXT = "The cats sat on the mat."
TOKENS = ("[CLS]", "the", "cat", "##s", "sat", "on", "the", "mat", ".", "[SEP]")
SIZE = len(TOKENS)
GONE = {0: [1, 3], 1: range(4)}
CONFIG = BertConfig(**{**SIZES, "vocab_size": len(WORDS)})
PAUSE = 15_000  # milliseconds until an element must be there, on a machine that does other things too

HOSTILE = {  # token: how it must look; None: as it is spelled
    "<script>document.title = 'run'; alert(1)</script>": None,
    "</script><script>alert(2)</script>": None,
    "<img src=x onerror=alert(3)>": None,
    "<!--": None,
    "{{script}}": None,
    "&lt;b&gt;": None,
    "'\"`${alert(4)}\\": None,
    "__proto__": None,
    "שלום": None,
    "مرحبا": None,
    "👩‍👩‍👧": "👩U+200D👩U+200D👧",
    "\u202eturned": "U+202Eturned",
    "\u200b": "U+200B",
    "\ufeff": "U+FEFF",
    "a\x00b\x1b": "aU+0000bU+001B",
    "\u2028": "U+2028",
    "\ud800": "U+D800",
    "": "empty",
    "  ": "space",
    "\u0301": "◌\u0301",
    "##": None,
    "###": None,
    "x" * 300: None,
    "a" + "\u0301" * 60: None,
}


def random_maps(tokens: tuple[str, ...], layers: int, heads: int, special: tuple[int, ...] = ()) -> AttentionMaps:
    generator = torch.Generator().manual_seed(0)
    size = len(tokens)
    weights = {
        (layer, head): (3 * torch.randn(size, size, generator=generator)).softmax(-1)
        for layer in range(layers)
        for head in range(heads)
    }
    return AttentionMaps(tokens, tuple(range(layers)), tuple(range(heads)), weights, special, name="<b>model</b>")


WORDY = random_maps(("[CLS]", "the", "breakfast", "thanked", "her", "nurse", ".", "[SEP]"), 2, 3, (0, 7))
LONG = random_maps(("[CLS]", *(f"word{i % 90}" for i in range(198)), "[SEP]"), 12, 12, (0, 199))


@pytest.fixture(scope="module")
def tabs(browser) -> dict[str, Any]:
    """The tabs that are open, by their options: to open one takes longer than to load a page in it."""
    return {}


@pytest.fixture
def visit(browser, tabs) -> Iterator[Callable[..., Any]]:
    """Load a page; at the end, nothing may have been printed, asked, raised or fetched."""
    noise: list[str] = []

    def open_page(path: Path, width: int = 1280, height: int = 900, ready: bool = True, **options: Any) -> Any:
        opened = tabs.get(str(options))
        if opened is None:
            opened = tabs[str(options)] = browser.new_context(**options).new_page()
            opened.set_default_timeout(PAUSE)
            opened.on("console", lambda message: opened.noise.append(f"console: {message.text}"))
            opened.on("pageerror", lambda error: opened.noise.append(f"error: {error}"))
            opened.on("dialog", lambda dialog: (opened.noise.append(f"dialog: {dialog.message}"), dialog.dismiss()))
            opened.on("request", lambda request: opened.noise.append(f"request: {request.url[:80]}"))
        opened.noise = noise
        opened.set_viewport_size({"width": width, "height": height})
        opened.mouse.move(0, 0)
        opened.goto(path.as_uri())
        assert noise == [f"request: {path.as_uri()[:80]}"]  # the file itself
        noise.clear()
        if ready and options.get("java_script_enabled", True):
            opened.wait_for_selector("html[data-ready]")
            opened.wait_for_selector("#grid[data-drawn]")
        return opened

    yield open_page
    assert noise == []


def save(folder: Path, model: Any, words: list[str] = WORDS) -> str:
    model.save_pretrained(folder)
    BertTokenizer(words).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def dense() -> Any:
    return make(config=CONFIG).float()


@pytest.fixture(scope="module")
def pruned(dense) -> Any:
    return prune_heads(dense, GONE)


@pytest.fixture(scope="module")
def folder(dense, pruned, tmp_path_factory) -> Path:
    """Both checkpoints; pages of the pruned one, of the two compared, of many tokens, and of longer words."""
    root = tmp_path_factory.mktemp("pages")
    small, large = save(root / "pruned", pruned), save(root / "dense", dense)
    assert main(["attention", small, TEXT, "--out", str(root / "one.html")]) == 0
    assert main(["attention", large, TEXT, "--against", small, "--out", str(root / "two.html")]) == 0
    (root / "long.html").write_bytes(page(LONG))
    (root / "words.html").write_bytes(page(WORDY, WORDY))
    return root


@pytest.fixture
def opened(visit, folder) -> Any:
    """The page of the pruned model."""
    return visit(folder / "one.html")


def weights_of(model: Any) -> dict[tuple[int, int], Tensor]:
    maps = attention_maps(model, BertTokenizer(WORDS), TEXT)
    assert maps.tokens == TOKENS
    return dict(maps.weights)


@pytest.fixture(scope="module")
def weights(pruned) -> dict[tuple[int, int], Tensor]:
    return weights_of(pruned)


def number(text: str) -> float:
    """Return a weight from what the page shows: "4.2 %" is 0.042."""
    return float(text.replace("<", "").replace("\N{NO-BREAK SPACE}%", "")) / 100 if text else 0.0


def shown_weights(opened: Any, view: int = 0) -> list[float]:
    """Return the numbers beside the attended tokens."""
    return [number(text) for text in opened.locator(".view").nth(view).locator(".to .amount").all_text_contents()]


def assert_near(shown: list[float], wanted: Tensor) -> None:
    """Within rounding: half of 1 % from 10 % on, else half of 0.1 %, and what the page itself rounds."""
    for one, other in zip(shown, wanted.tolist(), strict=True):
        assert abs(one - other) <= (0.0052 if other > 0.099 else 0.00065), (one, other)


def lines(opened: Any) -> int:
    return opened.locator("svg.curves path").count()


PIXELS = """canvas => {
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  return [copy.width, copy.height, Array.from(context.getImageData(0, 0, copy.width, copy.height).data)];
}"""


def pixels(opened: Any, selector: str) -> Tensor:
    """Return the red, green and blue of a canvas."""
    width, height, values = opened.locator(selector).evaluate(PIXELS)
    return torch.tensor(values).view(height, width, 4)[..., :3]


def cell(opened: Any, layer: int, head: int) -> Any:
    return opened.get_by_role("gridcell", name=re.compile(rf"^layer {layer}, head {head}:"))


def option(opened: Any, token: int, view: int = 0) -> Any:
    return opened.get_by_role("listbox").nth(view).get_by_role("option").nth(token)


# What is on the page -------------------------------------------------------------------------------------------------


def test_it_opens_on_the_sentence_beside_the_map_of_all_heads(opened, weights) -> None:
    assert opened.title() == "Attention: the cats sat on the mat ."
    first = json.loads(opened.locator("#data").text_content())["first"]["head"]
    assert opened.get_by_role("heading", level=2).first.text_content() == f"Layer {first[0]}, head {first[1]}"
    assert opened.locator("#why").text_content().startswith("Shown first: its words attend most clearly")
    assert opened.get_by_role("option").all_text_contents() == [*TOKENS]
    wanted = weights[tuple(first)]
    assert lines(opened) == (wanted >= 0.04).sum()
    assert_near(shown_weights(opened), wanted.mean(0))
    sentence, heads = (opened.locator(name).bounding_box() for name in ("#sentence", "#heads"))
    assert sentence["y"] == heads["y"]
    assert sentence["x"] + sentence["width"] < heads["x"]
    assert opened.get_by_role("gridcell").count() == 12
    drawn = opened.locator(".cell canvas").count()
    assert drawn == len(weights) == 6
    assert opened.locator(".cell.missing").all_inner_texts() == ["pruned"] * 6
    assert "6 heads are pruned (hatched)." in opened.locator("#grid-note").text_content()
    assert (
        "rounded to 1/4095, so that each is right to within 0.012 percentage" in opened.locator("footer").inner_text()
    )


def test_maps_have_the_colours_of_their_weights_in_either_scheme(visit, folder, weights) -> None:
    opened = visit(folder / "one.html", color_scheme="light")
    cell(opened, 2, 1).click()
    shades = weights[2, 1].sqrt()
    stops = torch.tensor([[0xFF, 0xFF, 0xFF], [0x8A, 0xA9, 0xE8], [0x12, 0x2C, 0x75]])  # white, blue, dark blue
    low = (2 * shades).floor().clamp(max=1).long()
    part = (2 * shades - low)[..., None]
    wanted = stops[low] * (1 - part) + stops[low + 1] * part
    light = pixels(opened, ".cell[aria-selected=true] canvas")
    assert (light - wanted).abs().max() < 3  # a 256th of the scale, and rounding
    opened.emulate_media(color_scheme="dark")
    deadline = time.monotonic() + 15
    while (dark := pixels(opened, ".cell[aria-selected=true] canvas")).equal(light):
        assert time.monotonic() < deadline, "the map kept its colours"
    dark = dark.sum(-1).flatten()
    assert dark[shades.argmin()] < dark[shades.argmax()]  # on black, more is lighter


def test_a_pruned_head_is_blank_and_says_so(opened) -> None:
    cell(opened, 1, 2).click()
    assert opened.locator("#chosen").text_content() == "Layer 1, head 2"
    assert opened.locator(".gone").text_content() == "Layer 1, head 2 is pruned: pruned does not have it."
    assert not opened.locator(".tokens").is_visible()
    cell(opened, 2, 0).click()
    assert opened.locator(".tokens").is_visible()


def test_several_heads_are_shown_at_once_each_in_its_colour(opened, weights) -> None:
    colours = "all => all.map(node => getComputedStyle(node)[node.localName === 'path' ? 'stroke' : 'borderColor'])"
    cell(opened, 2, 1).click()
    (one,) = {*opened.locator("svg.curves path:not(.to-special)").evaluate_all(colours)}
    opened.get_by_role("button", name="Several heads").click()
    cell(opened, 0, 0).click()
    cell(opened, 2, 2).click(modifiers=["Control"])
    heads = [(2, 1), (0, 0), (2, 2)]
    mean = torch.stack([weights[head] for head in heads]).mean(0)
    assert opened.locator("#chosen").text_content() == "3 heads"
    assert_near(shown_weights(opened), mean.mean(0))
    assert lines(opened) == sum(int((weights[head] >= 0.04).sum()) for head in heads)
    drawn = {*opened.locator("svg.curves path").evaluate_all(colours)}
    assert drawn == {*opened.locator("#legend button").evaluate_all(colours)} > {one}
    assert len(drawn) == 3
    option(opened, 4).hover()
    assert_near(shown_weights(opened), mean[4])
    opened.get_by_role("button", name="Remove layer 0, head 0").click()
    assert opened.locator("#chosen").text_content() == "2 heads"
    cell(opened, 0, 0).focus()
    for key, count in (("ArrowDown", 2), ("ArrowLeft", 2), ("Space", 3), ("Space", 2)):  # arrows only move
        opened.keyboard.press(key)
        assert opened.locator(".cell[aria-selected=true]").count() == count
    cell(opened, 1, 2).click()
    assert "averages over these heads, except pruned ones." in opened.locator("#why").text_content()
    for head in ((0, 0), (0, 1), (0, 2), (2, 0), (2, 3), (0, 3)):
        cell(opened, *head).click()
    assert opened.locator("#chosen").text_content() == "8 heads"
    assert opened.locator("#why").text_content().startswith("No more than 8 at once. ")
    opened.get_by_role("button", name="Several heads").click()
    assert opened.locator("#legend button").count() == 0
    assert opened.locator(".cell[aria-selected=true]").count() == 1


def test_a_notebook_shows_it_in_a_frame_of_its_own(visit, tmp_path) -> None:
    (tmp_path / "notebook.html").write_text(page(random_maps(("<b>", "&amp;"), 1, 2))._repr_html_())
    opened = visit(tmp_path / "notebook.html", ready=False)
    frame = opened.frame_locator("iframe")
    frame.locator("#grid[data-drawn]").wait_for()
    assert frame.locator(".from bdi").all_text_contents() == ["<b>", "&amp;"]


# Pointer, keyboard, touch --------------------------------------------------------------------------------------------


def test_a_token_that_is_pointed_at_shows_its_lines_alone(opened, weights) -> None:
    cell(opened, 2, 3).click()
    weights = weights[2, 3]
    every = lines(opened)
    option(opened, 4).hover()
    assert_near(shown_weights(opened), weights[4])
    assert lines(opened) == (weights[4] >= 0.005).sum()
    words = opened.locator("#status").text_content()
    assert words.startswith("\u2068sat\u2069 (token 4) attends to ")
    top = weights[4].topk(5)
    assert re.findall(r"\u2068(\S+)\u2069", words)[1:] == [TOKENS[i] for i in top.indices]
    assert_near([number(text) for text in re.findall(r"[\d.<]+\N{NO-BREAK SPACE}%", words)], top.values)
    opened.locator("h1").hover()
    assert lines(opened) == every


def test_a_click_keeps_a_token_and_escape_lets_go(opened, weights) -> None:
    every, button = lines(opened), opened.get_by_role("button", name="Every token")
    assert not button.is_visible()
    option(opened, 2).click()
    opened.locator("h1").hover()
    assert option(opened, 2).get_attribute("aria-selected") == "true"
    cell(opened, 2, 2).click()  # another head, the same token
    opened.locator("h1").hover()
    assert_near(shown_weights(opened), weights[2, 2][2])
    opened.keyboard.press("Escape")
    assert option(opened, 2).get_attribute("aria-selected") == "false"
    option(opened, 3).click()
    button.click()
    opened.locator("h1").hover()
    assert opened.locator("[role=option][aria-selected=true]").count() == 0
    assert not button.is_visible()
    assert opened.evaluate("document.activeElement.getAttribute('role')") == "option"
    opened.keyboard.press("Escape")
    assert every > 0


def test_the_arrow_keys_choose_heads(opened) -> None:
    cell(opened, 0, 0).click()
    for key, head in (
        ("ArrowRight", (0, 1)),
        ("ArrowDown", (1, 1)),
        ("End", (1, 3)),
        ("ArrowRight", (1, 3)),  # there is no further one
        ("Control+End", (2, 3)),
        ("ArrowLeft", (2, 2)),
        ("Home", (2, 0)),
        ("ArrowUp", (1, 0)),
        ("Control+Home", (0, 0)),
    ):
        opened.keyboard.press(key)
        assert opened.locator("#chosen").text_content() == f"Layer {head[0]}, head {head[1]}", key
        label = opened.evaluate("document.activeElement.getAttribute('aria-label')")
        assert label.startswith(f"layer {head[0]}, head {head[1]}: ")
    outline = opened.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_tokens_are_chosen_by_keys(opened, weights) -> None:
    cell(opened, 2, 1).click()
    weights, every = weights[2, 1], lines(opened)
    for kind in ("BUTTON", "SPAN"):  # the order of the page: tokens, several heads, the map of all heads
        opened.keyboard.press("Shift+Tab")
        assert opened.evaluate("document.activeElement.tagName") == kind
    for key, token in (("ArrowDown", 1), ("End", 9), ("ArrowRight", 9), ("ArrowUp", 8), ("Home", 0), ("ArrowDown", 1)):
        opened.keyboard.press(key)
        assert option(opened, token).evaluate("node => node === document.activeElement"), key
        assert_near(shown_weights(opened), weights[token])
    opened.keyboard.press("Enter")
    opened.keyboard.press("Tab")  # it is kept when the focus goes on
    assert_near(shown_weights(opened), weights[1])
    opened.keyboard.press("Escape")
    assert lines(opened) == every


def test_a_tap_shows_the_lines_of_a_token(visit, folder, weights) -> None:
    opened = visit(folder / "one.html", 360, 740, has_touch=True, is_mobile=True, device_scale_factor=2)
    cell(opened, 2, 1).tap()
    option(opened, 4).tap()
    assert_near(shown_weights(opened), weights[2, 1][4])
    opened.get_by_role("button", name="Every token").tap()
    assert opened.locator("[role=option][aria-selected=true]").count() == 0
    pitch = cell(opened, 2, 2).bounding_box()["x"] - cell(opened, 2, 1).bounding_box()["x"]
    assert pitch >= 24  # two targets must be that far apart, WCAG 2.5.8


@pytest.mark.parametrize("name", ["two", "long"])
def test_on_a_phone_the_map_stands_above_two_sentences_and_above_a_long_text(visit, folder, name) -> None:
    opened = visit(folder / f"{name}.html", 390, 844)
    box = opened.locator("#grid").bounding_box()
    assert box["y"] + box["height"] < 844
    assert opened.locator("#sentence").bounding_box()["y"] > box["y"]


# Screens, colours, media ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one", "two", "words"])
def test_it_fills_every_screen_and_never_scrolls_sideways(visit, folder, name) -> None:
    opened = visit(folder / f"{name}.html")
    for width in (320, 360, 768, 1000, 1440, 1920):
        opened.set_viewport_size({"width": width, "height": 800})
        assert opened.evaluate("document.documentElement.scrollWidth") == width
        assert opened.locator("main").bounding_box()["width"] > 0.93 * width
        boxes = [box for each in opened.locator("section").all() if (box := each.bounding_box())]
        assert max(box["x"] + box["width"] for box in boxes) > 0.96 * width
        assert (boxes[0]["y"] == boxes[1]["y"]) == (width >= 1000)  # the sentence and the heads, side by side
        grid = opened.locator("#grid").bounding_box()
        assert grid["x"] + grid["width"] <= width
        cut = "all => all.filter(node => node.scrollWidth > node.clientWidth).map(node => node.textContent)"
        assert opened.locator(".lines .token").evaluate_all(cut) == []


def test_nothing_moves_under_the_pointer(visit, folder) -> None:
    opened = visit(folder / "two.html", 1000, 800)
    places = set()
    for token in (0, 4, 7):
        option(opened, token).hover()
        places.add(option(opened, 2).bounding_box()["y"])
    option(opened, 5).click()
    opened.locator("h1").hover()
    places.add(option(opened, 2).bounding_box()["y"])
    assert len(places) == 1


CONTRASTS = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const over = (top, below, alpha) => below.map((value, i) => top[i] * alpha + value * (1 - alpha));
  const light = colour => {
    const [r, g, b] = colour.map(value => value / 255)
      .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = node => {
    if (!node) return [255, 255, 255];
    const [r, g, b, alpha = 1] = parse(getComputedStyle(node).backgroundColor);
    let found = over([r, g, b], alpha < 1 ? ground(node.parentElement) : [0, 0, 0], alpha);
    for (const shade of node.querySelectorAll(":scope > .shade, :scope > .bar")) {
      const style = getComputedStyle(shade);
      if (style.display !== "none") found = over(parse(style.backgroundColor), found, Number(style.opacity));
    }
    return found;
  };
  const walker = document.createTreeWalker(document.querySelector("body"), NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest("script, noscript")) continue;
    const [one, other] = [parse(getComputedStyle(node).color), ground(node)].map(light).sort((a, b) => b - a);
    found.push([(one + 0.05) / (other + 0.05), walker.currentNode.data, node.className || node.tagName]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}"""


@pytest.mark.parametrize("name", ["one", "two", "long"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_of_wcag_aa(visit, folder, scheme, name) -> None:
    opened = visit(folder / f"{name}.html", reduced_motion="reduce")
    opened.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    opened.locator("summary").click()
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
    counts = []
    for head in ((2, 1), (1, 2)):
        cell(opened, *head).click()
        for token in (None, 4):
            if token is not None and opened.get_by_role("listbox").first.is_visible():
                option(opened, token).hover()
            found = opened.evaluate(CONTRASTS)
            assert found[0][0] >= 4.5, found[:3]
            counts.append(len(found))
    assert min(counts) > 20


def test_it_prints_in_light_colours_without_its_controls(visit, folder) -> None:
    opened = visit(folder / "one.html", color_scheme="dark")
    opened.evaluate(
        "addEventListener('beforeprint', () => { window.printed = getComputedStyle(document.body).backgroundColor; })"
    )
    document = opened.pdf(print_background=True)
    assert document.startswith(b"%PDF")
    assert len(document) > 20_000
    assert opened.evaluate("window.printed") == "rgb(245, 246, 248)"
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 25)"
    opened.emulate_media(media="print")
    assert not opened.locator("details").is_visible()


def test_it_says_so_without_javascript(visit, folder) -> None:
    opened = visit(folder / "one.html", java_script_enabled=False)
    message = opened.locator("noscript p")
    assert message.is_visible()
    assert message.inner_text() == "This page draws with JavaScript, which is switched off in this browser."
    assert not opened.locator("main").is_visible()


# Screen readers ------------------------------------------------------------------------------------------------------


def test_a_screen_reader_finds_names_and_weights(opened, weights) -> None:
    cell(opened, 2, 1).click()
    option(opened, 4).focus()
    tree = opened.locator("body").aria_snapshot()
    for line in (
        'heading "Attention" [level=1]',
        'heading "Layer 2, head 1" [level=2]',
        'grid "All heads"',
        'columnheader "head 3"',
        'rowheader "layer 1"',
        'gridcell "layer 1, head 2: pruned"',
        'listbox "Tokens"',
        'option "sat, token 4"',
        'list "Weights"',
    ):
        assert line in tree, f"{line}\n{tree}"
    assert re.search(r'gridcell "layer 2, head 1: [\d.]+.% of its attention goes to', tree)
    assert tree.count("[selected]") >= 1
    shown = [number(text) for text in re.findall(r"listitem: .* ([\d.<]+).%", tree)]
    assert_near(shown, torch.stack([weight for weight in weights[2, 1][4] if weight >= 0.0005]))
    assert opened.get_by_role("status").text_content().startswith("\u2068sat\u2069 (token 4) attends to ")
    assert opened.evaluate(
        "[...document.querySelectorAll('canvas')].every(c => c.ariaHidden === 'true' || c.ariaLabel) &&"
        " [...document.querySelectorAll('svg')].every(s => s.getAttribute('aria-hidden') === 'true') &&"
        " document.documentElement.lang === 'en'"
    )


# Any token, any number of tokens -------------------------------------------------------------------------------------


POINT_AT_ALL = """() => {
  const options = document.querySelectorAll(".view:first-child [role=option]"), told = new Set();
  for (const option of options) {
    option.dispatchEvent(new PointerEvent("pointerover", { bubbles: true, pointerType: "mouse" }));
    option.focus();
    told.add(document.querySelector("#status").textContent);
  }
  return told.size;
}"""


def test_no_token_runs_anything_or_is_hidden(visit, tmp_path) -> None:
    tokens = tuple(HOSTILE)
    maps = random_maps(tokens, 2, 3)
    (tmp_path / "hostile.html").write_bytes(page(maps, maps))
    opened = visit(tmp_path / "hostile.html", 900, 800)
    looks = [token if look is None else look for token, look in HOSTILE.items()]
    for view in (0, 1):
        assert opened.locator(".from").nth(view).locator("bdi").all_text_contents() == looks
        assert opened.locator(".to").nth(view).locator("bdi").all_text_contents() == looks
    assert opened.evaluate(POINT_AT_ALL) == len(tokens)
    counts = [
        opened.locator(selector).count() for selector in ("script", "img", "b:not(#status b, .cell b)", "bdi bdi")
    ]
    assert counts == [2, 0, 0, 0]
    assert opened.title().startswith("Attention: <script>")
    assert opened.evaluate("document.documentElement.scrollWidth") == 900
    widths = opened.locator(".from .token").evaluate_all("all => all.map(node => node.getBoundingClientRect().width)")
    assert 100 < max(widths) < 400


def test_two_hundred_tokens_flow_as_text(visit, folder) -> None:
    assert (folder / "long.html").stat().st_size < 8_000_000
    opened = visit(folder / "long.html")
    assert opened.locator(".view").get_attribute("class") == "view"
    assert opened.locator("#views").get_attribute("class") == "text"
    assert opened.locator("[role=option][aria-selected=true]").count() == 1  # it opens on the lines of one token
    for key in ("ArrowLeft", "ArrowRight", "ArrowDown"):
        opened.locator(".cell[tabindex='0']").focus()
        before = opened.locator("#chosen").text_content()
        opened.keyboard.press(key)
        opened.wait_for_function("before => document.querySelector('#chosen').textContent !== before", arg=before)
    assert option(opened, 150).bounding_box()["y"] < 1500  # all tokens are on a screen or two
    assert not opened.locator(".to").is_visible()
    weights = LONG.weights[2, 2][30]
    cell(opened, 2, 2).click()
    option(opened, 30).hover()
    shades = opened.locator(".from .shade").evaluate_all("all => all.map(node => Number(node.style.opacity))")
    assert (torch.tensor(shades)[weights.argsort()].diff() >= -0.002).all()
    numbers = [number(text) for text in opened.locator(".from .amount").all_text_contents() if text]
    assert_near(sorted(numbers), weights.topk(len(numbers)).values.sort().values)
    opened.set_viewport_size({"width": 360, "height": 740})
    assert opened.evaluate("document.documentElement.scrollWidth") == 360


# Two checkpoints -----------------------------------------------------------------------------------------------------


def test_a_comparison_shows_both_side_by_side(visit, folder, dense, weights) -> None:
    opened = visit(folder / "two.html")
    assert opened.locator(".view h3").all_text_contents() == ["dense", "pruned"]
    left, right = (opened.locator(".view").nth(i).bounding_box() for i in (0, 1))
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    cell(opened, 2, 1).click()
    option(opened, 4, view=1).hover()
    for view, each in enumerate((weights_of(dense), weights)):
        assert_near(shown_weights(opened, view), each[2, 1][4])


def test_a_comparison_says_which_heads_are_gone(visit, folder, dense) -> None:
    opened = visit(folder / "two.html")
    assert "6 heads are pruned in pruned (hatched)." in opened.locator("#grid-note").text_content()
    assert opened.locator(".cell.missing").count() == 6  # the map shows the change
    gone = opened.get_by_role("gridcell", name="layer 1, head 2: pruned in pruned")
    gone.click()
    assert opened.locator(".gone:visible").all_text_contents() == [
        "Layer 1, head 2 is pruned: pruned does not have it."
    ]
    option(opened, 4).hover()
    assert_near(shown_weights(opened, 0), weights_of(dense)[1, 2][4])
    assert "nothing in pruned, where this head is pruned" in opened.locator("#status").text_content()
    opened.get_by_role("button", name="dense").click()
    opened.wait_for_selector("#grid[data-drawn='0']")
    assert opened.locator(".cell.missing").count() == 0
    opened.get_by_role("button", name="pruned", exact=True).click()
    opened.wait_for_selector("#grid[data-drawn='1']")
    assert opened.locator(".cell.missing").count() == 6
    opened.get_by_role("button", name="Change").click()
    opened.wait_for_selector("#grid[data-drawn='change']")
    moved = json.loads(opened.locator("#data").text_content())["moved"]
    for name, share in moved.items():
        label = cell(opened, *map(int, name.split("."))).get_attribute("aria-label")
        assert_near([number(re.search(r": ([\d.<]+.%) of its attention moved", label)[1])], torch.tensor([share]))
