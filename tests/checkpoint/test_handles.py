"""Saves that the loop does not wait for, and saves by updates."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accumplug import Accumulator, Checkpointer
from accumplug.storage.layout import list_checkpoints, open_checkpoint


def build(directory: Path, **options: Any) -> tuple[nn.Module, Accumulator, Checkpointer]:
    model = nn.Linear(2, 1)
    accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    return model, accum, Checkpointer(directory, accum, model=model, **options)


def block(model: nn.Module, accum: Accumulator) -> None:
    with accum(model):
        accum.backward(model(torch.ones(1, 2)).sum())


class Gate:
    """A disk that answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opens, self.error = threading.Event(), None
        self.fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, file: int) -> None:
        assert self.opens.wait(30)
        if self.error is not None:
            raise self.error
        self.fsync(file)


def test_a_handle_tells_when_the_save_is_done_and_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes on meanwhile, and the next save waits for it."""
    model, accum, checkpoint = build(tmp_path)
    gate = Gate(monkeypatch)
    block(model, accum)
    first = checkpoint.save(wait=False)
    assert not first.done()
    block(model, accum)
    gate.opens.set()
    second = checkpoint.save(wait=False)
    assert first.done()
    assert [first.result(), second.result()] == list_checkpoints(tmp_path)
    assert second.done()
    assert checkpoint.save() == list_checkpoints(tmp_path)[-1]
    checkpoint.close()


def test_a_failure_is_raised_by_the_handle_and_by_nobody_else_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each time that it is asked."""
    model, accum, checkpoint = build(tmp_path)
    gate = Gate(monkeypatch)
    gate.error = OSError(28, "No space left on device")  # type: ignore[assignment]
    gate.opens.set()
    block(model, accum)
    handle = checkpoint.save(wait=False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="No space left on device"):
            handle.result()
    assert handle.done()
    gate.error = None
    block(model, accum)
    assert checkpoint.save(wait=False).result() == list_checkpoints(tmp_path)[-1]
    checkpoint.close()


SCRIPT = """
import sys, torch
from torch import nn
from accumplug import Accumulator, Checkpointer

model = nn.Linear(2, 1)
accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), 0.1))
checkpoint = Checkpointer(sys.argv[1], accum, model=model)
with accum(model):
    accum.backward(model(torch.ones(1, 2)).sum())
checkpoint.save(wait=False)
"""


def test_the_end_of_the_process_finishes_the_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, timeout=120)
    assert len(list_checkpoints(tmp_path)) == 1


@pytest.mark.parametrize("steps_itself", [False, True])
def test_saves_by_updates_are_at_a_windows_start(tmp_path: Path, steps_itself: bool) -> None:
    """After each second update, whatever the number of micro-batches; once each, resumes too."""

    def run(until: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        accum = Accumulator(3, **({} if steps_itself else {"optimizer": optimizer}))
        more: dict[str, Any] = {"optimizer": optimizer} if steps_itself else {}
        options = {"model": model, "every_updates": 2, "keep": 99}
        with Checkpointer(tmp_path, accum, **options, **more) as checkpoint:
            checkpoint.resume()
            while accum.micro_batches < until:
                block(model, accum)
                if steps_itself and accum.pending == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if steps_itself:
                block(model, accum)  # the step behind the last block is seen at the next one

    run(14)
    run(21)
    positions = [open_checkpoint(p).manifest.position for p in list_checkpoints(tmp_path)]
    assert [(p["update"], p["pending"]) for p in positions] == [(2, 0), (4, 0), (6, 0)]


def test_the_first_checkpoint_of_each_so_many_updates_stays(tmp_path: Path) -> None:
    """Whole ones, after a resume as before it; the newest two as always."""
    for until in (9, 23):
        model, accum, checkpoint = build(tmp_path, every=3, keep=2, keep_every=3)
        checkpoint.resume()
        while accum.micro_batches < until:
            block(model, accum)
        checkpoint.close()
    positions = [open_checkpoint(p).manifest.position for p in list_checkpoints(tmp_path)]
    # saves after micro-batches 3, 6, ...: updates 1, 3, 4, 6, 7, 9, 10
    assert [p["micro_batch"] for p in positions] == [6, 12, 18, 21]
    assert [p["update"] for p in positions] == [3, 6, 9, 10]
