"""Storage without some calls: object stores that are mounted as directories, network disks."""

from __future__ import annotations

import errno
import os
import stat
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accumplug.errors import CheckpointError
from accumplug.storage import retention
from accumplug.storage.codec import encode
from accumplug.storage.commit import Job
from accumplug.storage.layout import list_checkpoints, newest, read_part, verify
from accumplug.storage.writer import Writer


def job(update: int, rank: int = 0, **linked: Any) -> Job:
    state = encode({"x": torch.full((300,), float(update))})
    parts = {f"rank-{rank}": state} | ({"model": state} if rank == 0 and not linked else {})
    return Job({"update": update, "micro_batch": update}, parts, **linked)


def refuse(code: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return call


def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))


def no_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "rename", refuse(errno.ENOSYS))
    monkeypatch.setattr(os, "replace", refuse(errno.ENOSYS))


def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def of_files(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            refuse(errno.EINVAL)()
        fsync(file)

    monkeypatch.setattr(os, "fsync", of_files)


def no_directories_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = os.open

    def of_files(path: Any, flags: int, *mode: int, **options: Any) -> int:
        if flags & os.O_DIRECTORY:
            refuse(errno.EISDIR)()
        return opens(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", of_files)


LIMITED = {
    "no hard links": no_links,
    "can't rename a directory": no_renames,
    "can't sync a directory": no_syncs,
    "can't sync a directory,": no_directories_to_open,
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("limit", LIMITED)
def test_checkpoints_are_whole_and_the_limit_is_said_once(
    limit: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with all of its files, the oldest removed, and nothing left beside them."""
    LIMITED[limit](monkeypatch)
    writers = [Writer(tmp_path, rank=r, world_size=ranks, token="t") for r in range(ranks)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for update in range(1, 5):
            last = writers[0].last
            linked = {"link": ("model",), "link_from": last} if update % 2 == 0 else {}
            for rank, writer in enumerate(writers):
                writer.submit(job(update, rank, **(linked if rank == 0 else {})))
            for writer in writers:
                writer.wait()
                writer.warn()
    assert [str(warning.message) for warning in told if limit in str(warning.message)]
    assert len(told) == 1
    assert os.listdir(tmp_path) == [path.name for path in list_checkpoints(tmp_path)]
    third, fourth = list_checkpoints(tmp_path)
    for path, model in ((third, 3), (fourth, 3)):
        checkpoint = verify(path)
        assert read_part(checkpoint, "model")["x"].eq(model).all()
    assert read_part(checkpoint, f"rank-{ranks - 1}")["x"].eq(4).all()


def test_a_crash_while_it_is_copied_to_its_name_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest comes last; without one it is passed over, and removed later."""
    no_renames(monkeypatch)
    writer = Writer(tmp_path, background=False, keep=1)
    writer.submit(job(1))
    writer.submit(job(2))
    crashed = tmp_path / "update-0000000001-micro-000000000001"
    crashed.mkdir()
    (crashed / "model.json").write_text("{}")
    later = tmp_path / "update-0000000003-micro-000000000003"
    later.mkdir()
    found = newest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.path == writer.last
    assert len(found.passed) == 1
    later.rmdir()
    writer.submit(job(4))
    assert list_checkpoints(tmp_path) == [writer.last]


def test_a_full_disk_while_it_is_copied_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_renames(monkeypatch)
    writer = Writer(tmp_path, background=False)
    writer.submit(job(1))
    monkeypatch.setattr("shutil.copyfile", refuse(errno.ENOSPC))
    with pytest.raises(RuntimeError, match="No space left"):
        writer.submit(job(2))
    assert list_checkpoints(tmp_path) == [writer.last]
    assert os.listdir(tmp_path) == [writer.last.name]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["rename", "list"])
def test_a_checkpoint_that_cannot_be_removed_is_no_failure_of_the_save(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is on disk; that the old one stays is said once, and the others go."""
    writer = Writer(tmp_path, background=False, keep=1)
    for update in (1, 2):
        writer.submit(job(update))
    stuck = writer.last
    assert stuck is not None
    rename = os.rename

    def unless_stuck(source: Any, target: Any) -> None:
        if Path(source) == stuck:
            refuse(errno.EACCES)()
        rename(source, target)

    def unlisted(directory: Any) -> Any:
        raise CheckpointError(f"{directory}: cannot be read")

    with monkeypatch.context() as context:
        if kind == "rename":
            context.setattr(os, "rename", unless_stuck)
        else:
            context.setattr(retention, "list_checkpoints", unlisted)
        for update in (3, 4):
            writer.submit(job(update))
        with pytest.warns(UserWarning, match="an old checkpoint could not be removed") as told:
            writer.warn()
        assert len(told) == 1
        writer.warn()
    assert writer.last is not None
    verify(writer.last)
    assert stuck in list_checkpoints(tmp_path)
    writer.submit(job(5))
    assert list_checkpoints(tmp_path) == [writer.last]


def test_a_disk_that_fails_to_sync_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a refusal to be asked is none."""
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(RuntimeError, match="Input/output error"):
        Writer(tmp_path, background=False).submit(job(1))
    assert list_checkpoints(tmp_path) == []


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("links", [True, False])
def test_what_another_process_wrote_is_checked_when_it_is_linked_and_else_written_anew(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a resume, once; what this process has written itself is not read again."""
    first = Writer(tmp_path, background=False)
    first.submit(job(1))
    source = verify(first.last or "")
    if not links:
        no_links(monkeypatch)
    damage(source.path / "model.safetensors")
    writer = Writer(tmp_path, background=False)
    writer.resume_from(source.path, source.manifest.files)
    state = encode({"x": torch.full((300,), 1.0)})
    for micro_batch in (2, 3):
        here = {"update": 1, "micro_batch": micro_batch}
        unchanged = {"model": state}
        writer.submit(Job(here, {"rank-0": state}, unchanged=unchanged))
        assert read_part(verify(writer.last or ""), "model")["x"].eq(1).all()
    assert (writer.last or Path()).joinpath("model.safetensors").stat().st_nlink == 1 + links


def test_a_damaged_file_is_not_copied_where_links_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_links(monkeypatch)
    writer = Writer(tmp_path, background=False)
    writer.submit(job(1))
    assert writer.last is not None
    damage(writer.last / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"model\.safetensors: damaged"):
        writer.submit(job(2, link=("model",), link_from=writer.last))


def test_a_report_that_is_half_there_is_waited_for(tmp_path: Path) -> None:
    """Where a report can't be renamed into place, rank 0 may see the first half of it."""
    zero = Writer(tmp_path, rank=0, world_size=2, token="t", timeout=30)
    one = Writer(tmp_path, rank=1, world_size=2, token="t", background=False)
    work = tmp_path / f"{retention.WRITING}t-000001"
    work.mkdir()
    (work / ".rank-000001").write_text('{"files": {"rank')
    zero.submit(job(1))
    threading.Timer(0.3, lambda: one.submit(job(1, rank=1))).start()
    assert zero.wait() == list_checkpoints(tmp_path)[0]
