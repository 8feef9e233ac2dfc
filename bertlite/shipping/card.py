"""The model card, README.md: metadata for the hub and a text for people."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bertlite.config import BertConfig, differs_from_bert, kept_heads, kept_neurons
from bertlite.models.heads import CLASSES
from bertlite.models.remote import AUTO_CLASSES
from bertlite.support.extras import install_hint

OTHER_BERT = "transformers' own BERT would compute something else, and refuses this model."
LEFT_PADDING = """, with padding on the right: its BERT gives the tokens of left-padded rows other positions than this
model was trained with."""


@dataclass(frozen=True)
class Figure:
    """A measured figure of a model, and the dense model's.

    Args:
        name: such as "accuracy" or "speed at 8x128, times the dense model's".
        low, high: the 95 % interval.
        over: the sample of the interval: "872 examples of dev.tsv", "21 rounds".
        dense: the figure of the dense model.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    over: str = ""
    dense: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the figure JSON-ready, without unknown fields."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


@dataclass(frozen=True)
class Facts:
    """The facts in a card, in addition to the model's config.

    Args:
        cls: the name of its class.
        origin: the data of the source's card, and its hub id as "base_model" if it is known.
        left: the config with the remaining heads and neurons; the model's own, unless that is densified.
        sentences: it is a model of sentence-transformers.
        figures: measurements.
        how: sentences on how it was made; plain text, no Markdown.
    """

    cls: str
    origin: Mapping[str, Any]
    left: BertConfig
    sentences: bool = False
    figures: Sequence[Figure] = ()
    how: Sequence[str] = ()


def plain(text: str) -> str:
    """Return a text escaped as one line of Markdown, also for a heading or a table."""
    return re.sub(r"([\\`*_~\[\]<>|&])", r"\\\1", " ".join(text.split()))


def is_pruned(config: BertConfig) -> bool:
    """Return whether any layer has lost heads or neurons."""
    return bool(config.pruned_heads or config.pruned_neurons)


def needs_code(config: BertConfig) -> bool:
    """Return whether transformers needs bertlite's code for a model: its own BERT would compute something else."""
    return is_pruned(config) or differs_from_bert(config)


def make_card(config: BertConfig, facts: Facts) -> str:
    """Return the text of README.md: YAML for the hub, then a description of the model and how to load it."""
    return f"---\n{front_matter(config, facts)}\n---\n\n" + "\n".join(body(config, facts)) + "\n"


def front_matter(config: BertConfig, facts: Facts) -> str:
    """Return the YAML between the dashes."""
    from huggingface_hub import ModelCardData

    stock = "sentence-transformers" if facts.sentences else "transformers"
    pruned = ["pruned"] if is_pruned(facts.left) else []
    tags = ["bert", "bertlite", *pruned, *([stock] if facts.sentences else [])]
    pipeline = "sentence-similarity" if facts.sentences else getattr(CLASSES.get(facts.cls), "pipeline_tag", None)
    library = "bertlite" if needs_code(config) else stock
    return ModelCardData(library_name=library, pipeline_tag=pipeline, tags=tags, **facts.origin).to_yaml()


def body(config: BertConfig, facts: Facts) -> Iterator[str]:
    """Yield the lines below the YAML."""
    base = facts.origin.get("base_model")
    name = base[0] if isinstance(base, list) else base
    what = "pruned BERT" if is_pruned(facts.left) else "BERT"
    yield f"# {plain(name.rpartition('/')[2]) if name else facts.cls}, {what}"
    yield ""
    made = f"from [{plain(name)}](https://huggingface.co/{name}) " if name else ""
    yield f"A `{facts.cls}`, made {made}with bertlite. {plain(' '.join(facts.how))}".rstrip()
    if facts.figures:
        yield from figure_table(facts.figures)
    if is_pruned(facts.left):
        yield from layer_table(facts.left)
    yield from loading(config, facts)


def figure_table(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield the figures as a table."""
    yield from ("", "## Figures", "", "| | this model | 95 % interval | dense model |", "|---|---|---|---|")
    for each in figures:
        interval = ""
        if each.low is not None and each.high is not None:
            interval = f"{each.low:.4g} to {each.high:.4g}" + (f", over {plain(each.over)}" if each.over else "")
        dense = "" if each.dense is None else f"{each.dense:.4g}"
        yield f"| {plain(each.name)} | {each.value:.4g} | {interval} | {dense} |"


def layer_table(config: BertConfig) -> Iterator[str]:
    """Yield the heads and neurons that each layer keeps."""
    yield from ("", "## What is left", "", "| layer | heads | removed heads | neurons |", "|---|---|---|---|")
    heads, width = config.num_attention_heads, config.intermediate_size
    for layer in range(config.num_hidden_layers):
        kept, neurons = kept_heads(config, layer), len(kept_neurons(config, layer))
        gone = ", ".join(str(head) for head in range(heads) if head not in kept)
        yield f"| {layer} | {len(kept)} of {heads} | {gone} | {neurons} of {width} |"


def loading(config: BertConfig, facts: Facts) -> Iterator[str]:
    """Yield how to load the model."""
    code = needs_code(config)
    trust = ", trust_remote_code=True" if code else ""
    auto = next((auto for auto, name in AUTO_CLASSES.items() if name == facts.cls), "AutoModel")
    yield from ("", "## How to load it", "", "With bertlite:", "", "```python", f"from bertlite import {facts.cls}")
    yield from ("", 'folder = "."  # or the name of this repository on the hub')

    yield from (f"model = {facts.cls}.from_pretrained(folder)", "```", "")

    # transformers needs help with a model that its own BERT cannot be.
    if code:
        other = "transformers 5 has no pruned BERT of its own."
        yield f"{other if is_pruned(config) else OTHER_BERT}  Install bertlite:"
        yield from ("", f"    {install_hint('hf', elsewhere=True)}", "")
        yield "Then it loads this model if it is told to trust the code here, which only imports bertlite:"
    else:
        yield "With transformers" + (LEFT_PADDING if config.positions_skip_padding else ":")

    yield from ("", "```python", f"from transformers import AutoTokenizer, {auto}", "")
    yield "tokenizer = AutoTokenizer.from_pretrained(folder)"
    yield from (f"model = {auto}.from_pretrained(folder{trust})", "```")

    if facts.sentences:
        yield from ("", "With sentence-transformers:", "", "```python")
        yield from ("from sentence_transformers import SentenceTransformer", "")
        yield from (f"model = SentenceTransformer(folder{trust})", "```")
    yield from ("", "For onnxruntime and OpenVINO, without bertlite: `bertlite export FOLDER --out GRAPHS`.")
