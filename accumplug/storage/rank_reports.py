"""Reports of the ranks to rank 0 on the files that they have written.

They are small files, since a background thread must not take part in collectives: those of the
loop would get mixed up with its own. All ranks see the directory anyway.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from accumplug.errors import CheckpointError, OverwrittenError
from accumplug.storage.files import UNSUPPORTED, FileEntry, fsync_directory
from accumplug.storage.json import dump_json, parse_json

GRACE = 30.0  # seconds that rank 0 waits for the others when its own program has ended


def report_files(work: Path, rank: int, update: int, files: dict[str, FileEntry]) -> None:
    """Reports that this rank's files, of that update, are on disk, with sizes and checksums."""
    fsync_directory(work)
    entries = {name: entry.as_json() for name, entry in files.items()}
    _put(work, rank, {"update": update, "files": entries})


def report_failure(work: Path, rank: int, error: BaseException) -> None:
    """Reports that this rank could not write its files, if the disk still takes the report."""
    try:
        overwritten = isinstance(error, OverwrittenError)
        _put(work, rank, {"error": f"{error}", "overwritten": overwritten})
    except OSError:
        pass  # rank 0 stops waiting after its timeout


def _put(work: Path, rank: int, report: Any) -> None:
    path = _path_of(work, rank)
    path.with_suffix(".new").write_bytes(dump_json(report))
    try:
        path.with_suffix(".new").replace(path)  # rank 0 sees it whole or not at all
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        path.write_bytes(dump_json(report))


def _path_of(work: Path, rank: int) -> Path:
    return work / f".rank-{rank:06d}"


def _get(path: Path) -> Any:
    """The report at `path`; None if there is none, or half of one where it can't be renamed."""
    if not path.exists():
        return None
    try:
        return parse_json(path.read_bytes(), path)
    except CheckpointError:
        return None


def collect_reports(
    work: Path, world_size: int, timeout: float, update: int
) -> list[dict[str, FileEntry]]:
    """The reports of ranks 1 to `world_size - 1`, waiting up to `timeout` seconds for them.

    RuntimeError names the ranks that failed or did not report, or saved at another `update`.
    """
    missing = list(range(1, world_size))
    reports = []
    deadline, is_ending = time.monotonic() + timeout, False
    while missing:
        if not is_ending and not threading.main_thread().is_alive():
            # The program has ended but for this thread: its launcher may have ended the others.
            is_ending, deadline = True, min(deadline, time.monotonic() + GRACE)
        path = _path_of(work, missing[0])
        if (report := _get(path)) is not None:
            if "error" in report:
                kind = OverwrittenError if report["overwritten"] else RuntimeError
                raise kind(f"rank {missing[0]} could not write its part: {report['error']}")
            if report["update"] != update:
                raise RuntimeError(
                    f"rank 0 saved after update {update} and rank {missing[0]} after update "
                    f"{report['update']}; all ranks have to save at the same one"
                )
            reports.append({name: FileEntry(**item) for name, item in report["files"].items()})
            path.unlink()
            del missing[0]
        elif time.monotonic() > deadline:
            raise RuntimeError(
                f"ranks {missing} of {world_size} did not write their part within {timeout:g} s; "
                f"do all ranks see {work.parent}?"
            )
        else:
            time.sleep(0.01)
    return reports
