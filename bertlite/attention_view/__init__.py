"""Draw maps of attention, the weights that each head gives to the tokens of a text, as an HTML page.

maps.py computes them, pages.py draws them, command.py is `bertlite attention`.
"""

from bertlite.attention_view.maps import AttentionMaps, attention_maps, check_comparable, make_record
from bertlite.attention_view.pages import page

__all__ = ["AttentionMaps", "attention_maps", "check_comparable", "make_record", "page"]
