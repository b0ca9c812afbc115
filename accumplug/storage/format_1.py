"""Reads the values that format 1 wrote as plain dicts: sparse gradients, shards, random states.

Format 2 has a marker for each of them (codec.py); their keys mean nothing special there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from accumplug.errors import CheckpointError
from accumplug.storage.codec import TensorShard
from accumplug.storage.decode import sparse


def upgrade(value: dict[Any, Any]) -> Any:
    """The value that format 1 stood for with such a dict, or the dict itself.

    Raises:
        CheckpointError: it has the keys of such a value and other content.
    """
    reader = _READERS.get(frozenset(value))
    if reader is None:
        return value
    try:
        return reader(value)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"malformed: {value!r:.200}") from error


def _on_device(value: dict[str, Any]) -> Tensor:
    tensor: Tensor = value["tensor"]
    return tensor


def _shard(value: dict[str, Any]) -> TensorShard:
    return TensorShard(value["shard"], value["at"], value["of"], value["dims"])


_READERS: dict[frozenset[str], Callable[[dict[str, Any]], Any]] = {
    frozenset({"tensor", "on"}): _on_device,
    frozenset({"indices", "values", "size", "coalesced"}): sparse,
    frozenset({"shard", "at", "of", "dims"}): _shard,
    frozenset({"words"}): lambda value: tuple(value["words"].tolist()),
    frozenset({"array", "dtype"}): lambda value: np.array(value["array"].tolist(), "int64").astype(
        value["dtype"]
    ),
}
