"""Sharded tensors (DTensor) in a checkpoint: each rank writes its piece, and where that belongs.

A piece is a dict, so that the files need no word of their own for it: the tensor (`shard`), its
place in the whole (`at`), the shape of that (`of`), and which dimension each dimension of the
mesh splits (`dims`, None where it repeats). So another number of ranks can put them together.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from accumplug.errors import CheckpointError
from accumplug.parallel.fsdp import local
from accumplug.parallel.group import DataParallelGroup
from accumplug.storage.layout import Checkpoint, read_part

KEYS = {"shard", "at", "of", "dims"}


class Pieces(list[dict[str, Any]]):
    """The pieces of one tensor that some ranks have written."""


def is_piece(state: Any) -> bool:
    """Whether it is what `pack` puts in the place of a sharded tensor."""
    return isinstance(state, dict) and state.keys() == KEYS


def pack(state: Any) -> Any:
    """`state`, nested containers, with this rank's piece in the place of each sharded tensor."""
    if not isinstance(state, DTensor):
        return _walk(lambda item, _: pack(item), state)
    _, at = _own_part(state.shape, state.device_mesh, state.placements)
    return {
        "shard": local(state.detach()),
        "at": at,
        "of": list(state.shape),
        "dims": [_dim(placement) for placement in state.placements],
    }


def join(states: Sequence[Any]) -> Any:
    """What several ranks have given as `pack` gave it, with all pieces at each place.

    What is not sharded is that of the first.
    """
    first = states[0]
    if is_piece(first):
        return Pieces(states)
    return _walk(lambda _, key: join([state[key] for state in states]), first)


def unpack(state: Any, targets: Any) -> Any:
    """What `join` gave, sharded as the tensors are at the same places in `targets`.

    Where `targets` has a tensor in the place of a container, that is how all of it is sharded.

    Raises:
        ValueError: what was sharded is not here, or has another shape, or a piece is missing.
    """
    if isinstance(state, Pieces):
        return _unpacked(state, targets)
    return _walk(lambda item, key: unpack(item, _at(targets, key)), state)


def are_in(state: Any) -> bool:
    """Whether `state`, as `join` gave it, has pieces anywhere."""
    if isinstance(state, Pieces):
        return True
    found = []
    _walk(lambda item, _: found.append(are_in(item)), state)
    return any(found)


def read(checkpoint: Checkpoint, name: str, ranks: DataParallelGroup) -> Any:
    """The part `name` as this rank needs it: whole, its own, or with all pieces of all ranks."""
    if name in checkpoint.parts:
        return read_part(checkpoint, name, mapped=True)  # it is copied from at once
    saved = checkpoint.manifest.world_size
    own = read_part(checkpoint, f"{name}-{ranks.rank % saved}", mapped=name == "model")
    joined = join([own])
    if saved == ranks.size or not are_in(joined):
        return joined
    others = [f"{name}-{rank}" for rank in range(saved) if rank != ranks.rank % saved]
    try:
        return join([own, *(read_part(checkpoint, other, mapped=True) for other in others)])
    except (KeyError, IndexError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.path}: the ranks' {name} differ ({error!r})") from error


def deal(saved_ranks: Sequence[Any], own: Sequence[Any]) -> list[Any]:
    """The running sums that a rank goes on with where another number of ranks had `saved_ranks`.

    Shards are taken from all of them. Of those that each rank has of the whole model (while the
    reduction is deferred) this one was handed its `own`, or none: then they are zeros, since all
    ranks reduce the same ones.
    """
    whole = own or [{}] * len(saved_ranks[0])
    return [
        {
            name: grad if isinstance(grad, Pieces) else mine.get(name, torch.zeros_like(grad))
            for name, grad in each.items()
        }
        for each, mine in zip(join(saved_ranks), whole, strict=True)
    ]


def _unpacked(pieces: Pieces, target: Any) -> DTensor:
    of, dtype = pieces[0]["of"], pieces[0]["shard"].dtype
    if not isinstance(target, DTensor):
        raise ValueError(
            f"a tensor of shape {of} was sharded when it was saved and is not here; shard the "
            f"model as it was (fully_shard)"
        )
    mesh, placements = target.device_mesh, target.placements
    if list(target.shape) != of:  # what an optimizer keeps may have another shape
        placements = tuple(Replicate() if dim is None else Shard(dim) for dim in pieces[0]["dims"])
    shape, at = _own_part(of, mesh, placements)
    whole = torch.empty(of, dtype=dtype, device="meta")
    return DTensor.from_local(
        _assemble(pieces, shape, at).to(target.device),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _assemble(pieces: Pieces, shape: list[int], at: list[int]) -> Tensor:
    """The part of `shape` at `at`, from pieces of which some may be repeated."""
    if len(pieces) == 1 and (list(pieces[0]["shard"].shape), pieces[0]["at"]) == (shape, at):
        found: Tensor = pieces[0]["shard"]
        return found
    result = torch.empty(shape, dtype=pieces[0]["shard"].dtype)
    missing, seen = math.prod(shape), []
    for piece in pieces:
        shard, start = piece["shard"], piece["at"]
        lows = [max(a, s) for a, s in zip(at, start, strict=True)]
        highs = [
            min(a + n, s + m) for a, n, s, m in zip(at, shape, start, shard.shape, strict=True)
        ]
        sizes = [high - low for low, high in zip(lows, highs, strict=True)]
        if start in seen or any(size <= 0 for size in sizes):
            continue
        seen.append(start)
        _cut(result, lows, at, sizes).copy_(_cut(shard, lows, start, sizes))
        missing -= math.prod(sizes)
    if missing:
        raise ValueError(f"{missing} numbers of a tensor of shape {pieces[0]['of']} are missing")
    return result


def _cut(tensor: Tensor, lows: list[int], start: list[int], sizes: list[int]) -> Tensor:
    for dim, (low, first, size) in enumerate(zip(lows, start, sizes, strict=True)):
        tensor = tensor.narrow(dim, low - first, size)
    return tensor


def _own_part(shape: Any, mesh: Any, placements: Any) -> tuple[list[int], list[int]]:
    """Shape and place of this rank's part of a tensor of `shape`."""
    own, at = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return list(own), list(at)


def _dim(placement: Placement) -> int | None:
    if type(placement) is Shard:
        return placement.dim
    if type(placement) is Replicate:
        return None
    raise ValueError(f"a tensor that is placed as {placement} can't be saved in pieces")


def _walk(function: Callable[[Any, Any], Any], state: Any) -> Any:
    """A container like `state` of `function(item, key)`; what is no container as it is."""
    if type(state) in (dict, OrderedDict):
        result = type(state)((key, function(item, key)) for key, item in state.items())
        if metadata := getattr(state, "_metadata", None):
            result._metadata = metadata
        return result
    if type(state) in (list, tuple):
        return type(state)(function(item, index) for index, item in enumerate(state))
    return state


def _at(targets: Any, key: Any) -> Any:
    """What `targets` has for `key`: the tensor itself, if it is no container; None if nothing."""
    if isinstance(targets, dict):
        return targets.get(key)
    if isinstance(targets, (list, tuple)):
        return targets[key] if isinstance(key, int) and key < len(targets) else None
    return targets
