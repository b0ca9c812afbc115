"""Writes a checkpoint so that it is there whole or not at all.

All files are written into a temporary directory beside the checkpoints. Each file is fsynced, the
manifest comes last, the directory is fsynced and renamed, and the directory above is fsynced. A
process that dies at any point leaves the older checkpoints as they were, and a temporary directory
that the next writer removes. An old checkpoint is removed only after that, and renamed first, so
that it is never incomplete under its name. Where directories can't be renamed a checkpoint is
copied to its name, its manifest last: one without a manifest is not read.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accumplug.errors import CheckpointError, OverwrittenError
from accumplug.storage.codec import Encoded
from accumplug.storage.files import (
    UNSUPPORTED,
    FileEntry,
    check_size,
    fsync,
    fsync_directory,
    opened,
    verify_file,
    write_file,
)
from accumplug.storage.json import MAX_JSON, dump_json
from accumplug.storage.layout import Checkpoint, list_checkpoints, open_checkpoint
from accumplug.storage.live import LiveTensors
from accumplug.storage.manifest import MANIFEST, PART, Manifest, check_position, name_of
from accumplug.storage.rank_reports import collect_reports, report_failure, report_files
from accumplug.storage.retention import WRITING
from accumplug.storage.safetensors_io import write_tensors

TOKEN = re.compile(r"[A-Za-z0-9]{1,64}", re.ASCII)


@dataclass(frozen=True)
class Job:
    """One checkpoint, from the view of one rank.

    `position` names it (see `name_of`) and is kept in the manifest. `parts` are written by this
    rank; no two ranks may use one name. `link` names parts that have not changed since the whole
    checkpoint `link_from`; rank 0 links them, whichever rank wrote them. `unchanged` are parts of
    this rank that are the same as in its previous job: they are linked, or written if that did
    not become a checkpoint (which only rank 0 knows for sure). `live` are tensors of all these that
    are read from where they are.
    """

    position: Mapping[str, Any]
    parts: Mapping[str, Encoded]
    link: tuple[str, ...] = ()
    link_from: Path | None = None
    unchanged: Mapping[str, Encoded] = field(default_factory=dict)
    live: LiveTensors = field(default_factory=LiveTensors)

    def __post_init__(self) -> None:
        check_position(dict(self.position))
        dump_json(dict(self.position))
        for name in (*self.parts, *self.link, *self.unchanged):
            if not PART.fullmatch(name) or name.casefold() == "manifest":
                raise ValueError(f"{name!r} can't name a part: letters, digits, - and _ only")
        if both := set(self.parts) & set(self.link):
            raise ValueError(f"{', '.join(map(repr, sorted(both)))} is both written and linked")
        if self.link and self.link_from is None:
            raise ValueError(f"link={self.link} needs link_from, the checkpoint that has them")


@dataclass(frozen=True)
class Destination:
    """The directory of the checkpoints, and the ranks that write there.

    `token` tells the temporary directories of one run from those of another. Rank 0 waits up to
    `timeout` seconds for the files of the other ranks.
    """

    directory: Path
    token: str
    rank: int = 0
    world_size: int = 1
    keep: int = 2
    timeout: float = 600.0
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} ranks")
        if self.keep < 1:
            raise ValueError(f"keep={self.keep}: the newest is always kept, so give 1 or more")
        if not TOKEN.fullmatch(self.token):
            raise ValueError(f"token {self.token!r}: give 1 to 64 letters and digits")


def write(
    to: Destination,
    job: Job,
    number: int,
    written: dict[str, FileEntry] | None = None,
    unchecked: set[str] | None = None,
) -> Path | None:
    """Writes this rank's files of save `number`; rank 0 then makes a checkpoint of all files.

    Rank 0 returns the path of the whole checkpoint; the others None once their files are on disk.
    `written`: the files that this rank has written so far, by name; it is brought up to date.
    `unchecked`: those of them that are read and checked before they are linked, as another process
    has written them.
    """
    written = {} if written is None else written
    unchecked = set() if unchecked is None else unchecked
    work = _work(to, number)
    _make(to.directory)
    work.mkdir(exist_ok=to.world_size > 1)
    if to.rank == 0 and number > 1:  # a slow rank has begun one anew that was given up
        shutil.rmtree(_work(to, number - 1), ignore_errors=True)
    try:
        own = _write_parts(work, job.parts, job.live)
        if job.unchanged:
            _await_decision(_work(to, number - 1))
            own |= _link_or_write(to, work, job, written, unchecked)
        written |= own
        unchecked -= own.keys()
        if to.rank:
            report_files(work, to.rank, job.position["update"], own)
            return None
        others = collect_reports(work, to.world_size, to.timeout, job.position["update"])
        reports = [own, *others, _link(work, job)]
        target = _commit(to, job, work, reports)
    except BaseException as error:
        if to.rank and isinstance(error, OSError) and not work.exists():
            raise OverwrittenError("rank 0 has given this save up, and says why") from error
        if to.rank:
            report_failure(work, to.rank, error)
        else:
            shutil.rmtree(work, ignore_errors=True)
        raise
    return target


def _work(to: Destination, number: int) -> Path:
    return to.directory / f"{WRITING}{to.token}-{number:06d}"


def _await_decision(work: Path) -> None:
    """Waits until rank 0 has committed a save or has given it up, for a minute at most."""
    deadline = time.monotonic() + 60.0
    while work.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _make(directory: Path) -> None:
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in new:
        fsync_directory(path.parent)


def _write_parts(
    work: Path, parts: Mapping[str, Encoded], live: LiveTensors
) -> dict[str, FileEntry]:
    files = {}
    for name, (tree, tensors) in parts.items():
        data = dump_json(tree)
        if len(data) > MAX_JSON:
            raise ValueError(f"{name} is {len(data)} bytes of JSON: put what is long in tensors")
        files[f"{name}.json"] = write_file(work / f"{name}.json", [memoryview(data)])
        if tensors:
            file = f"{name}.safetensors"
            files[file] = write_tensors(work / file, tensors, sources=live.sources)
    return files


def _link_or_write(
    to: Destination,
    work: Path,
    job: Job,
    written: Mapping[str, FileEntry],
    unchecked: Collection[str],
) -> dict[str, FileEntry]:
    """Links unchanged parts of this rank from the newest checkpoint that has the same files."""
    sources = []
    for path in reversed(list_checkpoints(to.directory)):
        try:
            sources.append(open_checkpoint(path))
        except CheckpointError:
            continue
    files: dict[str, FileEntry] = {}
    for part, encoded in job.unchanged.items():
        same = {n: written[n] for n in (f"{part}.json", f"{part}.safetensors") if n in written}
        linked = _find_and_link(sources, work, same, unchecked)
        files |= linked or _write_parts(work, {part: encoded}, job.live)
    return files


def _find_and_link(
    sources: Iterable[Checkpoint],
    work: Path,
    files: Mapping[str, FileEntry],
    unchecked: Collection[str],
) -> dict[str, FileEntry]:
    """Links `files` from the first source that has all of them, with these checksums."""
    for source in sources:
        if not files or any(source.manifest.files.get(n) != entry for n, entry in files.items()):
            continue
        linked = {}
        try:
            for name, entry in files.items():
                linked[name] = _link_or_copy(source.path / name, work / name, entry)
                if name in unchecked:
                    verify_file(work / name, entry)
            return linked
        except (OSError, CheckpointError):  # damaged, or rank 0 has just removed it
            for name in files:
                (work / name).unlink(missing_ok=True)
    return {}


def _link(work: Path, job: Job) -> dict[str, FileEntry]:
    """Links the files of unchanged parts, with the checksums that the manifest has of them."""
    if job.link_from is None or not job.link:
        return {}
    source = open_checkpoint(job.link_from)
    files = {}
    for part in job.link:
        if part not in source.parts:
            raise CheckpointError(f"{source.path}: has no part {part!r} to link")
        for name in (f"{part}.json", f"{part}.safetensors"):
            if name in source.manifest.files:
                entry = source.manifest.files[name]
                files[name] = _link_or_copy(source.path / name, work / name, entry)
    return files


def _link_or_copy(source: Path, target: Path, entry: FileEntry) -> FileEntry:
    """What the manifest will know of `target`."""
    with opened(source) as file:
        check_size(source, file, entry)
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links, or two file systems
        _copy(source, target, entry)
        return replace(entry, linked=False)
    return replace(entry, linked=True)


def _copy(source: Path, target: Path, entry: FileEntry) -> None:
    shutil.copyfile(source, target)
    with open(target, "rb+") as copy:
        fsync(copy.fileno())
    verify_file(target, entry)


def _commit(
    to: Destination, job: Job, work: Path, reports: Iterable[Mapping[str, FileEntry]]
) -> Path:
    files: dict[str, FileEntry] = {}
    for report in reports:
        if twice := files.keys() & report.keys():
            raise ValueError(f"{', '.join(sorted(twice))}: given by two ranks, or also linked")
        files |= report
    manifest = Manifest(dict(job.position), to.world_size, files)
    write_file(work / MANIFEST, [memoryview(manifest.dump())])
    fsync_directory(work)
    target = _free(to.directory, job)
    try:
        work.rename(target)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        _copy_all(work, target, manifest)
    fsync_directory(to.directory)
    return target


def _copy_all(work: Path, target: Path, manifest: Manifest) -> None:
    """Copies a checkpoint to its name where it can't be renamed."""
    target.mkdir()
    try:
        for name, entry in manifest.files.items():
            _copy(work / name, target / name, entry)
        fsync_directory(target)
        write_file(target / MANIFEST, [memoryview(manifest.dump())])
        fsync_directory(target)
    except BaseException:
        (target / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)


def _free(directory: Path, job: Job) -> Path:
    """A name not in use: a checkpoint of the same position is never overwritten."""
    attempt = 0
    while True:
        name = name_of(job.position["update"], job.position["micro_batch"], attempt)
        if not os.path.lexists(directory / name):
            return directory / name
        attempt += 1
