"""The arguments of a forward, in the order of the installed transformers, ignored ones included."""

import inspect
import linecache
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from transformers.models.bert import modeling_bert as stock

from bertlite.hf import compat

Class = TypeVar("Class", bound=type[Any])
ORDER_OF_4 = (  # BertModel's in transformers 4.57
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "head_mask", "inputs_embeds"),
    *("encoder_hidden_states", "encoder_attention_mask", "past_key_values", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict", "cache_position"),
)
FORWARD = """\
def forward(self, {parameters}):
    self.check_unused(attention_mask, dict({unused}))
    return self.forward_by_name({used})
"""


def in_stocks_order(cls: Class) -> Class:
    """Give a model a forward whose arguments have the order of transformers' class of its name."""
    parameters = inspect.signature(getattr(stock, cls.__name__).forward).parameters.values()
    return in_order([each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][1:])(cls)


def in_order(order: Sequence[str]) -> Callable[[Class], Class]:
    """Give a model a forward with arguments in this order, then its own arguments, then ignored ones.

    It is written as source code: libraries that trace it read its signature, its code and its source, and some run the
    source again in the module of the model's class.  It calls the old forward, as `forward_by_name`.  A cache may be
    given under its name of 5.24 or under the older one, not both.
    """

    def decorate(cls: Class) -> Class:
        cls.forward_by_name = plain = getattr(cls, "forward_by_name", cls.forward)
        ours = {name: each for name, each in inspect.signature(plain).parameters.items() if name != "self"}
        cls.accepts_loss_kwargs = "num_items_in_batch" in ours  # Trainer reads it

        # Arguments that are only ignored are there for callers who pass them by place.
        names = dict.fromkeys((*order, *ours, *compat.IGNORED))
        used, unused = {name: name for name in ours}, {name: name for name in names if name not in ours}

        if "cache" in order and "past_key_values" in ours:
            used["past_key_values"] = "cache if past_key_values is None else past_key_values"
            unused["cache"] = "None if past_key_values is None else cache"

        # Debuggers and tracers look for the source in linecache, under the file that the code names.
        source = FORWARD.format(
            parameters=", ".join(f"{name}={ours[name].default if name in ours else None}" for name in names),
            unused=", ".join(f"{name}={value}" for name, value in unused.items()),
            used=", ".join(f"{name}={value}" for name, value in used.items()),
        )
        file = f"<{cls.__module__}.{cls.__qualname__}.forward>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file

        # The code runs in the module of the class, where a library that runs it again will run it.
        made: dict[str, Any] = {}
        exec(compile(source, file, "exec"), vars(sys.modules[cls.__module__]), made)

        cls.forward = made["forward"]
        cls.forward.__qualname__ = f"{cls.__qualname__}.forward"
        cls.forward.__doc__ = plain.__doc__
        cls.forward.__annotations__ = {name: each.annotation for name, each in ours.items()}
        return cls

    return decorate
