"""Finds out which calls a file system has, as object stores and network disks lack some.

Each call is also replaced where it fails: a link by a copy, a rename by copies, the manifest last.
The probe is there so that this is known from the first save on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accumplug.storage.files import UNSUPPORTED, fsync_directory

LINKS = "it has no hard links, so each save writes all of the state, changed or not"
RENAMES = "it can't rename a directory, so each checkpoint is copied into place, its manifest last"
SYNCS = "it can't sync a directory, so the newest checkpoint may be lost in a power cut"


def missing_calls(room: Path) -> list[str]:
    """What the file system at the new directory `room` lacks, in words; `room` is removed."""
    missing = []
    try:
        (room / "a").mkdir(parents=True)
        (room / "file").touch()
        if not fsync_directory(room):
            missing.append(SYNCS)
        if not _works(lambda: os.link(room / "file", room / "link")):
            missing.append(LINKS)
        if not _works(lambda: (room / "a").rename(room / "b")):
            missing.append(RENAMES)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    return missing


def _works(call: Callable[[], Any]) -> bool:
    try:
        call()
    except OSError as error:
        return error.errno not in UNSUPPORTED
    return True
