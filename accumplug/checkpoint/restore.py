"""The newest whole checkpoint, read into memory and then put into the objects of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import CheckpointError
from .format import Checkpoint, newest, read_part


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


def find(directory: str | os.PathLike[str], rank: int = 0) -> Found:
    """Read the newest checkpoint that is whole."""
    skip: dict[str, str] = {}
    while True:
        found = newest(directory, full=False, skip=skip)
        passed = tuple(dict.fromkeys((*skip.values(), *found.passed)))
        if found.checkpoint is None:
            return Found(None, {}, passed)
        try:
            return Found(found.checkpoint, read(found.checkpoint, rank), passed)
        except CheckpointError as error:
            skip[found.checkpoint.path.name] = str(error)


def read(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """The parts that `rank` needs, every byte checked."""
    own = f"rank-{rank}", f"objects-{rank}"
    names = ["model", "optimizer", "progress", *(name for name in own if name in checkpoint.parts)]
    return {name: read_part(checkpoint, name) for name in names}
