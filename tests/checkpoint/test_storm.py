"""A run that is killed at random moments, again and again, ends as one that nobody disturbs.

ACCUMPLUG_STORM is the number of kills.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from forks import fork
from training import SAMPLES, SIZE, Run, Setup, difference

from accumplug.storage import commit
from accumplug.storage.layout import faults, list_checkpoints, open_checkpoint
from accumplug.storage.lease import LEASE
from accumplug.storage.retention import REMOVING, WRITING

KILLS = int(os.environ.get("ACCUMPLUG_STORM", "12"))
IN_A_LIFE = 4  # micro-batches, at most
EPOCHS = 1 + KILLS * IN_A_LIFE // (SAMPLES // SIZE)
KEEP = 2


class Watched(Run):
    """Tells when a micro-batch begins."""

    to: Connection | None = None

    def block(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.to is not None:
            self.to.send(len(self.seen) + 1)
        super().block(x, y)


def live(directory: Path, told: Path, seed: int, to: Connection | None = None) -> None:
    """What a process does for as long as it is left alone: all that is left, saving each
    micro-batch; then it tells where it has got to."""
    warnings.filterwarnings("ignore", message="BatchNorm sees micro-batches")
    run = Watched(Setup(fp16=True, noise=True), seed)
    run.to = to
    with run.checkpoints(directory, every=1, keep=KEEP) as checkpoint:
        checkpoint.resume()
        run.train(EPOCHS)
    torch.save(run.state(), told)


def live_and_die(moment: random.Random, directory: Path, told: Path, seed: int) -> None:
    """A life that ends within 20 ms of the beginning of one of its first micro-batches, or before
    the first one."""
    begun, to = multiprocessing.Pipe(duplex=False)
    process = fork(live, directory, told, seed, to)
    to.close()
    for _ in range(moment.randint(0, IN_A_LIFE)):
        assert begun.poll(60)
        begun.recv()
    time.sleep(0.02 * moment.random())
    assert process.exitcode is None
    process.kill()
    process.join(60)
    begun.close()


def newest_place(directory: Path) -> int:
    """How far the newest checkpoint is; every one that has the name of one has to be whole."""
    saved = list_checkpoints(directory) if directory.exists() else []
    assert len(saved) <= KEEP + 1
    for path in saved:
        assert list(faults(open_checkpoint(path), full=True)) == []
    names = os.listdir(directory) if directory.exists() else []
    leftovers = [name for name in names if name.startswith((WRITING, REMOVING))]
    assert len(leftovers) <= 2
    leases = [name for name in names if name.startswith(LEASE)]
    assert len(leases) <= 1
    assert len(names) == len(saved) + len(leftovers) + len(leases)
    positions = [open_checkpoint(path).manifest.position for path in saved]
    return max((position["micro_batch"] for position in positions), default=0)


def live_until_the_rename(directory: Path, seed: int) -> None:
    """Save one more micro-batch, and die before an older checkpoint is removed."""
    warnings.filterwarnings("ignore", message="BatchNorm sees micro-batches")
    run = Run(Setup(), seed)
    flush = commit.fsync_directory

    def die(path: Path) -> None:
        flush(path)
        if path == directory:
            os._exit(9)

    commit.fsync_directory = die
    with run.checkpoints(directory, every=1, keep=KEEP) as checkpoint:
        checkpoint.resume()
        run.train(EPOCHS)


def test_lives_that_end_before_they_remove_anything_leave_no_pile(tmp_path: Path) -> None:
    for number in range(1, 7):
        process = fork(live_until_the_rename, tmp_path / "run", seed=number)
        process.join(60)
        assert process.exitcode == 9
        assert newest_place(tmp_path / "run") == number


def test_a_storm_of_kills_changes_nothing(tmp_path: Path) -> None:
    """While it starts, trains, saves, links, removes: there is a whole checkpoint after each kill
    once there was one, none further back than the one before, and nothing piles up."""
    moment, place, told = random.Random(0), 0, tmp_path / "told"
    for number in range(KILLS):
        # nothing may come from the seed, except where there is no checkpoint yet
        live_and_die(moment, tmp_path / "run", told, seed=number if place else 0)
        before, place = place, newest_place(tmp_path / "run")
        assert place >= before
    states: list[dict[str, Any]] = []
    for directory, seed in ((tmp_path / "run", 999), (tmp_path / "quiet", 0)):
        process = fork(live, directory, told, seed)
        process.join(200)
        assert process.exitcode == 0
        states.append(torch.load(told, weights_only=True))
        assert len(os.listdir(directory)) == KEEP
    assert place > KILLS // 2
    assert difference(*states) is None
