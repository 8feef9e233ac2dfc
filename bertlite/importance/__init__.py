"""Which heads and neurons a BERT can do without: scores, choices and repair.

Heads and neurons have their numbers in the unpruned model, and a choice is {layer: [units]}, what
`bertlite.prune_heads` and `bertlite.prune_neurons` take.

The public names are imported when they are first asked for, so that the table of criteria can be read without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertlite.importance.public import *  # noqa: F403
else:  # type checkers would take the function to mean that every name exists

    def __getattr__(name: str) -> Any:
        from bertlite.extras import import_public

        return import_public(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), "__all__", *__getattr__("__all__")})
