"""Cutting a large batch into micro-batches, whatever its shape: tensors, tuples, dicts, nested."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["cut", "items_in", "mapped", "take"]

Rows = slice | Tensor


def items_in(batch: Any) -> int:
    """Count the items of a batch: the first dimension of the first tensor that has one.

    Raises:
        ValueError: there is no such tensor.
    """
    for leaf in _leaves(batch):
        if _is_array(leaf):
            return int(leaf.shape[0])
    raise ValueError(f"found no tensor with a first dimension in the batch, a {_name(batch)}")


def take(batch: Any, rows: Rows) -> Any:
    """Give the batch with only these rows of it.

    Tensors (and arrays) whose first dimension counts the items are indexed, so are lists and
    tuples of that many things that hold no tensor, e.g. strings. Everything else stays whole.
    """
    items = items_in(batch)

    def rows_of(value: Any) -> Any:
        if _is_array(value):
            if value.shape[0] != items:
                return value
            return value[rows if isinstance(value, Tensor) else _plain(rows)]
        if isinstance(value, list | tuple) and len(value) == items:
            if any(map(_is_array, _leaves(value))):
                return NotImplemented
            kept = value[rows] if isinstance(rows, slice) else [value[i] for i in rows.tolist()]
            return type(value)(kept)
        return NotImplemented

    return mapped(batch, rows_of)


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut the batch into consecutive micro-batches of `sizes` items.

    Raises:
        ValueError: a size is below 1, or they don't add up to the items there are.
    """
    items = items_in(batch)
    if min(sizes, default=1) < 1:
        raise ValueError(f"the sizes {tuple(sizes)}: every micro-batch needs at least 1 item")
    if sum(sizes) != items:
        raise ValueError(f"the sizes {tuple(sizes)} do not add up to the batch's {items} items")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [take(batch, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild a nested batch: `change` gives a part's replacement, or NotImplemented to go inside.

    Tuples, lists, mappings and dataclasses are gone into; other parts stay as they are.
    """
    if (changed := change(value)) is not NotImplemented:
        return changed
    if isinstance(value, Mapping):
        return _rebuild(value, {key: mapped(inner, change) for key, inner in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(inner, change) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(inner, change) for inner in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        changes = {name: mapped(getattr(value, name), change) for name in fields}
        return dataclasses.replace(value, **changes)
    return value


def _rebuild(value: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    """Give a mapping of the same kind, for the dict-like batches that libraries have."""
    if type(value) is dict:
        return content
    same = copy.copy(value)
    try:
        for key, inner in content.items():
            same[key] = inner  # type: ignore[index]
    except TypeError:
        return content
    return same


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _is_array(value: Any) -> bool:
    return bool(getattr(value, "shape", ())) and hasattr(value, "__getitem__")


def _plain(rows: Rows) -> Any:
    return rows if isinstance(rows, slice) else rows.tolist()


def _name(batch: Any) -> str:
    return torch.typename(batch) if batch is not None else "None"
