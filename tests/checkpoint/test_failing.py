"""A disk that fails under a running loop: it is told at a block's start, and can go on."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from training import Run, Setup, difference

from accumplug.storage.commit import Job
from accumplug.storage.layout import faults, list_checkpoints, open_checkpoint
from accumplug.storage.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches")

MICRO_BATCHES = 16


class Full:
    """A disk that is full while micro-batches number `first` to `last` are saved, and takes
    `seconds` to say so."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, first: int, last: int, seconds: float = 0.0
    ) -> None:
        self.first, self.last, self.seconds = first, last, seconds
        self.now = 0
        self.fsync, self.write = os.fsync, Writer._write
        monkeypatch.setattr(os, "fsync", self._fsync)
        monkeypatch.setattr(Writer, "_write", lambda writer, job: self._write(writer, job))

    def _write(self, writer: Writer, job: Job) -> None:
        self.now = job.position["micro_batch"]
        self.write(writer, job)

    def _fsync(self, file: int) -> None:
        if self.first <= self.now <= self.last:
            time.sleep(self.seconds)
            raise OSError(errno.ENOSPC, "No space left on device")
        self.fsync(file)


class Persistent(Run):
    """A loop that notes what a block's start raises, and runs the micro-batch all the same."""

    def __init__(self, directory: Path, joins: bool = False, **options: Any) -> None:
        super().__init__(Setup())
        self.errors: list[tuple[int, str]] = []
        self.checkpoint = self.checkpoints(directory, every=1, **options)
        self.joins = joins

    def block(self, x: Tensor, y: Tensor) -> None:
        thread = self.checkpoint._writer._thread
        if self.joins and thread is not None:
            thread.join()
        try:
            super().block(x, y)
        except RuntimeError as error:
            self.errors.append((len(self.seen), str(error)))
            super().block(x, y)


@pytest.mark.parametrize("first", [1, 3, 8])
@pytest.mark.parametrize(
    ("seconds", "options"),
    [(0.0, {"joins": True}), (0.1, {}), (0.0, {"background": False})],
    ids=["before the next block", "while it runs", "without a thread"],
)
def test_a_full_disk_is_told_at_a_blocks_start_and_the_run_goes_on(
    first: int,
    seconds: float,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three saves fail: no block is taken for one that has failed, the older checkpoints stay,
    and the run with its later saves is the one without any error."""
    quiet = Run(Setup()).train()
    Full(monkeypatch, first, first + 2, seconds)
    run = Persistent(tmp_path, keep=99, **options)
    with run.checkpoint:
        run.train()
    assert difference([run.seen, run.state()], [quiet.seen, quiet.state()]) is None
    assert [number - first for number, _ in run.errors] == ([1, 2, 3] if seconds else [0, 1, 2])
    assert all("No space left on device" in text for _, text in run.errors)
    saved = list_checkpoints(tmp_path)
    numbers = [open_checkpoint(path).manifest.position["micro_batch"] for path in saved]
    expected = set(range(1, MICRO_BATCHES + 1)) - set(range(first, first + 3))
    assert set(numbers) == expected
    assert not any(list(faults(open_checkpoint(path), full=True)) for path in saved)
    rest = Run(Setup(), seed=9)
    newest = next(p for n, p in zip(numbers, saved, strict=True) if n == first + 3)
    shutil.copytree(newest, tmp_path / "rest" / newest.name)
    with rest.checkpoints(tmp_path / "rest") as checkpoint:
        checkpoint.resume()
        rest.train()
    assert difference(rest.state(), quiet.state()) is None


def test_a_failure_of_the_last_save_is_raised_when_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no next block; close raises it once."""
    Full(monkeypatch, 16, 16)
    run = Persistent(tmp_path)
    run.train()
    with pytest.raises(RuntimeError, match="No space left"):
        run.checkpoint.close()
    run.checkpoint.close()
    assert run.errors == []


def test_checkpoints_that_somebody_has_removed_are_no_end(tmp_path: Path) -> None:
    """The save that would link from them fails and is told, the next one is whole again."""
    run = Persistent(tmp_path, joins=True)
    block = run.block

    def removing(x: Tensor, y: Tensor) -> None:
        block(x, y)
        if len(run.seen) == 4:
            run.checkpoint.wait()
            shutil.rmtree(tmp_path)

    run.block = removing  # type: ignore[method-assign]
    with run.checkpoint:
        run.train(until=6)
    assert [number for number, _ in run.errors] == [5]
    (saved,) = list_checkpoints(tmp_path)
    assert list(faults(open_checkpoint(saved), full=True)) == []


def test_a_save_for_a_signal_is_tried_though_the_one_before_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the failure is still told, by close."""
    quiet = Run(Setup()).train()
    Full(monkeypatch, 4, 4, 0.1)
    run = Persistent(tmp_path)
    block = run.block

    def interrupted(x: Tensor, y: Tensor) -> None:
        if len(run.seen) == 4:
            run.checkpoint._policy.signals.arrived = True
        block(x, y)

    monkeypatch.setattr(run, "block", interrupted)
    run.train(checkpoint=run.checkpoint)
    assert run.checkpoint.interrupted
    assert len(run.seen) == 5
    with pytest.raises(RuntimeError, match="micro-000000000004 .* was not written"):
        run.checkpoint.close()
    rest = Run(Setup(), seed=9)
    with rest.checkpoints(tmp_path) as checkpoint:
        position = checkpoint.resume()
        assert position is not None
        assert position.micro_batch == 5
        rest.train()
    assert difference(rest.state(), quiet.state()) is None


def test_where_links_are_not_possible_the_parts_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same checkpoints, each with its own bytes."""

    def link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    linked = Run(Setup())
    with linked.checkpoints(tmp_path / "linked", every=1, keep=99):
        linked.train()
    expected = linked.state()
    copied = Run(Setup())
    monkeypatch.setattr(os, "link", link)
    with (
        pytest.warns(UserWarning, match="no hard links"),
        copied.checkpoints(tmp_path / "copied", every=1, keep=99),
    ):
        copied.train()
    assert difference(copied.state(), expected) is None
    pairs = zip(*(list_checkpoints(tmp_path / n) for n in ("linked", "copied")), strict=True)
    for one, other in pairs:
        assert one.name == other.name
        assert list(faults(open_checkpoint(other), full=True)) == []
        assert {p.stat().st_nlink for p in other.iterdir()} == {1}
    several = [p for c in list_checkpoints(tmp_path / "linked") for p in c.iterdir()]
    assert max(p.stat().st_nlink for p in several) > 1


def test_after_an_interrupted_save_the_next_one_has_the_weights_of_its_own_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a write; nothing is linked from the checkpoint of the update before."""

    def interrupt(file: int) -> None:
        raise KeyboardInterrupt

    run = Run(Setup())
    with run.checkpoints(tmp_path, background=False) as checkpoint:
        for until in (3, 6):  # at the starts of two windows
            run.train(until=until, epochs=9)
            with monkeypatch.context() as context:
                if until == 6:
                    context.setattr(os, "fsync", interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        checkpoint.save()
            checkpoint.save()
        expected = run.state()["model"]
    resumed = Run(Setup(), seed=2)
    with resumed.checkpoints(tmp_path) as checkpoint:
        checkpoint.resume()
        assert difference(resumed.state()["model"], expected) is None


@pytest.mark.parametrize("background", [True, False])
def test_the_loops_own_exception_is_not_replaced_by_that_of_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """It says in a note that the checkpoint was not written either."""
    run = Run(Setup())
    Full(monkeypatch, 1, 99, seconds=0.1)
    checkpoint = run.checkpoints(tmp_path, every=1, background=background)
    with pytest.raises(KeyError, match="mine") as caught, checkpoint:
        run.train(until=1)
        raise KeyError("mine")
    notes = getattr(caught.value, "__notes__", [f"{caught.value.__context__}"])
    assert "No space left on device" in notes[0]
    assert run.accum.parts.state.observer is None


def test_after_a_resume_no_damaged_weights_are_linked(tmp_path: Path) -> None:
    """keep=2 is one copy inside a window, so damage to it would be in both checkpoints."""
    quiet = Run(Setup()).train()
    first = Run(Setup())
    with first.checkpoints(tmp_path, every=4):
        first.train(until=5)
    second = Run(Setup(), seed=2)
    with second.checkpoints(tmp_path, every=1) as checkpoint:
        checkpoint.resume()
        for name in ("model", "optimizer"):
            file = list_checkpoints(tmp_path)[-1] / f"{name}.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        second.train(until=1)
    assert list(faults(open_checkpoint(list_checkpoints(tmp_path)[-1]), full=True)) == []
    third = Run(Setup(), seed=3)
    with third.checkpoints(tmp_path) as checkpoint:
        checkpoint.resume()
        third.train()
    assert difference(third.state(), quiet.state()) is None
