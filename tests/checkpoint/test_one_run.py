"""One run writes into a directory: a second one is refused while the first lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accumplug import Accumulator, Checkpointer
from accumplug.errors import LeaseHeldError
from accumplug.storage import lease
from accumplug.storage.inspect import inspect_command
from accumplug.storage.layout import list_checkpoints
from accumplug.storage.lease import LEASE, Lease


def build(directory: Path, **options: Any) -> tuple[nn.Module, Accumulator, Checkpointer]:
    model = nn.Linear(2, 1)
    accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    return model, accum, Checkpointer(directory, accum, model=model, **options)


def block(model: nn.Module, accum: Accumulator) -> None:
    with accum(model):
        accum.backward(model(torch.ones(1, 2)).sum())


OTHER = """
import sys, torch
from torch import nn
from accumplug import Accumulator, Checkpointer

model = nn.Linear(2, 1)
accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), 0.1))
checkpoint = Checkpointer(sys.argv[1], accum, model=model)
checkpoint.resume()
print(accum.updates, accum.pending, flush=True)
try:
    with accum(model):
        accum.backward(model(torch.ones(1, 2)).sum())
    checkpoint.save()
except RuntimeError as error:
    print(error, flush=True)
else:
    print("saved", flush=True)
if sys.argv[2:] == ["stay"]:
    sys.stdin.readline()
"""


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, str(directory), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_second_job_is_refused_before_it_removes_anything_and_may_read(tmp_path: Path) -> None:
    """A forgotten job would sweep and rotate the other's checkpoints away."""
    model, accum, checkpoint = build(tmp_path, keep=1)
    block(model, accum)
    saved = checkpoint.save()
    (tmp_path / ".accumplug-writing-other-000001").mkdir()
    text, _ = start(tmp_path).communicate(timeout=120)
    first, second = text.splitlines()
    assert first == "0 1"  # it has resumed
    assert f"another run that lives, process {os.getpid()} on" in second
    assert list_checkpoints(tmp_path) == [saved]
    assert (tmp_path / ".accumplug-writing-other-000001").exists()
    assert inspect_command(tmp_path)[1] == 0
    block(model, accum)
    checkpoint.save()
    checkpoint.close()
    assert not (tmp_path / LEASE).exists()
    assert start(tmp_path).communicate(timeout=120)[0].splitlines()[1] == "saved"


def test_the_lease_of_a_dead_process_on_this_host_is_taken_over_at_once(tmp_path: Path) -> None:
    """Killed, it could not give it back."""
    other = start(tmp_path, "stay")
    assert other.stdout is not None
    other.stdout.readline()
    assert other.stdout.readline() == "saved\n"
    with pytest.raises(LeaseHeldError, match=f"process {other.pid} on"):
        Lease(tmp_path, "x")
    other.kill()
    other.communicate()
    model, accum, checkpoint = build(tmp_path)
    assert checkpoint.resume() is not None
    block(model, accum)
    checkpoint.save()
    checkpoint.close()


def of_another_host(directory: Path, age: float) -> None:
    owner = {"token": "t", "host": "elsewhere boot", "pid": os.getpid(), "start": 1}
    (directory / LEASE).write_text(json.dumps(owner))
    os.utime(directory / LEASE, (time.time() - age,) * 2)


def test_a_lease_from_another_host_is_taken_over_after_the_stated_time(tmp_path: Path) -> None:
    """No process can be looked for there; its owner touches the file while it lives."""
    of_another_host(tmp_path, lease.EXPIRES - 30)
    with pytest.raises(LeaseHeldError, match="on 'elsewhere'.*expires after 120 s"):
        Lease(tmp_path, "x")
    of_another_host(tmp_path, lease.EXPIRES + 30)
    mine = Lease(tmp_path, "x")
    mine.check()
    assert os.listdir(tmp_path) == [LEASE]
    mine.release()
    assert os.listdir(tmp_path) == []


def test_a_lease_is_touched_while_the_loop_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "TOUCH", 0.02)
    mine = Lease(tmp_path, "x")
    os.utime(tmp_path / LEASE, (1.0, 1.0))
    deadline = time.monotonic() + 20
    while (tmp_path / LEASE).stat().st_mtime < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / LEASE).stat().st_mtime > 2
    mine.release()


def test_a_run_that_was_taken_for_dead_saves_no_more(tmp_path: Path) -> None:
    """A machine that slept for an hour: the directory is another run's now."""
    model, accum, checkpoint = build(tmp_path)
    block(model, accum)
    saved = checkpoint.save()
    of_another_host(tmp_path, 0)
    with pytest.raises(RuntimeError, match="this run has lost it to process"):
        checkpoint.save()
    assert list_checkpoints(tmp_path) == [saved]
    checkpoint.close()
    assert (tmp_path / LEASE).exists()  # not this run's to remove


def test_a_checkpointer_that_was_never_closed_is_closed_by_the_next_one(tmp_path: Path) -> None:
    """A notebook's cell is run again, with the same Accumulator or a new one."""
    model, accum, checkpoint = build(tmp_path)
    block(model, accum)
    checkpoint.save()
    with pytest.warns(UserWarning, match="has a Checkpointer in this process already"):
        again = Checkpointer(tmp_path, accum, model=model)
    with pytest.warns(UserWarning, match="which is closed now"):
        other, accum, third = build(tmp_path)
    assert third.resume() is not None
    block(other, accum)
    third.save()
    with pytest.raises(RuntimeError, match="save after close"):
        again.save()
    third.close()


def test_a_directory_that_can_only_be_read_can_be_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation elsewhere."""
    model, accum, checkpoint = build(tmp_path)
    block(model, accum)
    checkpoint.save()
    checkpoint.close()
    real = os.open

    def read_only(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system", str(path))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", read_only)
    model, accum, checkpoint = build(tmp_path)
    assert checkpoint.resume() is not None
    with pytest.raises(RuntimeError, match="Read-only file system"):
        block(model, accum)
    checkpoint.close()
