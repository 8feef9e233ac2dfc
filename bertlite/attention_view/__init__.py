"""Draw maps of attention, the weights that each head gives to the tokens of a text, as an HTML page or a PNG.

maps.py computes them, pages.py and pictures.py draw them, command.py is `bertlite attention`.
"""

from bertlite.attention_view.maps import AttentionMaps, attention_maps, check_comparable, make_record
from bertlite.attention_view.pages import page
from bertlite.attention_view.pictures import figure, picture

__all__ = ["AttentionMaps", "attention_maps", "check_comparable", "figure", "make_record", "page", "picture"]
