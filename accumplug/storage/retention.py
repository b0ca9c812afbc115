"""Which checkpoints stay, and what is swept up: only names that this package gives."""

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
    """Keeps `newest` and the whole ones before it, `keep` in all. What is later is left alone."""
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


def _remove(path: Path, grave: Path) -> None:
    try:
        path.rename(grave)  # never half there under its own name
    except FileNotFoundError:
        return  # somebody else has removed it
    shutil.rmtree(grave, ignore_errors=True)


def remove_leftovers(directory: Path, token: str) -> None:
    """Removes what writers of other runs left when they died; one run writes here at a time."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    own = f"{WRITING}{token}-"
    for name in names:
        if name.startswith((WRITING, REMOVING)) and not name.startswith(own):
            shutil.rmtree(directory / name, ignore_errors=True)
