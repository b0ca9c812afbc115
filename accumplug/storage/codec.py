"""A state (nested containers of tensors and plain values) as JSON and named tensors.

The state that is read equals the one that was saved, types included: tuples, dicts with integer
keys (as in `optimizer.state_dict()`), infinities, bytes, NumPy arrays, sparse tensors, tied
tensors, strides. JSON has no word for these; each is an object whose first key starts with "$".
Everything else is refused when it is saved, so nothing needs pickle. decode.py is the way back.

A sharded tensor (DTensor) becomes the part of this rank and its place in the whole, and is read
as a `TensorShard`, so that any number of ranks can put the parts together.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from accumplug.parallel.private import require
from accumplug.storage.safetensors_io import METADATA, NAMES

MAX_DEPTH = 64  # containers in containers; far from the depth at which json gives up
LONG = 16  # a tuple of more integers than this becomes a tensor (625 are a state of `random`)
_JSON = frozenset({bool, int, str, type(None)})


class Encoded(NamedTuple):
    """A state in two halves: a tree that JSON can hold, and the tensors that it names."""

    tree: Any
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class TensorShard:
    """The part of a sharded tensor that one rank has written."""

    local: Tensor
    offsets: list[int]
    """Where the part begins in the whole, for each dimension."""
    global_shape: list[int]
    placements: list[int | None]
    """For each dimension of the mesh, the dimension of the tensor that it splits; None if it
    repeats the tensor."""


def encode(state: Any, name: str = "state") -> Encoded:
    """Take `state` apart. Dense tensors are not copied: the result refers to the same memory.

    The tensors are named after their path ("state.0.exp_avg"), a model's after its parameters.
    Tensors that are one memory in one layout are stored once.

    Raises:
        TypeError: something that a checkpoint can't hold; the message names its path, from
            `name` on.
        ValueError: nested too deep, perhaps because a container contains itself.
    """
    encoder = _Encoder(name)
    tree = encoder.value(state, ())
    return Encoded(tree, encoder.tensors)


class _Encoder:
    """One walk over a state. The loops treat JSON's own values without a call for each."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self.stored: dict[Any, str] = {}
        """The name of each tensor by its place in memory and its layout."""
        self.by_kind: dict[type, Callable[[Any, tuple[Any, ...]], Any]] = {
            dict: self.mapping,
            list: self.sequence,
            Tensor: self.tensor,
            torch.nn.Parameter: self.tensor,
        }

    def value(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in _JSON:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if (method := self.by_kind.get(kind)) is not None:
            return method(value, path)
        if isinstance(value, Tensor):
            return self.tensor(value, path)
        if kind in (tuple, torch.Size):
            if len(value) > LONG and set(map(type, value)) == {int} and _fits(value):
                return {
                    "$ints": self.tensor(torch.tensor(value, dtype=torch.int64, device="cpu"), path)
                }
            return {"$tuple": self.sequence(value, path)}
        if kind is Counter:  # the milestones of MultiStepLR
            return {"$counter": self.pairs(value, path)}
        if kind is OrderedDict:
            return self.ordered(value, path)
        if kind is bytes:
            data = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else _NO_BYTES
            return {"$bytes": self.tensor(data, path)}
        if kind.__module__ == "numpy":
            return self.numpy(value, path)
        raise self.refused(value, path)

    def sequence(self, values: Iterable[Any], path: tuple[Any, ...]) -> list[Any]:
        if len(path) >= MAX_DEPTH:
            raise self.too_deep(path)
        result = []
        for index, item in enumerate(values):
            if not ((kind := type(item)) in _JSON or (kind is float and math.isfinite(item))):
                item = self.by_kind.get(kind, self.value)(item, (*path, index))
            result.append(item)
        return result

    def mapping(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        if len(path) >= MAX_DEPTH:
            raise self.too_deep(path)
        result = {}
        for key, item in value.items():
            if type(key) is not str or key.startswith("$"):
                return {"$dict": self.pairs(value, path)}
            result[key] = item
        for key, item in result.items():
            if not ((kind := type(item)) in _JSON or (kind is float and math.isfinite(item))):
                result[key] = self.by_kind.get(kind, self.value)(item, (*path, key))
        return result

    def pairs(self, value: dict[Any, Any], path: tuple[Any, ...]) -> list[list[Any]]:
        if len(path) >= MAX_DEPTH:
            raise self.too_deep(path)
        pairs = []
        for key, item in value.items():
            if type(key) not in _JSON and not is_key(key):
                raise TypeError(f"{self.at(path)} has a {type(key).__qualname__} as a key")
            own = key if type(key) in _JSON else self.value(key, (*path, key))
            pairs.append([own, item if type(item) in _JSON else self.value(item, (*path, key))])
        return pairs

    def ordered(self, value: OrderedDict[Any, Any], path: tuple[Any, ...]) -> Any:
        result = {"$ordered": self.mapping(value, path)}
        # A model's state_dict carries the version of each module here; without it a module
        # that migrates old states in load_state_dict would migrate a new one.
        if metadata := getattr(value, "_metadata", None):
            result["metadata"] = self.value(metadata, (*path, "_metadata"))
        return result

    def numpy(self, value: Any, path: tuple[Any, ...]) -> Any:
        if getattr(value, "shape", None) == () and isinstance(value.item(), bool | int | float):
            return self.value(value.item(), path)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
            raise self.refused(value, path)
        native = value.astype(value.dtype.newbyteorder("="), order="C")  # a copy
        return {"$array": self.tensor(torch.from_numpy(native), path)}

    def tensor(self, value: Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        kind, value = type(value), value.detach()
        if isinstance(value, DTensor):
            return {"$shard": self.mapping(_shard_of(value), path)}
        if kind not in (Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{self.at(path)} is a {kind.__module__}.{kind.__qualname__}, a tensor whose "
                f"content a checkpoint can't read; keep its plain tensors in the state"
            )
        if value.layout is torch.sparse_coo:
            return {"$sparse": self.mapping(_sparse_parts(value), path)}
        if value.is_complex() and not value.is_meta:
            return {"$complex": self.tensor(torch.view_as_real(value.resolve_conj()), path)}
        if value.layout is not torch.strided or value.is_meta or value.dtype not in NAMES:
            raise TypeError(
                f"{self.at(path)} is a tensor of {value.dtype}, {value.layout}, on "
                f"{value.device}; a checkpoint holds plain dense or sparse tensors"
            )
        value = value.resolve_neg()
        shape, stride = value.shape, value.stride()
        place = (value.data_ptr(), value.device, value.dtype, shape, stride)
        name = self.stored.get(place) if value.numel() else None
        if name is None:
            name = ".".join(map(str, path)) or self.name
            while name in self.tensors or name == METADATA:
                name += "_"
            self.tensors[name], self.stored[place] = value, name
        if not value.is_contiguous() and is_dense(shape, stride):
            # Kept because a sum over memory in another order rounds differently (a gradient in
            # channels_last, its norm in clipping).
            return {"$tensor": name, "stride": list(stride)}
        return {"$tensor": name}

    def too_deep(self, path: tuple[Any, ...]) -> ValueError:
        return ValueError(f"{self.at(path)} is nested more than {MAX_DEPTH} deep")

    def refused(self, value: Any, path: tuple[Any, ...]) -> TypeError:
        kind = type(value)
        return TypeError(
            f"{self.at(path)} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds "
            "tensors, NumPy arrays, numbers, strings, bytes, lists, tuples and dicts (no pickle): "
            "give one of those"
        )

    def at(self, path: tuple[Any, ...]) -> str:
        return self.name + "".join(f".{k}" if type(k) is str else f"[{k!r}]" for k in path)


_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


def _fits(values: tuple[int, ...]) -> bool:
    return min(values) >= -(2**63) and max(values) < 2**63


def is_key(key: Any) -> bool:
    """Plain values, and tuples of them, are equal to what is read back; a tensor would not be."""
    if type(key) is tuple:
        return all(map(is_key, key))
    return type(key) in _JSON or type(key) is float


def is_dense(shape: Iterable[int], stride: Iterable[int]) -> bool:
    """Whether the strides only reorder the dimensions, leaving no gap and no overlap."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def _sparse_parts(value: Tensor) -> dict[str, Any]:
    return {
        "indices": value._indices(),
        "values": value._values(),
        "size": list(value.shape),
        "coalesced": value.is_coalesced(),
    }


def local_shard(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """The size of this rank's shard of a DTensor, and where it begins in the whole."""
    purpose = "the shards of a DTensor in a checkpoint"
    require(dtensor, ["_utils"], purpose)
    require(dtensor._utils, ["compute_local_shape_and_global_offset"], purpose)
    size, at = dtensor._utils.compute_local_shape_and_global_offset(shape, mesh, placements)
    return list(size), list(at)


def _shard_of(value: DTensor) -> dict[str, Any]:
    _, offsets = local_shard(value.shape, value.device_mesh, value.placements)
    if unknown := [p for p in value.placements if type(p) not in (Shard, Replicate)]:
        raise ValueError(f"a tensor that is placed as {unknown[0]} can't be saved in shards")
    return {
        "local": value.to_local(),
        "offsets": offsets,
        "global_shape": list(value.shape),
        "placements": [p.dim if isinstance(p, Shard) else None for p in value.placements],
    }
