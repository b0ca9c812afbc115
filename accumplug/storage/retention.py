"""Removes old checkpoints, and what dead writers left: only names that this package gives."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from accumplug.errors import CheckpointError
from accumplug.storage.files import UNSUPPORTED
from accumplug.storage.layout import faults, list_checkpoints, open_checkpoint
from accumplug.storage.manifest import MANIFEST, order_of

WRITING = ".accumplug-writing-"
REMOVING = ".accumplug-removing-"


def remove_older(
    directory: Path, newest: Path, keep: int, token: str, keep_every: int | None = None
) -> None:
    """Keeps `newest` and the whole ones before it, `keep` in all. Later ones are left alone.

    `keep_every`: of each run of so many updates, the first checkpoint stays as well.

    OSError names one that could not be removed; the others are removed all the same.
    """
    order = order_of(newest.name) or (0, 0, 0)
    kept, failure = 0, None
    lasting = _firsts(directory, keep_every)
    for path in reversed(list_checkpoints(directory)):
        if (order_of(path.name) or order) > order:
            continue
        if kept >= keep:
            if path.name in lasting:
                continue
            try:
                _remove(path, directory / f"{REMOVING}{token}-{path.name}")
            except OSError as error:
                failure = error
        elif path == newest or _looks_whole(path):
            kept += 1
    if failure is not None:
        raise failure


def _firsts(directory: Path, keep_every: int | None) -> set[str]:
    """The first whole checkpoint from update `keep_every` on, from twice that on, and so on."""
    firsts: dict[int, str] = {}
    for path in list_checkpoints(directory) if keep_every else []:
        number = (order_of(path.name) or (0,))[0] // (keep_every or 1)
        if number and number not in firsts and _looks_whole(path):
            firsts[number] = path.name
    return set(firsts.values())


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
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        (path / MANIFEST).unlink(missing_ok=True)  # without it, it is not read
        trash = path
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
