"""How ranks tell rank 0 what they have written: by small files, so that no collective is needed.

A background thread must not take part in collectives (the loop's own would get mixed up with
it), and all ranks see the directory anyway.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accumplug.storage.files import FileEntry, fsync_directory
from accumplug.storage.json import dump_json, parse_json


def hand_in(work: Path, rank: int, files: dict[str, FileEntry]) -> None:
    """Says that this rank's files are on disk, and what they are."""
    fsync_directory(work)
    _put(work, rank, {"files": {name: asdict(entry) for name, entry in files.items()}})


def hand_in_failure(work: Path, rank: int, error: BaseException) -> None:
    """Says that this rank will not deliver, if the disk still takes that."""
    try:
        _put(work, rank, {"error": f"{error}"})
    except OSError:
        pass  # rank 0 will lose patience instead


def _put(work: Path, rank: int, entry: Any) -> None:
    path = _entry_of(work, rank)
    path.with_suffix(".new").write_bytes(dump_json(entry))
    path.with_suffix(".new").replace(path)  # rank 0 sees it whole or not at all


def _entry_of(work: Path, rank: int) -> Path:
    return work / f".rank-{rank:06d}"


def collect(work: Path, world_size: int, patience: float) -> list[dict[str, FileEntry]]:
    """What ranks 1 to `world_size - 1` have written, waiting up to `patience` seconds for them.

    RuntimeError names the ranks that failed or were not heard of.
    """
    missing = list(range(1, world_size))
    shares = []
    deadline = time.monotonic() + patience
    while missing:
        path = _entry_of(work, missing[0])
        if path.exists():
            entry = parse_json(path.read_bytes(), path)
            if "error" in entry:
                raise RuntimeError(f"rank {missing[0]} could not write its part: {entry['error']}")
            shares.append({name: FileEntry(**item) for name, item in entry["files"].items()})
            path.unlink()
            del missing[0]
        elif time.monotonic() > deadline:
            raise RuntimeError(
                f"ranks {missing} of {world_size} did not write their part within {patience:g} s; "
                f"do all ranks see {work.parent}?"
            )
        else:
            time.sleep(0.01)
    return shares
