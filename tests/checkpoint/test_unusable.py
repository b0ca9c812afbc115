"""Checkpoints that are there and can't be used: an error, and never a silent fresh start."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accumplug import Accumulator, Checkpointer
from accumplug.checkpoint import load
from accumplug.errors import CheckpointError, DamagedCheckpointError
from accumplug.storage.files import checksum
from accumplug.storage.json import dump_json
from accumplug.storage.layout import list_checkpoints


class Run:
    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.accum = Accumulator(2, optimizer=torch.optim.SGD(self.model.parameters(), 0.1))
        self.checkpoint = Checkpointer(directory, self.accum, model=self.model, keep=9)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: Any) -> None:
        self.checkpoint.close()

    def train(self, saves: int) -> None:
        for _ in range(saves):
            for _ in range(2):
                with self.accum(self.model):
                    self.accum.backward(self.model(torch.ones(1, 3)).sum())
            self.checkpoint.save()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with two checkpoints."""
    with Run(tmp_path) as run:
        run.train(2)
    return tmp_path


def newer_format(path: Path) -> None:
    body = json.loads((path / "manifest.json").read_text())
    del body["crc32"]
    body["format"] = 99
    data = dump_json(body | {"crc32": f"{zlib.crc32(dump_json(body)):08x}"}, indent=1)
    (path / "manifest.json").write_bytes(data)


def damage(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").unlink()  # it may be linked
    (path / "model.safetensors").write_bytes(data)


def refuse_files(monkeypatch: pytest.MonkeyPatch, number: int, name: str) -> None:
    """Opening a file of that name fails with that error."""
    real = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if Path(path).name == name:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)


def assert_refused(directory: Path, message: str, kind: type = CheckpointError) -> None:
    with Run(directory) as run:
        before = run.model.weight.detach().clone()
        with pytest.raises(CheckpointError, match=message) as caught:
            run.checkpoint.resume()
        assert "resume(start_over=True)" in str(caught.value)
        assert torch.equal(run.model.weight, before)
        assert run.accum.updates == 0


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "progress.json"])
def test_a_newest_checkpoint_that_can_not_be_read_is_an_error_though_an_older_is_whole(
    saved: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    """A permission, a bad disk, too many open files, no memory: it may be readable tomorrow."""
    refuse_files(monkeypatch, number, name)
    assert_refused(saved, rf"{name}: cannot be read \({os.strerror(number)}\)")


def test_no_memory_for_the_tensors_is_no_proof_of_damage(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(load, "read_part", fail)
    assert_refused(saved, "MemoryError")


def test_a_newer_format_is_an_error_though_an_older_checkpoint_is_whole(saved: Path) -> None:
    """Going on from the older one would throw away what the newer version has trained."""
    newer_format(list_checkpoints(saved)[-1])
    assert_refused(saved, "format 99 of accumplug .*install a newer one")


def test_damage_is_passed_over_and_if_all_are_damaged_that_is_an_error(saved: Path) -> None:
    """Each of them is named with its file."""
    older, newer = list_checkpoints(saved)
    damage(newer)
    with Run(saved) as run, pytest.warns(UserWarning, match=r"passed over: .*model\.safetensors"):
        position = run.checkpoint.resume()
    assert position is not None
    assert position.path == older
    damage(older)
    assert_refused(saved, rf"none is whole: .*{newer.name}.*damaged.*{older.name}.*damaged")


@pytest.mark.parametrize("change", [newer_format, damage])
def test_a_fresh_start_beside_them_is_asked_for_and_is_then_gone_on_from(
    saved: Path, change: Callable[[Path], None]
) -> None:
    """They stay where they are; a later resume takes the new run, whose numbers are lower."""
    before = list_checkpoints(saved)
    for path in before:
        change(path)
    with Run(saved) as run:
        assert run.checkpoint.resume(start_over=True) is None
        assert run.accum.updates == 0
        run.train(1)
    assert set(before) < set(list_checkpoints(saved))
    with Run(saved) as run:
        position = run.checkpoint.resume()
        assert position is not None
        assert (position.update, run.accum.updates) == (1, 1)
        assert position.path not in before


def test_a_fresh_start_in_an_empty_directory_needs_no_asking(tmp_path: Path) -> None:
    for options in ({}, {"start_over": True}):
        with Run(tmp_path / "new") as run:
            assert run.checkpoint.resume(**options) is None  # type: ignore[arg-type]


def test_a_directory_that_can_not_be_listed_is_an_error(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    assert_refused(saved, "cannot be read")


def test_what_is_proven_is_known_by_its_type(saved: Path) -> None:
    """A program that looks by itself can tell one from the other."""
    path = list_checkpoints(saved)[-1]
    damage(path)
    with pytest.raises(DamagedCheckpointError, match="checksum differs"):
        load.read_part(load.open_checkpoint(path), "model")
    newer_format(path)
    with pytest.raises(CheckpointError) as caught:
        load.open_checkpoint(path)
    assert not isinstance(caught.value, DamagedCheckpointError)


def replace_order(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the position in the data in rank 0's part, with right sizes and checksums."""
    part = path / "rank-0.json"
    tree = json.loads(part.read_text())
    changed = change(tree)
    data = dump_json(changed)
    part.write_bytes(data)
    body = json.loads((path / "manifest.json").read_text())
    del body["crc32"]
    body["files"]["rank-0.json"] = {"size": len(data), "sums": checksum(memoryview(data))}
    manifest = dump_json(body | {"crc32": f"{zlib.crc32(dump_json(body)):08x}"}, indent=1)
    (path / "manifest.json").write_bytes(manifest)


@pytest.mark.parametrize("old", ['"ended": false', '"made": 0', '"starts": {}'])
def test_a_well_formed_but_absurd_position_is_an_error_at_the_resume(saved: Path, old: str) -> None:
    """Not an AttributeError in the middle of the first pass."""
    path = list_checkpoints(saved)[-1]
    text = (path / "rank-0.json").read_text()
    assert old in text
    replace_order(path, lambda tree: json.loads(text.replace(old, old.split(":")[0] + ': "x"')))
    with Run(saved) as run, pytest.raises(CheckpointError, match="not what these objects have"):
        run.checkpoint.resume()
