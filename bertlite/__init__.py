"""The BERT you can read, prove, prune and run.

`import bertlite` is instant: the public names, and modules such as `bertlite.inference`, are imported when they are
first asked for.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # stated here alone; pyproject.toml reads it

if TYPE_CHECKING:
    from bertlite.public import *  # noqa: F403
    from bertlite.workshop import *  # noqa: F403

    __all__: list[str]
    embed: Any  # packages that can be called
    parity: Any
else:  # type checkers would take the function to mean that every name exists

    def __getattr__(name: str) -> Any:
        from bertlite.support.extras import import_public

        return import_public(__name__, name)

    def __dir__() -> list[str]:
        return [*__getattr__("__all__"), "__all__", "__version__"]
