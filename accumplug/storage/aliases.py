"""Which tensors lie in the same memory: those bytes are stored once and restored tied.

A tensor that shares nothing is stored under its own name, contiguous, in its own shape. Where
several overlap, the one that covers all the others is stored, or else the bytes they span, and
each of the others is a view of it. (Gradients in DDP's buckets share a storage and no byte of
it, so they are stored one by one.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from accumplug.errors import CheckpointError
from accumplug.storage.safetensors_io import NAMES

VIEWED = (*NAMES, torch.complex64, torch.complex128, torch.complex32)
VIEWED_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in VIEWED}


@dataclass
class TensorRef:
    """One tensor of a state: its place in the tree (`node`), its name in the file, its memory."""

    node: dict[str, Any]
    name: str
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        item = self.tensor.dtype.itemsize
        self.start = self.tensor.data_ptr()
        self.end = self.start
        if self.tensor.numel():
            steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
            self.end += (1 + sum((size - 1) * stride for size, stride in steps)) * item
        # Fewer bytes than elements: some elements lie on top of each other (`expand`).
        self.folded = self.end - self.start < self.tensor.numel() * item
        self.layout = (self.start, self.tensor.dtype, self.tensor.shape, self.tensor.stride())

    def covers(self, start: int, end: int) -> bool:
        """Whether this tensor, stored as it is, holds every byte from `start` to `end`."""
        whole = self.start == start and self.end == end
        return whole and self.tensor.dtype in NAMES and self.tensor.is_contiguous()


def place(refs: list[TensorRef]) -> dict[str, torch.Tensor]:
    """The tensors to store by name, and in each ref's node where to find it. Copies nothing."""
    storages: dict[tuple[torch.device, int, int], list[TensorRef]] = defaultdict(list)
    stored: dict[str, torch.Tensor] = {}
    for ref in refs:
        if ref.end == ref.start and ref.tensor.dtype in NAMES:
            _alone(ref, stored)
        else:
            storage = ref.tensor.untyped_storage()
            storages[ref.tensor.device, storage.data_ptr(), storage.nbytes()].append(ref)
    for group in storages.values():
        for cluster in _overlapping(group):
            _together(cluster, stored)
    return stored


def _overlapping(group: list[TensorRef]) -> list[list[TensorRef]]:
    clusters: list[list[TensorRef]] = []
    end = -1
    for ref in sorted(group, key=lambda ref: (ref.start, -ref.end)):
        if ref.start >= end:
            clusters.append([])
        clusters[-1].append(ref)
        end = max(end, ref.end)
    return clusters


def _together(cluster: list[TensorRef], stored: dict[str, torch.Tensor]) -> None:
    first = cluster[0]
    same = all(ref.layout == first.layout for ref in cluster)
    if same and not first.folded and first.tensor.dtype in NAMES:
        for ref in cluster:
            _alone(ref, stored, first.name)
        return
    start, end = first.start, max(ref.end for ref in cluster)
    base = next((ref for ref in cluster if ref.covers(start, end)), None)
    if base is None:
        stored[first.name] = _bytes(first.tensor, end - start)
    else:
        _alone(base, stored)
    for ref in cluster:
        ref.node["$tensor"] = (base or first).name
        if base is None or ref.layout != base.layout:
            ref.node["view"] = {
                "dtype": str(ref.tensor.dtype).removeprefix("torch."),
                "offset": ref.start - start,
                "shape": list(ref.tensor.shape),
                "stride": list(ref.tensor.stride()),
            }


def _alone(ref: TensorRef, stored: dict[str, torch.Tensor], name: str | None = None) -> None:
    name = name or ref.name
    stored[name] = stored.get(name, ref.tensor)
    ref.node["$tensor"] = name
    shape, stride = list(ref.tensor.shape), list(ref.tensor.stride())
    if not ref.tensor.is_contiguous() and _is_dense(shape, stride):
        # Kept because a sum over memory in another order rounds differently (a gradient in
        # channels_last, its norm in clipping).
        ref.node["stride"] = stride


def _bytes(tensor: torch.Tensor, size: int) -> torch.Tensor:
    offset = tensor.storage_offset() * tensor.dtype.itemsize
    result = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    result.set_(tensor.untyped_storage(), offset, (size,), (1,))
    return result


def _is_dense(shape: list[int], stride: list[int]) -> bool:
    """Whether the strides only reorder the dimensions, leaving no gap and no overlap."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def find(node: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that a node of the tree means; CheckpointError if it can't be one.

    A tensor whose strides are restored replaces the stored one, so that two nodes get the same.
    """
    stored = tensors.get(node["$tensor"]) if isinstance(node["$tensor"], str) else None
    if stored is None:
        raise CheckpointError(f"no tensor is named {node['$tensor']!r:.200}")
    if node.keys() == {"$tensor"}:
        return stored
    if node.keys() == {"$tensor", "stride"}:
        tensors[node["$tensor"]] = _restride(stored, node["stride"])
        return tensors[node["$tensor"]]
    if node.keys() == {"$tensor", "view"}:
        return _view(stored, node["view"])
    raise CheckpointError(f"not a tensor: {node!r:.200}")


def _restride(stored: torch.Tensor, stride: Any) -> torch.Tensor:
    shape = list(stored.shape)
    if not _are_sizes(stride) or len(stride) != len(shape) or not _is_dense(shape, stride):
        raise CheckpointError(f"stride {stride!r:.200} does not fit shape {shape}")
    if list(stored.stride()) == stride:
        return stored
    return torch.empty_strided(shape, stride, dtype=stored.dtype).copy_(stored)


def _view(stored: torch.Tensor, view: Any) -> torch.Tensor:
    if not isinstance(view, dict) or view.keys() != {"dtype", "offset", "shape", "stride"}:
        raise CheckpointError(f"not a view: {view!r:.200}")
    dtype, offset, shape, stride = (view[key] for key in ("dtype", "offset", "shape", "stride"))
    known = VIEWED_NAMES.get(dtype) if isinstance(dtype, str) else None
    if known is None or not _are_sizes([offset]) or not _are_sizes(shape, stride):
        raise CheckpointError(f"not a view: {view!r:.200}")
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    need = offset + (last + 1) * known.itemsize if math.prod(shape) else offset
    have = stored.untyped_storage().nbytes()
    if len(shape) > 64 or need > have or offset % known.itemsize:
        raise CheckpointError(f"the view {view!r:.200} needs {need} bytes, there are {have}")
    result = torch.empty(0, dtype=known)
    result.set_(stored.untyped_storage(), offset // known.itemsize, shape, stride)
    return result


def _are_sizes(*lists: Any) -> bool:
    """Whether these are lists of one length, of numbers that a size or a stride can be."""
    return all(
        isinstance(values, list)
        and len(values) == len(lists[0])
        and all(type(value) is int and 0 <= value < 2**48 for value in values)
        for values in lists
    )
