"""The steps before and after an encoder, as plain data: a text becomes token ids, and states become results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Processing:
    """The steps before and after an encoder; its JSON is a packed folder's runtime.json.

    A tokenizer has those before the ids that sentence-transformers' files state, a checkpoint all of them.

    Args:
        kind: "encoder", "cross-encoder", "classifier" or "tagger"; empty for a class that the runtime does not run.
        max_length: the most tokens of a text, special ones included; longer texts are truncated.  0 if no file
            states it.
        lower_case: lower-case texts before they are tokenized, whatever the tokenizer does.
        segments: whether the model gets the segment of each token.
        truncation_side: "right" or "left"; None for the tokenizer's.
        prompts: {name: the string put before a text}.
        default_prompt: the name of the prompt that texts get unless another is asked for; None for none.
        modes: names of sentence-transformers' poolings, whose vectors are joined; empty if states are not pooled.
        include_prompt: whether a prompt's tokens are pooled.
        after: the steps after pooling, each with its "type" and sizes.  `pack` adds the modules that have weights.
        similarity: the name of the function that compares two vectors.
        unknown: a tagger's unknown token; None for the one that its tokenizer.json names.
        labels: their names, in the order of the scores.
        activation: the function of the scores; a module's name if the runtime lacks it.
        made: for a packed folder: the checkpoint, bertlite's version, the agreement and how weights were rounded.
        fault: the reason why texts cannot be encoded as sentence-transformers does; empty if they can.
    """

    kind: str = "encoder"
    max_length: int = 0
    lower_case: bool = False
    segments: bool = True
    truncation_side: str | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    modes: Sequence[str] = ("mean",)
    include_prompt: bool = True
    after: Sequence[Mapping[str, Any]] = ()
    similarity: str = "cosine"
    unknown: str | None = None
    labels: Sequence[str] = ()
    activation: str = "identity"
    made: Mapping[str, Any] | None = None
    fault: str = ""

    def prompt(self, name: str | None = None) -> str:
        """Return the prompt with a name, or the default one; raise ValueError if no prompt has that name."""
        if name is None:
            return self.prompts.get(self.default_prompt or "", "")
        if name not in [*self.prompts]:  # a list has no hash
            raise ValueError(f"there is no prompt {name!r}; have: {', '.join(map(repr, self.prompts)) or 'none'}")
        return self.prompts[name]

    def check(self) -> None:
        """Raise ValueError if texts cannot be encoded as sentence-transformers does."""
        if self.fault:
            raise ValueError(self.fault)
