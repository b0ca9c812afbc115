"""A checkpoint written so that it is there whole or not at all.

Everything goes into a directory beside the others whose name no reader takes for a checkpoint;
each file is fsynced, the manifest comes last, the directory is fsynced and renamed, and so is
the change in the directory above. A process that dies at any point leaves the older checkpoints
as they were, and a directory that the next writer removes. An old one goes only after that, by
a rename first, so that it is never half there under its name.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accumplug.errors import CheckpointError
from accumplug.storage.codec import Encoded
from accumplug.storage.files import FileEntry, check_size, fsync_directory, opened, write_file
from accumplug.storage.json import MAX_JSON, dump_json
from accumplug.storage.layout import Checkpoint, list_checkpoints, open_checkpoint
from accumplug.storage.manifest import MANIFEST, PART, Manifest, check_position, name_of
from accumplug.storage.rank_reports import collect, hand_in, hand_in_failure
from accumplug.storage.retention import WRITING, remove_older
from accumplug.storage.safetensors_io import write_tensors

TOKEN = re.compile(r"[A-Za-z0-9]{1,64}", re.ASCII)


@dataclass(frozen=True)
class Job:
    """One checkpoint, as one rank sees it.

    `position` names it (see `name_of`) and is kept in the manifest. `parts` are written by this
    rank; no two ranks may use one name. `link` names parts that have not changed since the whole
    checkpoint `link_from`; rank 0 takes them from there, whichever rank wrote them. `again` are
    parts of this rank that are as they were in its job before: they are linked, or written if
    that has become no checkpoint (which only rank 0 knows for sure).
    """

    position: Mapping[str, Any]
    parts: Mapping[str, Encoded]
    link: tuple[str, ...] = ()
    link_from: Path | None = None
    again: Mapping[str, Encoded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_position(dict(self.position))
        dump_json(dict(self.position))
        for name in (*self.parts, *self.link, *self.again):
            if not PART.fullmatch(name) or name.casefold() == "manifest":
                raise ValueError(f"{name!r} can't name a part: letters, digits, - and _ only")
        if both := set(self.parts) & set(self.link):
            raise ValueError(f"{', '.join(map(repr, sorted(both)))} is to be written and linked")
        if self.link and self.link_from is None:
            raise ValueError(f"link={self.link} needs link_from, the checkpoint that has them")


@dataclass(frozen=True)
class Place:
    """Where a writer works, and among whom. `token` is one that no other run has used here.

    Rank 0 waits `patience` seconds for the files of the other ranks.
    """

    directory: Path
    token: str
    rank: int = 0
    world_size: int = 1
    keep: int = 2
    patience: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} ranks")
        if self.keep < 1:
            raise ValueError(f"keep={self.keep}: the newest is always kept, so give 1 or more")
        if not TOKEN.fullmatch(self.token):
            raise ValueError(f"token {self.token!r}: give 1 to 64 letters and digits")


def write(
    place: Place, job: Job, number: int, written: dict[str, FileEntry] | None = None
) -> Path | None:
    """Writes this rank's share of save `number`; rank 0 then makes the whole a checkpoint.

    Rank 0 returns where it is once it is whole; the others None once their files are on disk.
    `written`: what this rank has written in its jobs before, by name; it is brought up to date.
    """
    written = {} if written is None else written
    work = _work(place, number)
    _make(place.directory)
    work.mkdir(exist_ok=place.world_size > 1)
    try:
        mine = _write_parts(work, job.parts)
        if job.again:
            _await_end(_work(place, number - 1))
            mine |= _write_again(place, work, job, written)
        written |= mine
        if place.rank:
            hand_in(work, place.rank, mine)
            return None
        shares = [mine, *collect(work, place.world_size, place.patience), _link(work, job)]
        target = _commit(place, job, work, shares)
    except BaseException as error:
        if place.rank:
            hand_in_failure(work, place.rank, error)
        else:
            shutil.rmtree(work, ignore_errors=True)
        raise
    remove_older(place.directory, target, place.keep, place.token)
    return target


def _work(place: Place, number: int) -> Path:
    return place.directory / f"{WRITING}{place.token}-{number:06d}"


def _await_end(work: Path) -> None:
    """Wait until rank 0 has made a save a checkpoint, or given it up; not for ever."""
    deadline = time.monotonic() + 60.0
    while work.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _make(directory: Path) -> None:
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in new:
        fsync_directory(path.parent)


def _write_parts(work: Path, parts: Mapping[str, Encoded]) -> dict[str, FileEntry]:
    files = {}
    for name, (tree, tensors) in parts.items():
        data = dump_json(tree)
        if len(data) > MAX_JSON:
            raise ValueError(f"{name} is {len(data)} bytes of JSON: put what is long in tensors")
        files[f"{name}.json"] = write_file(work / f"{name}.json", [memoryview(data)])
        if tensors:
            file = f"{name}.safetensors"
            files[file] = write_tensors(work / file, tensors)
    return files


def _write_again(
    place: Place, work: Path, job: Job, written: Mapping[str, FileEntry]
) -> dict[str, FileEntry]:
    """Takes unchanged parts of this rank from the newest checkpoint that has the same files."""
    sources = []
    for path in reversed(list_checkpoints(place.directory)):
        try:
            sources.append(open_checkpoint(path))
        except CheckpointError:
            continue
    files: dict[str, FileEntry] = {}
    for part, encoded in job.again.items():
        same = {n: written[n] for n in (f"{part}.json", f"{part}.safetensors") if n in written}
        files |= _find_and_link(sources, work, same) or _write_parts(work, {part: encoded})
    return files


def _find_and_link(
    sources: Iterable[Checkpoint], work: Path, files: Mapping[str, FileEntry]
) -> dict[str, FileEntry]:
    """Takes `files` from the first that has all of them, with these checksums; else nothing."""
    for source in sources:
        if not files or any(source.manifest.files.get(n) != entry for n, entry in files.items()):
            continue
        try:
            for name, entry in files.items():
                _link_or_copy(source.path / name, work / name, entry)
            return dict(files)
        except (OSError, CheckpointError):  # rank 0 has just removed it
            for name in files:
                (work / name).unlink(missing_ok=True)
    return {}


def _link(work: Path, job: Job) -> dict[str, FileEntry]:
    """Takes the files of unchanged parts, with the checksums that they have there."""
    if job.link_from is None or not job.link:
        return {}
    source = open_checkpoint(job.link_from)
    files = {}
    for part in job.link:
        if part not in source.parts:
            raise CheckpointError(f"{source.path}: has no part {part!r} to link")
        for name in (f"{part}.json", f"{part}.safetensors"):
            if name in source.manifest.files:
                files[name] = source.manifest.files[name]
                _link_or_copy(source.path / name, work / name, files[name])
    return files


def _link_or_copy(source: Path, target: Path, entry: FileEntry) -> None:
    with opened(source) as file:
        check_size(source, file, entry)
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links, or two file systems
        shutil.copyfile(source, target)
        with open(target, "rb+") as copy:
            os.fsync(copy.fileno())


def _commit(place: Place, job: Job, work: Path, shares: Iterable[Mapping[str, FileEntry]]) -> Path:
    files: dict[str, FileEntry] = {}
    for share in shares:
        if twice := files.keys() & share.keys():
            raise ValueError(f"{', '.join(sorted(twice))}: given by two ranks, or also linked")
        files |= share
    manifest = Manifest(dict(job.position), place.world_size, files)
    write_file(work / MANIFEST, [memoryview(manifest.dump())])
    fsync_directory(work)
    target = _free(place.directory, job)
    work.rename(target)
    fsync_directory(place.directory)
    return target


def _free(directory: Path, job: Job) -> Path:
    """A name not in use: another checkpoint of the same position is never overwritten."""
    attempt = 0
    while True:
        name = name_of(job.position["update"], job.position["micro_batch"], attempt)
        if not os.path.lexists(directory / name):
            return directory / name
        attempt += 1
