"""The newest whole checkpoint, read into memory by all ranks together."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accumplug.checkpoint import dtensor_shards
from accumplug.checkpoint.coordination import RankStore
from accumplug.checkpoint.division import BASE, STILL, JoinedParts, keys_of
from accumplug.errors import CheckpointError, DamagedCheckpointError
from accumplug.parallel.group import DataParallelGroup
from accumplug.storage.json import dump_json, parse_json
from accumplug.storage.layout import (
    Checkpoint,
    list_checkpoints,
    newest,
    open_checkpoint,
    read_part,
)


@dataclass(frozen=True)
class Position:
    """Where a resumed run continues."""

    update: int
    """Updates so far."""
    micro_batch: int
    """Micro-batches so far."""
    epoch: int
    """Finished passes through the data."""
    position: int
    """Items of this pass that were handed out."""
    pending: int
    """Micro-batches in the open window."""
    path: Path
    """The checkpoint."""
    passed: tuple[str, ...] = ()
    """Why each newer checkpoint was passed over."""


@dataclass(frozen=True)
class Found:
    """What one rank has read, and why each newer checkpoint was passed over."""

    checkpoint: Checkpoint | None
    parts: dict[str, Any]
    passed: tuple[str, ...]


def find(
    directory: Path, ranks: DataParallelGroup, store: RankStore | None, skip: Collection[str]
) -> Found:
    """Read the newest checkpoint that is whole for all ranks; rank 0 looks for it.

    `skip`: names of checkpoints that are not looked at.

    Raises:
        CheckpointError: on all ranks: one can't be read and is not proven to be damaged, or there
            are checkpoints and all of them are damaged.
    """
    wrong: dict[str, str] = {}
    while True:
        name, error = "", ""
        passed: tuple[str, ...] = ()
        if ranks.rank == 0:
            try:
                found = newest(directory, full=False, skip={*skip, *wrong})
                name = "" if found.checkpoint is None else found.checkpoint.path.name
                passed = found.passed
            except CheckpointError as failure:
                error = str(failure)
        if store is not None:
            name, error, passed = json.loads(store.share(json.dumps([name, error, passed])))
        if error:
            raise CheckpointError(f"{error}. {_ADVICE}")
        reasons = tuple(dict.fromkeys((*wrong.values(), *passed)))
        if not name and reasons:
            raise CheckpointError(
                f"there are checkpoints in {directory} and none is whole: {'; '.join(reasons)}. "
                f"{_ADVICE}"
            )
        if not name:
            return Found(None, {}, ())
        damaged, unreadable, parts = "", "", {}
        try:
            checkpoint = open_checkpoint(directory / name)
            parts = read(checkpoint, ranks)
        except DamagedCheckpointError as failure:
            damaged = str(failure)
        except (CheckpointError, OSError, MemoryError, RuntimeError) as failure:
            unreadable = str(failure) or type(failure).__name__
        sums = ranks.sum([float(bool(damaged)), float(bool(unreadable))])
        if sums[1]:
            reason = unreadable or f"{directory / name}: another rank can't read it, see there"
            raise CheckpointError(f"{reason}. {_ADVICE}")
        if not sums[0]:
            return Found(checkpoint, parts, reasons)
        wrong[name] = damaged or f"{directory / name}: damaged in a file that another rank needs"


_ADVICE = (
    "Nothing was loaded. To train from the start beside these checkpoints: resume(start_over=True)"
)


def read(checkpoint: Checkpoint, ranks: DataParallelGroup) -> dict[str, Any]:
    """The parts that this rank needs, every byte checked: of all ranks, if their number differs."""
    world = checkpoint.manifest.world_size
    needed = [ranks.rank] if world == ranks.size else range(world)
    own = ["progress", *(f"rank-{rank}" for rank in needed)]
    parts = {
        name: read_part(checkpoint, name, mapped=name.startswith("rank-"))
        for name in own
        if name in checkpoint.parts
    }
    joined = JoinedParts(checkpoint)
    for name in STILL:
        parts[name] = dtensor_shards.read(checkpoint, name, ranks, joined.read)
    parts["still"], parts[BASE] = joined.still, []
    own_base = BASE if BASE in checkpoint.parts else f"{BASE}-{ranks.rank % world}"
    if own_base in checkpoint.parts:
        base = read_part(checkpoint, own_base)
        parts[BASE] = base if isinstance(base, list) else [base]
        parts["still"][BASE] = keys_of(base)
    if f"objects-{ranks.rank % world}" in checkpoint.parts:
        parts["objects"] = dtensor_shards.read(checkpoint, "objects", ranks)
    return parts


LEFT_BEHIND = ".accumplug-left-behind.json"


def leave_behind(directory: Path) -> None:
    """Let no later resume look at the checkpoints that are in `directory` now."""
    if names := [path.name for path in list_checkpoints(directory)]:
        part = directory / f"{LEFT_BEHIND}.new"
        part.write_bytes(dump_json(names))
        part.replace(directory / LEFT_BEHIND)


def left_behind(directory: Path) -> list[str]:
    """The names that `leave_behind` has written."""
    path = directory / LEFT_BEHIND
    if not path.exists():
        return []
    names = parse_json(path.read_bytes(), path)
    return [str(name) for name in names] if isinstance(names, list) else []
