"""The picture of the heads and neurons that each layer of a model keeps."""

import io
from importlib.util import find_spec
from typing import Any

from bertlite.config import BertConfig, kept_heads, kept_neurons

GONE, LEFT = "0.9", "C0"


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_layers(config: BertConfig) -> bytes:
    """Draw which heads and what share of the neurons each layer keeps, as PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    layers, heads = config.num_hidden_layers, config.num_attention_heads
    figure: Any = Figure(figsize=(0.3 * heads + 5, 0.3 * layers + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(0.3 * heads, 3))
    for layer in range(layers):
        kept = set(kept_heads(config, layer))
        for head in range(heads):
            colour = LEFT if head in kept else GONE
            left.add_patch(Rectangle((head - 0.45, layer - 0.4), 0.9, 0.8, color=colour, linewidth=0))
    shares = [100 * len(kept_neurons(config, layer)) / config.intermediate_size for layer in range(layers)]
    right.barh(range(layers), [100] * layers, height=0.8, color=GONE)
    right.barh(range(layers), shares, height=0.8, color=LEFT)
    left.set(xlim=(-0.7, heads - 0.3), ylim=(layers - 0.4, -0.6), xlabel="head", ylabel="layer", title="heads left")
    left.set(xticks=range(heads), yticks=range(layers))
    right.set(xlim=(0, 100), xlabel="%", title="neurons left")
    for axes in (left, right):
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=140)
    return file.getvalue()
