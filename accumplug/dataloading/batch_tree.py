"""Batches as nested tuples, lists, dicts and dataclasses of tensors: counting and cutting items."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Batch", "cut", "items_in", "leaves", "mapped", "take"]

Batch: TypeAlias = Any  # whatever the user's loader yields: any nesting of any types
Rows: TypeAlias = slice | Tensor


def items_in(batch: Batch) -> int:
    """Count the items of a batch: the first dimension of the first tensor that has one.

    Raises:
        ValueError: there is no such tensor.
    """
    for leaf in leaves(batch):
        if _is_array(leaf):
            return int(leaf.shape[0])
    kind = "None" if batch is None else torch.typename(batch)
    raise ValueError(f"found no tensor with a first dimension in the batch, a {kind}")


def take(batch: Batch, rows: Rows) -> Batch:
    """Return the batch reduced to some of its rows.

    Tensors and arrays whose first dimension counts the items are indexed. So are lists and tuples
    of that length that hold no tensor, e.g. of strings. Everything else is kept whole.
    """
    items = items_in(batch)

    def rows_of(value: Any) -> Any:
        if _is_array(value):
            if value.shape[0] != items:
                return value
            return value[rows if isinstance(rows, slice | type(value)) else rows.tolist()]
        if isinstance(value, list | tuple) and len(value) == items:
            if any(map(_is_array, leaves(value))):
                return NotImplemented
            kept = value[rows] if isinstance(rows, slice) else [value[i] for i in rows.tolist()]
            return type(value)(kept)
        return NotImplemented

    return mapped(batch, rows_of)


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Cut the batch into consecutive micro-batches of `sizes` items.

    Raises:
        ValueError: a size is below 1, or the sizes do not add up to the batch's items.
    """
    items = items_in(batch)
    if min(sizes, default=1) < 1:
        raise ValueError(f"the sizes {tuple(sizes)}: every micro-batch needs at least 1 item")
    if sum(sizes) != items:
        raise ValueError(f"the sizes {tuple(sizes)} do not add up to the batch's {items} items")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [take(batch, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def mapped(value: Batch, change: Callable[[Any], Any]) -> Batch:
    """Rebuild a nested batch: `change` returns the replacement of a part, or NotImplemented.

    NotImplemented means: visit the parts inside. Tuples, lists, mappings and dataclasses have
    parts; any other value is kept.
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
    """Return a mapping of the same class, for the dict-like batches of libraries."""
    if type(value) is dict:
        return content
    same = copy.copy(value)
    try:
        for key, inner in content.items():
            same[key] = inner  # type: ignore[index]
    except TypeError:
        return content
    return same


def leaves(value: Batch) -> Iterator[Any]:
    """Iterate over the values of a nested batch that have no parts themselves."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def _is_array(value: Any) -> bool:
    return bool(getattr(value, "shape", ())) and hasattr(value, "__getitem__")
