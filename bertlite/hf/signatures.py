"""Positional arguments of a forward, in the order of the transformers that is installed."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from transformers.models.bert import modeling_bert as stock

Class = TypeVar("Class", bound=type[Any])
SAME = 4  # so many lead every forward: input_ids, attention_mask, token_type_ids, position_ids
ORDER_OF_4 = (  # BertModel's in transformers 4.57
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "head_mask", "inputs_embeds"),
    *("encoder_hidden_states", "encoder_attention_mask", "past_key_values", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict", "cache_position"),
)


def in_stocks_order(cls: Class) -> Class:
    """Let a model's forward take positional arguments in the order of transformers' class of its name."""
    parameters = inspect.signature(getattr(stock, cls.__name__).forward).parameters.values()
    return in_order([each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][1:])(cls)


def in_order(order: Sequence[str]) -> Callable[[Class], Class]:
    """Let a model's forward take positional arguments in this order; without it those after the fourth have names."""

    def decorate(cls: Class) -> Class:
        plain = cls.forward
        signature = inspect.signature(plain)
        ours = signature.parameters
        every = [*order, *(name for name in ours if name not in ("self", *order))]  # torch.onnx places these too

        def forward(self: Any, *args: Any, **options: Any) -> Any:
            if len(args) > SAME:
                options = by_name(every, args, ours, options)
            return plain(self, *args[:SAME], **options)

        functools.update_wrapper(forward, plain)
        del forward.__wrapped__  # type: ignore[attr-defined]  # whose signature is another
        placed = [ours[name].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in order if name in ours]
        named = [each for name, each in ours.items() if name not in ("self", *order)]
        forward.__signature__ = signature.replace(parameters=[ours["self"], *placed, *named])  # type: ignore[attr-defined]
        cls.forward = forward
        return cls

    return decorate


def by_name(order: Sequence[str], args: Sequence[Any], ours: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the positional arguments after the first four among them, by name.

    Raises:
        TypeError: there are too many, one is given twice, or our forward has none of that name.
    """
    if len(args) > len(order):
        raise TypeError(f"forward takes {len(order)} positional arguments, and {len(args)} are given")
    placed = dict(zip(order[SAME:], args[SAME:], strict=False))
    twice = sorted(placed.keys() & options.keys())
    if twice:
        raise TypeError(f"{twice[0]} is given twice, once by its place")
    unknown = [name for name, value in placed.items() if name not in ours and value is not None]
    if unknown:
        raise TypeError(f"this forward has no {unknown[0]}; leave it None")
    return {**options, **{name: value for name, value in placed.items() if name in ours}}
