"""Writes the weights of a checkpoint as model.safetensors, which other libraries load.

Above `SHARD` bytes they are split over several files with an index, as transformers does it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accumplug.checkpoint.division import BASE, JoinedParts, keys_of
from accumplug.errors import CheckpointError
from accumplug.storage.codec import TensorShard
from accumplug.storage.json import dump_json
from accumplug.storage.layout import Checkpoint, newest, open_checkpoint, read_part
from accumplug.storage.manifest import MANIFEST
from accumplug.storage.safetensors_io import NAMES, write_tensors

SHARD = 5_000_000_000
METADATA = {"format": "pt"}  # transformers refuses a file without it


def export(
    source: str | os.PathLike[str], target: str | os.PathLike[str], shard: int = SHARD
) -> list[Path]:
    """Write the weights of `source` into the directory `target`; return the files.

    `source` is a checkpoint, or a directory of which the newest whole one is taken. Buffers are
    those of the moment of the save. Each of several models gets a directory of its own, named by
    its number. Tensors that share memory are written under each of their names.

    Raises:
        CheckpointError: there is no whole checkpoint.
        ValueError: frozen weights were left out, files are there already, or a tensor has a dtype
            that safetensors lacks.
    """
    checkpoint = _open(Path(source))
    models, buffers = _weights(checkpoint), _buffers(checkpoint)
    written: list[Path] = []
    for index, model in enumerate(models):
        state = {name: value for name, value in model.items() if isinstance(value, Tensor)}
        own = buffers[index] if index < len(buffers) else {}
        state |= {name: own[name] for name in state.keys() & own.keys()}
        place = Path(target, f"{index}") if len(models) > 1 else Path(target)
        written += _write(state, place, shard)
    return written


def _open(path: Path) -> Checkpoint:
    if os.path.lexists(path / MANIFEST):
        return open_checkpoint(path)
    found = newest(path, full=False).checkpoint
    if found is None:
        raise CheckpointError(f"{path}: no whole checkpoint here")
    return found


def _weights(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The state_dict of each model, sharded tensors put together."""
    if left_out := [part for part in checkpoint.parts if part.partition("-")[0] == BASE]:
        base = keys_of(read_part(checkpoint, left_out[0]))
        names = [name for model in base for name in model]
        raise ValueError(
            f'{checkpoint.path} was saved with frozen="skip": {len(names)} weights '
            f"({', '.join(names[:2])}, ...) are in the model that it began with, and not here. "
            f'Resume it with frozen="link", save, and export that'
        )
    read = JoinedParts(checkpoint).read
    if "model" in checkpoint.parts:
        saved = [read("model", mapped=True)]
    else:
        ranks = range(checkpoint.manifest.world_size)
        saved = [read(f"model-{rank}", mapped=True) for rank in ranks]
    models = [state if isinstance(state, list) else [state] for state in saved]
    return [
        {name: _whole([each.get(name) for each in of_ranks]) for name in of_ranks[0]}
        for of_ranks in zip(*models, strict=True)
    ]


def _whole(values: list[Any]) -> Any:
    """A tensor that each rank has saved a part of; what is not sharded is that of the first."""
    shards = [value for value in values if isinstance(value, TensorShard)]
    if not shards:
        return values[0]
    shape = shards[0].global_shape
    whole = torch.empty(shape, dtype=shards[0].local.dtype, device="cpu")
    filled = torch.zeros(shape, dtype=torch.bool, device="cpu")
    for shard in shards:
        place = tuple(
            slice(start, start + size)
            for start, size in zip(shard.offsets, shard.local.shape, strict=True)
        )
        whole[place] = shard.local
        filled[place] = True
    if not filled.all():
        missing = math.prod(shape) - int(filled.sum())
        raise CheckpointError(f"{missing} values of a sharded tensor are in no rank's part")
    return whole


def _buffers(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The buffers of rank 0 for each model, which a window moves after its weights were saved."""
    state = read_part(checkpoint, "rank-0", mapped=True) if "rank-0" in checkpoint.parts else {}
    models = state.get("forward") or state.get("buffers") or []  # format 1: the buffers alone
    return [
        {name: value for name, value in each.get("buffers", each).items() if torch.is_tensor(value)}
        for each in models
    ]


def _write(state: Mapping[str, Tensor], target: Path, shard: int) -> list[Path]:
    for name, tensor in state.items():
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors has no name for")
    groups = list(_groups(state, shard))
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    target.mkdir(parents=True, exist_ok=True)
    if there := next((name for name in names if (target / name).exists()), None):
        raise ValueError(f"{target / there} is there already")
    for name, group in zip(names, groups, strict=True):
        write_tensors(target / name, group, METADATA)
    files = [target / name for name in names]
    if len(groups) > 1:
        weight_map = {key: n for n, group in zip(names, groups, strict=True) for key in group}
        size = sum(tensor.nbytes for tensor in state.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        files.append(target / "model.safetensors.index.json")
        files[-1].write_bytes(dump_json(index, indent=2))
    return files


def _groups(state: Mapping[str, Tensor], shard: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in their order, cut so that no group is above `shard` bytes but a single one."""
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in state.items():
        if group and size + tensor.nbytes > shard:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    yield group
