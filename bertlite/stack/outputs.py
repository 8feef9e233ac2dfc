"""The outputs of models: read them by attribute, by key or as a tuple."""

from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from bertlite.support import torch_private

Out = TypeVar("Out", bound="ModelOutput")


class ModelOutput(Mapping[str, Any]):
    """Base of the output dataclasses below.  A field that is None is absent: no key, no place in the tuple.

    As with transformers' outputs, `out.logits`, `out["logits"]` and `out[0]` read, iteration gives the keys,
    and `type(out)({...})` builds from one mapping.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, /, **parts: Any) -> None:
        parts = {**(values or {}), **parts}
        names = self.__dataclass_fields__  # type: ignore[attr-defined]  # every subclass is a dataclass
        if unknown := parts.keys() - names.keys():
            raise TypeError(
                f"{type(self).__name__} has no field {', '.join(sorted(unknown))}; have: {', '.join(names)}"
            )
        for name in names:
            setattr(self, name, parts.get(name))

    def keys(self) -> KeysView[str]:
        return dict.fromkeys(self).keys()  # its repr shows keys, not every tensor

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            value = getattr(self, key) if key in self.__dict__ else None
            if value is None:
                raise KeyError(key)
            return value
        return self.to_tuple()[key]

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in self.__dict__.items() if value is not None)

    def __len__(self) -> int:
        return sum(value is not None for value in self.__dict__.values())

    def __contains__(self, key: object) -> bool:
        return self.__dict__.get(key) is not None  # type: ignore[call-overload]

    __eq__ = object.__eq__  # an output equals itself: elementwise comparison of tensors has no one answer
    __hash__ = object.__hash__


def register(cls: type[Out]) -> type[Out]:
    """Make it a dataclass whose constructor also takes one mapping, and a pytree."""
    cls = dataclass(init=False, eq=False)(cls)
    torch_private.register_pytree(
        cls,
        lambda out: (list(out.values()), tuple(out)),
        lambda leaves, names: cls(dict(zip(names, leaves, strict=True))),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
        flatten_with_keys_fn=lambda out: ([(torch_private.MappingKey(k), v) for k, v in out.items()], tuple(out)),
    )
    return cls


@register
class BertModelOutput(ModelOutput):
    """The output of BertModel: token states, and the pooled first token if the model has a pooler."""

    last_hidden_state: Tensor  # (B, S, D)
    pooler_output: Tensor | None = None  # (B, D)
    past_key_values: Any = None  # a decoder's KeyValueCache
    hidden_states: tuple[Tensor, ...] | None = None  # the embeddings and every layer, each (B, S, D)
    attentions: tuple[Tensor, ...] | None = None  # every layer, (B, heads kept there, S, S)
    cross_attentions: tuple[Tensor, ...] | None = None  # every layer, (B, N, S, K)


@register
class EncoderOutput(BertModelOutput):
    """BERT's output for its head: last_hidden_state in the layers' layout, (B, S, D) or packed (T, D)."""

    layout: Any = None  # the `Layout` of its tokens
