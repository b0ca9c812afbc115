"""Sharded tensors (DTensor) on a resume: the shards that the ranks have saved, put together anew.

Each rank saves its shard and its place in the whole (`TensorShard`). So any number of ranks, with
any placement, can build their own shards from those.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from accumplug.parallel.group import DataParallelGroup
from accumplug.storage import layout
from accumplug.storage.codec import TensorShard, local_shard
from accumplug.storage.layout import Checkpoint


def read(
    checkpoint: Checkpoint,
    name: str,
    ranks: DataParallelGroup,
    read_part: Callable[..., Any] | None = None,
) -> list[Any]:
    """The part `name` as this rank needs it, for `assemble`: whole, or in shards.

    Shards are those of this rank, or of all ranks if another number of ranks has saved them.
    `read_part` reads a part of this checkpoint, by its name.
    """
    read_part = read_part or partial(layout.read_part, checkpoint)
    if name in checkpoint.parts:
        return [read_part(name, mapped=True)]  # it is copied from at once
    saved = checkpoint.manifest.world_size
    first = ranks.rank % saved
    own = read_part(f"{name}-{first}", mapped=name == "model")
    if saved == ranks.size or not has_shards(own):
        return [own]
    others = (f"{name}-{rank}" for rank in range(saved) if rank != first)
    return [own, *(read_part(other, mapped=True) for other in others)]


def has_shards(state: Any) -> bool:
    """Whether a sharded tensor is anywhere in `state`."""
    if isinstance(state, dict):
        return any(map(has_shards, state.values()))
    return isinstance(state, TensorShard) or (
        isinstance(state, list | tuple) and any(map(has_shards, state))
    )


def assemble(states: Sequence[Any], targets: Any) -> Any:
    """One state from those of several ranks, sharded like the tensors in `targets`.

    What is not sharded is that of the first. Where `targets` has a tensor in the place of a
    container, it says how everything in there is sharded.

    Raises:
        ValueError: a tensor that was sharded is not sharded here, or a shard is missing.
    """
    first = states[0]
    if isinstance(first, TensorShard):
        return to_dtensor(states, targets)
    if isinstance(first, dict):
        items = {k: assemble([s[k] for s in states], _at(targets, k)) for k in first}
        if type(first) is not OrderedDict:
            return items
        result = OrderedDict(items)
        if metadata := getattr(first, "_metadata", None):
            result._metadata = metadata  # type: ignore[attr-defined]
        return result
    if type(first) in (list, tuple):
        return type(first)(
            assemble([s[i] for s in states], _at(targets, i)) for i in range(len(first))
        )
    return first


def _at(targets: Any, key: Any) -> Any:
    """What `targets` has for `key`: the tensor itself, if it is no container; None if nothing."""
    if isinstance(targets, dict):
        return targets.get(key)
    if isinstance(targets, list | tuple):
        return targets[key] if isinstance(key, int) and key < len(targets) else None
    return targets


def to_dtensor(shards: Sequence[TensorShard], target: Any) -> DTensor:
    """The tensor of these shards, sharded as `target` is.

    Raises:
        ValueError: `target` is no sharded tensor, or a shard is missing.
    """
    first = shards[0]
    if not isinstance(target, DTensor):
        raise ValueError(
            f"a tensor of shape {first.global_shape} was sharded when it was saved and is not "
            f"here; shard the model as it was (fully_shard)"
        )
    mesh, placements = target.device_mesh, target.placements
    if list(target.shape) != first.global_shape:  # an optimizer may keep another shape
        placements = tuple(Replicate() if dim is None else Shard(dim) for dim in first.placements)
    size, at = local_shard(torch.Size(first.global_shape), mesh, placements)
    whole = torch.empty(first.global_shape, device="meta")
    return DTensor.from_local(
        _cut_out(shards, size, at).to(target.device),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def redistribute_sums(saved: Sequence[Any], own: Sequence[Any]) -> list[Any]:
    """The running sums, by model and name, that a rank resumes where other ranks had `saved` ones.

    Shards are taken from all of them. Of the sums that each rank has of the whole model (while
    the reduction is deferred) this rank was given its `own`, or none: those are zeros then, since
    all ranks reduce the same ones.
    """
    result = []
    for index, sums in enumerate(saved[0]):
        mine = own[index] if own else {}
        result.append(
            {
                name: [each[index][name] for each in saved]
                if isinstance(grad, TensorShard)
                else mine.get(name, torch.zeros_like(grad))
                for name, grad in sums.items()
            }
        )
    return result


def _cut_out(shards: Sequence[TensorShard], shape: list[int], at: list[int]) -> Tensor:
    """The part of `shape` at `at`, from shards of which some may be repeated."""
    first = shards[0]
    if len(shards) == 1 and (list(first.local.shape), first.offsets) == (shape, at):
        return first.local
    result = torch.empty(shape, dtype=first.local.dtype, device=first.local.device)
    missing, seen = math.prod(shape), []
    for shard in shards:
        start, local = shard.offsets, shard.local
        lows = [max(a, s) for a, s in zip(at, start, strict=True)]
        highs = [
            min(a + n, s + m) for a, n, s, m in zip(at, shape, start, local.shape, strict=True)
        ]
        sizes = [high - low for low, high in zip(lows, highs, strict=True)]
        if start in seen or any(size <= 0 for size in sizes):
            continue
        seen.append(start)
        _narrow(result, lows, at, sizes).copy_(_narrow(local, lows, start, sizes))
        missing -= math.prod(sizes)
    if missing:
        raise ValueError(f"{missing} numbers of a tensor of shape {first.global_shape} are missing")
    return result


def _narrow(tensor: Tensor, lows: list[int], start: list[int], sizes: list[int]) -> Tensor:
    for dim, (low, first, size) in enumerate(zip(lows, start, sizes, strict=True)):
        tensor = tensor.narrow(dim, low - first, size)
    return tensor
