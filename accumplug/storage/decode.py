"""The state that `encode` has taken apart, put together again.

Nothing that is read is trusted: whatever a stranger may have written is a CheckpointError.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accumplug.errors import CheckpointError
from accumplug.storage.codec import MAX_DEPTH, TensorShard, is_dense, is_key
from accumplug.storage.safetensors_io import NAMES


def decode(
    tree: Any,
    tensors: dict[str, Tensor],
    where: Path,
    upgrade: Callable[[dict[Any, Any]], Any] | None = None,
) -> Any:
    """Put together what `encode` took apart; `where` is the file to name in a CheckpointError.

    `upgrade` is given each plain dict of a file in an older format (see format_1.py).
    """
    try:
        return _Decoder(dict(tensors), upgrade).value(tree, 0)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except RuntimeError as error:  # torch has no such tensor; or out of memory
        raise CheckpointError(f"{where}: {error}") from error


class _Decoder:
    def __init__(
        self, tensors: dict[str, Tensor], upgrade: Callable[[dict[Any, Any]], Any] | None
    ) -> None:
        self.tensors = tensors
        self.upgrade = upgrade

    def value(self, tree: Any, depth: int) -> Any:
        if depth > MAX_DEPTH + 1:
            raise CheckpointError(f"nested more than {MAX_DEPTH} deep")
        if isinstance(tree, list):
            return [self.value(item, depth + 1) for item in tree]
        if not isinstance(tree, dict):
            return tree
        marker = next((key for key in tree if key.startswith("$")), None)
        if marker is None:
            plain = {key: self.value(item, depth + 1) for key, item in tree.items()}
            return plain if self.upgrade is None else self.upgrade(plain)
        if marker == "$tensor":
            return self.tensor(tree)
        if marker == "$ordered" and tree.keys() <= {"$ordered", "metadata"}:
            ordered = OrderedDict(_dict(self.value(tree["$ordered"], depth)))
            if "metadata" in tree:
                ordered._metadata = self.value(tree["metadata"], depth + 1)  # type: ignore[attr-defined]
            return ordered
        if len(tree) == 1:
            return self.marked(marker, tree[marker], depth)
        raise CheckpointError(f"not a value that was saved: {tree!r:.200}")

    def marked(self, marker: str, content: Any, depth: int) -> Any:
        if marker == "$float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if marker == "$tuple" and isinstance(content, list):
            return tuple(self.value(item, depth + 1) for item in content)
        if marker == "$dict":
            return self.pairs(content, depth)
        if marker == "$counter":
            return Counter(self.pairs(content, depth))
        if marker in _LEAVES and isinstance(content, dict):
            try:
                return _LEAVES[marker](self.value(content, depth))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(f"not a {marker[1:]}: {content!r:.200}") from error
        raise CheckpointError(f"not a value that was saved: { {marker: content}!r:.200}")

    def pairs(self, content: Any, depth: int) -> dict[Any, Any]:
        result = {}
        for pair in content if isinstance(content, list) else [content]:
            if not isinstance(pair, list) or len(pair) != 2:
                raise CheckpointError(f"not a dict: {content!r:.200}")
            key = self.value(pair[0], depth + 1)
            if not is_key(key):
                raise CheckpointError(f"not a key: {pair[0]!r:.200}")
            result[key] = self.value(pair[1], depth + 1)
        if len(result) != len(content):
            raise CheckpointError(f"a dict with a key twice: {content!r:.200}")
        return result

    def tensor(self, node: dict[str, Any]) -> Tensor:
        """The tensor that a node names. One whose strides are restored replaces the stored one,
        so that two nodes get the same."""
        name = node["$tensor"]
        stored = self.tensors.get(name) if isinstance(name, str) else None
        if stored is None:
            raise CheckpointError(f"no tensor is named {name!r:.200}")
        if node.keys() == {"$tensor"}:
            return stored
        if node.keys() == {"$tensor", "stride"}:
            self.tensors[name] = _restride(stored, node["stride"])
            return self.tensors[name]
        if node.keys() == {"$tensor", "view"}:
            return _view(stored, node["view"])
        raise CheckpointError(f"not a tensor: {node!r:.200}")


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise CheckpointError(f"not a dict: {value!r:.200}")
    return value


def _restride(stored: Tensor, stride: Any) -> Tensor:
    shape = list(stored.shape)
    if not _are_sizes(stride) or len(stride) != len(shape) or not is_dense(shape, stride):
        raise CheckpointError(f"stride {stride!r:.200} does not fit shape {shape}")
    if list(stored.stride()) == stride:
        return stored
    return torch.empty_strided(shape, stride, dtype=stored.dtype, device=stored.device).copy_(
        stored
    )


def _view(stored: Tensor, view: Any) -> Tensor:
    """A view of stored bytes, which format 1 wrote for tensors that overlap."""
    if not isinstance(view, dict) or view.keys() != {"dtype", "offset", "shape", "stride"}:
        raise CheckpointError(f"not a view: {view!r:.200}")
    name, offset, shape, stride = (view[key] for key in ("dtype", "offset", "shape", "stride"))
    dtype = _VIEWED.get(name) if isinstance(name, str) else None
    if dtype is None or not _are_sizes([offset]) or not _are_sizes(shape, stride):
        raise CheckpointError(f"not a view: {view!r:.200}")
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    need = offset + (last + 1) * dtype.itemsize if math.prod(shape) else offset
    have = stored.untyped_storage().nbytes()
    if len(shape) > 64 or need > have or offset % dtype.itemsize:
        raise CheckpointError(f"the view {view!r:.200} needs {need} bytes, there are {have}")
    result = torch.empty(0, dtype=dtype, device="cpu")
    result.set_(stored.untyped_storage(), offset // dtype.itemsize, shape, stride)
    return result


_VIEWED = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (*NAMES, torch.complex64, torch.complex128, torch.complex32)
}


def _are_sizes(*lists: Any) -> bool:
    """Whether these are lists of one length, of numbers that a size or a stride can be."""
    return all(
        isinstance(values, list)
        and len(values) == len(lists[0])
        and all(type(value) is int and 0 <= value < 2**48 for value in values)
        for values in lists
    )


def sparse(parts: dict[str, Any]) -> Tensor:
    """The sparse tensor of these parts."""
    return torch.sparse_coo_tensor(
        parts["indices"],
        parts["values"],
        parts["size"],
        is_coalesced=parts["coalesced"],
        check_invariants=True,  # indices outside of the size would be outside of the memory
    )


def _shard(parts: dict[str, Any]) -> TensorShard:
    shard = TensorShard(**parts)
    dims, placements = len(shard.global_shape), shard.placements
    if (
        not _are_sizes(shard.offsets, shard.global_shape, list(shard.local.shape))
        or not isinstance(placements, list)
        or any(dim is not None and not (type(dim) is int and 0 <= dim < dims) for dim in placements)
    ):
        raise ValueError(parts)
    return shard


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "$ints": lambda tensor: tuple(tensor.tolist()),
    "$bytes": lambda tensor: tensor.numpy().tobytes(),
    "$array": lambda tensor: tensor.numpy().copy(),
    "$complex": torch.view_as_complex,
    "$sparse": sparse,
    "$shard": _shard,
}
