"""Ranks that stop anywhere, each at its own place, and are gone on from by new ones."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from accumplug import Checkpointer
from accumplug.errors import CheckpointError
from accumplug.storage.layout import list_checkpoints

from .checkpointing import (
    Run,
    Setup,
    Told,
    Uneven,
    found_when_interrupted,
    interrupted_in_the_last_meeting,
    part,
    signalled_while_it_waits,
)
from .harness import Ranks

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from training import difference

EACH = {"every": 1, "keep": 99}


def go_on(ranks: Ranks, world: int, setup: Setup, checkpoint: Path, tmp_path: Path) -> list[Told]:
    """New ranks go on from `checkpoint`, as if it were the newest."""
    directory = tmp_path / f"after {checkpoint.name}"
    shutil.copytree(checkpoint, directory / checkpoint.name, copy_function=os.link)
    told: list[Told] = ranks.run(world, part, setup, directory, seed=55, resume=True)
    return told


def assert_same(quiet: list[Told], rest: list[Told], name: str) -> None:
    """The rest of a run is that of the quiet one, on each rank, to the last bit."""
    for rank, (one, other) in enumerate(zip(quiet, rest, strict=True)):
        count = len(one.seen) - len(other.seen)
        assert difference(one.seen[count:], other.seen, f"{name}, rank {rank}, seen") is None
        assert difference(one.state, other.state, f"{name}, rank {rank}, end") is None


EVEN = {
    "plain": Setup(),
    "unused": Setup(unused=True),
    "every": Setup(options={"sync": "every"}),
    "weigh": Setup(weigh=True),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("setup", EVEN.values(), ids=EVEN.keys())
def test_each_micro_batch_is_a_place_to_go_on_from(
    ranks: Ranks, world: int, setup: Setup, tmp_path: Path
) -> None:
    """Gradients, buffers and random numbers of each rank, used marks, the order of buckets; and
    the run that saves is the one that doesn't."""
    quiet = ranks.run(world, part, setup, None)
    saving = ranks.run(world, part, setup, tmp_path / "all", options=EACH)
    assert_same(quiet, saving, "saving")
    saved = list_checkpoints(tmp_path / "all")
    assert len(saved) == len(quiet[0].seen) == (12 if world == 2 else 8)
    for checkpoint in saved if setup == EVEN["plain"] else saved[1::3]:
        assert_same(quiet, go_on(ranks, world, setup, checkpoint, tmp_path), checkpoint.name)


UNEVEN = {
    "flush": Setup(sizes=(5, 7, 2)),
    "carry": Setup(sizes=(5, 7, 2), options={"tail": "carry"}),
    "weigh": Setup(sizes=(5, 7, 2), weigh=True),
}


@pytest.mark.parametrize("setup", UNEVEN.values(), ids=UNEVEN.keys())
def test_ranks_whose_data_end_early_take_part_in_each_save(
    ranks: Ranks, setup: Setup, tmp_path: Path
) -> None:
    """While one rank is in its third micro-batch of a window another has only two, or none."""
    quiet = ranks.run(3, part, setup, None)
    saving = ranks.run(3, part, setup, tmp_path / "all", options=EACH)
    assert_same(quiet, saving, "saving")
    saved = list_checkpoints(tmp_path / "all")
    assert len(saved) >= 14
    for checkpoint in saved[: 8 if setup == UNEVEN["carry"] else 7]:
        assert_same(quiet, go_on(ranks, 3, setup, checkpoint, tmp_path), checkpoint.name)


@pytest.mark.parametrize("sizes", [(4, 5), (5, 4), (5, 7)], ids=str)
@pytest.mark.parametrize("every", [1, 2])
def test_tails_that_are_dropped_do_not_move_the_saves_of_the_ranks_apart(
    ranks: Ranks, sizes: tuple[int, ...], every: int, tmp_path: Path
) -> None:
    """Each rank drops another number of micro-batches, and all save as often in the next pass."""
    setup = Setup(sizes=sizes, options={"tail": "drop"})
    quiet = ranks.run(2, part, setup, None)
    options = {"background": False, "every": every, "keep": 99}
    saving = ranks.run(2, part, setup, tmp_path / "all", options=options)
    assert_same(quiet, saving, "saving")
    last = list_checkpoints(tmp_path / "all")[-2]
    assert_same(quiet, go_on(ranks, 2, setup, last, tmp_path), last.name)


def test_a_save_without_a_thread_does_not_wait_for_a_rank_that_waits_too(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Rank 1 waits with its only micro-batch until rank 0 has run its third one, and has to hear
    of a save before rank 0 waits for its part of that."""
    setup = Setup(sizes=(3, 1))
    quiet = ranks.run(2, part, setup, None)
    saving = ranks.run(2, part, setup, tmp_path, options={"background": False, **EACH})
    assert_same(quiet, saving, "saving")
    assert len(list_checkpoints(tmp_path)) == 6


@pytest.mark.parametrize(
    ("world", "setup", "signal_at"),
    [
        (2, Setup(), (1, 2)),
        (3, Setup(), (0, 3)),
        (2, Setup(gathers=True), (0, 4)),
        (3, Setup(gathers=True), (2, 1)),
        (3, UNEVEN["flush"], (1, 5)),
        (3, UNEVEN["flush"], (2, 2)),
        (2, Setup(options={"sync": "every"}), (1, 2)),
    ],
)
def test_a_signal_to_one_rank_stops_all_of_them_at_one_micro_batch(
    ranks: Ranks, world: int, setup: Setup, signal_at: tuple[int, int], tmp_path: Path
) -> None:
    """Within the window, whichever rank gets it; with collectives of the loop's own in each
    micro-batch; while some have no data any more."""
    quiet = ranks.run(world, part, setup, None)
    options = {"signals": (signal.SIGUSR1,)}
    first = ranks.run(
        world, part, setup, tmp_path, options=options, signal_at=signal_at, pause=0.05
    )
    assert all(told.interrupted for told in first)
    counts = {len(told.seen) for told in first}
    if setup.sizes is None:
        assert len(counts) == 1
    assert signal_at[1] <= max(counts) <= signal_at[1] + 3
    rest = ranks.run(world, part, setup, tmp_path, seed=55, resume=True)
    assert_same(quiet, rest, "after the signal")


def test_a_rank_that_waits_for_the_others_stops_with_as_many_saves_as_they_make(
    ranks: Ranks, tmp_path: Path
) -> None:
    """It waits with its last micro-batch for those of rank 0 and gets a signal meanwhile; rank 0
    saves once more before it hears of that, and would wait for a save that nobody makes."""
    setup = Setup(sizes=(3, 1))
    quiet = ranks.run(2, part, setup, None)
    first = ranks.run(2, signalled_while_it_waits, tmp_path)
    assert [told.interrupted for told in first] == [True, True]
    assert [len(told.seen) for told in first] == [1, 0]
    rest = ranks.run(2, part, setup, tmp_path, seed=55, resume=True)
    assert_same(quiet, rest, "after the signal")


def test_a_signal_in_the_last_meeting_stops_all_ranks_whatever_they_carry(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The one that carries fewer micro-batches will run none more, and has to stop all the same."""
    found = ranks.run(2, interrupted_in_the_last_meeting, tmp_path)
    assert found == [(True, 0), (True, 2)]


def test_no_rank_is_interrupted_before_the_checkpoint_is_whole(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A launcher ends the other ranks when one has exited, and rank 0 may still be writing."""
    first, second = ranks.run(2, found_when_interrupted, tmp_path)
    assert first == second == [path.name for path in list_checkpoints(tmp_path)]
    assert len(first) == 1


@pytest.mark.parametrize("seconds", [0.2, 0.001], ids=["now and then", "all the time"])
def test_the_clock_of_rank_0_saves_on_all_ranks(
    ranks: Ranks, seconds: float, tmp_path: Path
) -> None:
    """Within windows, and while they wait for each other; what is saved can be gone on from."""
    setup = Setup()
    quiet = ranks.run(2, part, setup, None)
    options = {"every_seconds": seconds, "keep": 99}
    saving = ranks.run(2, part, setup, tmp_path / "all", options=options, pause=0.1)
    assert_same(quiet, saving, "saving")
    saved = list_checkpoints(tmp_path / "all")
    assert len(saved) >= 3
    assert_same(quiet, go_on(ranks, 2, setup, saved[1], tmp_path), saved[1].name)


def test_a_save_by_hand_returns_the_same_path_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    """Two saves of one position are two checkpoints, and the last is resumed."""
    told = ranks.run(2, part, Setup(epochs=1), tmp_path, saves=2)
    assert told[0].paths == told[1].paths == list_checkpoints(tmp_path)
    assert len(set(told[0].paths)) == 2


def test_a_file_that_is_damaged_for_one_rank_is_passed_over_by_all(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Else the ranks would go on from different checkpoints."""
    setup = Setup()
    quiet = ranks.run(2, part, setup, None)
    ranks.run(2, part, setup, tmp_path, options={"every": 5})
    newest = list_checkpoints(tmp_path)[-1]
    file = newest / "rank-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    rest: list[Any] = ranks.run(2, part, setup, tmp_path, seed=55, resume=True)
    assert [len(told.seen) for told in rest] == [7, 7]
    assert "rank-1.safetensors" in rest[1].passed[0]
    assert newest.name in rest[0].passed[0]
    assert_same(quiet, rest, "from the older one")


def resume_where_rank_1_can_not_read(rank: int, directory: Path) -> str:
    """The error of a resume in which opening a file of its own fails on rank 1."""
    run, real = Run(rank, Setup(), 1), os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if rank == 1 and Path(path).name == "rank-1.json":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *args, **options)

    options: dict[str, Any] = {"model": run.model, "loader": run.loader}
    with (
        mock.patch.object(os, "open", refuse),
        Checkpointer(directory, run.accum, **options) as checkpoint,
        pytest.raises(CheckpointError) as caught,
    ):
        checkpoint.resume()
    return str(caught.value)


def test_a_checkpoint_that_one_rank_can_not_read_is_an_error_on_all(
    ranks: Ranks, tmp_path: Path
) -> None:
    """An older one, which all of them can read, would be another place in the run."""
    ranks.run(2, part, Setup(epochs=1), tmp_path, options={"every": 2, "keep": 9})
    first, second = ranks.run(2, resume_where_rank_1_can_not_read, tmp_path)
    assert "another rank can't read it" in first
    assert "rank-1.json: cannot be read (Input/output error)" in second


def build_with(rank: int, directory: Path, name: str, values: list[Any]) -> str:
    """The error of a Checkpointer whose option `name` has another value on each rank."""
    run = Run(rank, Setup(), 1)
    options: dict[str, Any] = {"directory": directory, name: values[rank]}
    with pytest.raises(ValueError, match="give all ranks the same") as caught:
        Checkpointer(accum=run.accum, model=run.model, loader=run.loader, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("every", [5, 6]),
        ("every", [None, 1]),
        ("every_seconds", [1.0, 2.0]),
        ("directory", ["here", "there"]),
        ("keep", [2, 3]),
        ("background", [True, False]),
        ("signals", [(signal.SIGUSR1,), ()]),
    ],
)
def test_options_that_differ_on_ranks_are_named_when_it_is_built(
    ranks: Ranks, name: str, values: list[Any], tmp_path: Path
) -> None:
    """Some of them were a hang, others nothing at all."""
    for text in ranks.run(2, build_with, tmp_path, name, values):
        assert text.startswith(f"{name} is ")
        assert "on rank 0 and" in text


class Changed(Uneven):
    """Rank 1 has other data than the run that saved, or can't read them."""

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            if self.rank == 1 and self.unreadable:
                raise OSError(errno.EIO, "Input/output error")
            yield x + (self.rank == 1), y

    unreadable = False


def resume_with_other_data(rank: int, directory: Path, sizes: Any, unreadable: bool) -> Any:
    """What a rank raises in its resumed pass, and how many micro-batches it runs before."""
    run = Run(rank, Setup(sizes=sizes), 1)
    run.loader = Changed(rank, sizes)
    run.loader.unreadable = unreadable
    options: dict[str, Any] = {"model": run.model, "loader": run.loader}
    caught: Exception | None = None
    try:
        with Checkpointer(directory, run.accum, **options) as checkpoint:
            assert checkpoint.resume() is not None
            run.train(checkpoint)
    except Exception as error:
        caught = error
    return type(caught).__name__, str(caught), len(run.seen)


@pytest.mark.parametrize("unreadable", [False, True])
@pytest.mark.parametrize("sizes", [(8, 8), (1, 8), (8, 8, 8)], ids=str)
def test_data_that_differ_on_one_rank_are_an_error_on_all_before_a_micro_batch(
    ranks: Ranks, tmp_path: Path, sizes: tuple[int, ...], unreadable: bool
) -> None:
    """Else the others wait for it until the group's timeout. A rank may have no data left."""
    ranks.run(len(sizes), part, Setup(sizes=sizes, epochs=1), tmp_path, options=EACH)
    for newer in list_checkpoints(tmp_path)[2:]:
        shutil.rmtree(newer)
    began = time.monotonic()
    results = ranks.run(len(sizes), resume_with_other_data, tmp_path, sizes, unreadable)
    assert time.monotonic() - began < 20
    name, told = (
        ("OSError", "Input/output error") if unreadable else ("CheckpointError", "item 2 of this")
    )
    for rank, (kind, text, count) in enumerate(results):
        assert (kind, count) == (name if rank == 1 else "CheckpointError", 0)
        assert told in text
        if rank != 1:
            assert f"not all ranks can resume their data. rank 1: {name}: " in text
