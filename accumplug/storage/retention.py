"""Removes old checkpoints, and what dead writers left: only names that this package gives."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from accumplug.errors import CheckpointError
from accumplug.storage.layout import faults, list_checkpoints, open_checkpoint
from accumplug.storage.manifest import order_of

WRITING = ".accumplug-writing-"
REMOVING = ".accumplug-removing-"


def remove_older(directory: Path, newest: Path, keep: int, token: str) -> None:
    """Keeps `newest` and the whole ones before it, `keep` in all. Later ones are left alone."""
    order = order_of(newest.name) or (0, 0, 0)
    kept = 0
    for path in reversed(list_checkpoints(directory)):
        if (order_of(path.name) or order) > order:
            continue
        if kept >= keep:
            _remove(path, directory / f"{REMOVING}{token}-{path.name}")
        elif path == newest or _looks_whole(path):
            kept += 1


def _looks_whole(path: Path) -> bool:
    try:
        return not any(faults(open_checkpoint(path), full=False))
    except CheckpointError:
        return False


def _remove(path: Path, trash: Path) -> None:
    try:
        path.rename(trash)  # never half there under its own name
    except FileNotFoundError:
        return  # another process has removed it
    shutil.rmtree(trash, ignore_errors=True)


def remove_leftovers(directory: Path, token: str) -> None:
    """Removes the temporary directories of dead writers; one run writes here at a time."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    own = f"{WRITING}{token}-"
    for name in names:
        if name.startswith((WRITING, REMOVING)) and not name.startswith(own):
            shutil.rmtree(directory / name, ignore_errors=True)
