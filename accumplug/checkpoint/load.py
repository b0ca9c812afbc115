"""The newest whole checkpoint, read into memory and then put into the objects of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accumplug.checkpoint import dtensor_shards
from accumplug.checkpoint.coordination import RankStore
from accumplug.errors import CheckpointError
from accumplug.parallel.group import DataParallelGroup
from accumplug.storage.layout import Checkpoint, newest, open_checkpoint, read_part


@dataclass(frozen=True)
class Position:
    """Where a resumed run goes on."""

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


def find(directory: Path, ranks: DataParallelGroup, store: RankStore | None) -> Found:
    """Read the newest checkpoint that is whole for all ranks; rank 0 looks for it."""
    skip: dict[str, str] = {}
    passed: tuple[str, ...] = ()
    while True:
        name = ""
        if ranks.rank == 0:
            found = newest(directory, full=False, skip=skip)
            passed = found.passed
            name = "" if found.checkpoint is None else found.checkpoint.path.name
        if store is not None:
            name = store.share(name)
        reasons = tuple(dict.fromkeys((*skip.values(), *passed)))
        if not name:
            return Found(None, {}, reasons)
        wrong, parts = "", {}
        try:
            checkpoint = open_checkpoint(directory / name)
            parts = read(checkpoint, ranks)
        except CheckpointError as error:
            wrong = str(error)
        if ranks.sum([float(bool(wrong))])[0] == 0:
            return Found(checkpoint, parts, reasons)
        skip[name] = wrong or f"{directory / name}: damaged in a file that another rank needs"


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
    for name in ("model", "optimizer"):
        parts[name] = dtensor_shards.read(checkpoint, name, ranks)
    if f"objects-{ranks.rank % world}" in checkpoint.parts:
        parts["objects"] = dtensor_shards.read(checkpoint, "objects", ranks)
    return parts
