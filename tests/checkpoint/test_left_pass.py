"""A pass that the loop has left by a `break` is saved as one that was left there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training import LOADERS, STEPS, Run, Setup, difference

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches")


def stop_and_resume(
    setup: Setup, directory: Path, until: int, inside: bool, again: int = 0
) -> tuple[Run, int]:
    """The run that was saved after so many micro-batches, before or after the `break`, and has
    gone on in another process (and was saved `again` times right after the resume)."""
    first = Run(setup, 1)
    with first.checkpoints(directory) as checkpoint:
        for _ in range(2):
            weigh: dict[str, Any] = {}
            if setup.weigh:
                weigh = {"weigh": lambda item: float(len(item[0]))}
            for x, y in first.accum.batches(first.loader, **weigh):
                first.block(x, y)
                if first.accum.micro_batches == until:
                    if inside:
                        checkpoint.save()
                    break
            if first.accum.micro_batches == until:
                break
            torch.rand(5)  # as in train
        if not inside:
            checkpoint.save()
    for _ in range(again):
        other = Run(setup, 7)
        with other.checkpoints(directory) as checkpoint:
            assert checkpoint.resume() is not None
            checkpoint.save()
    second = Run(setup, 9)
    with second.checkpoints(directory) as checkpoint:
        assert checkpoint.resume() is not None
        second.train()
    return second, len(first.seen)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("until", [4, 8, 10])
def test_a_save_after_the_break_is_as_exact_as_one_before_it(
    loader: str, until: int, tmp_path: Path
) -> None:
    """Stopped at max_steps, saved, and later trained for longer: no micro-batch twice."""
    setup = Setup(loader=loader)
    quiet = Run(setup, 1).train()
    for inside in (True, False):
        rest, count = stop_and_resume(setup, tmp_path / str(inside), until, inside)
        assert count + len(rest.seen) == len(quiet.seen) == 16
        assert difference(quiet.seen[count:], rest.seen) is None
        assert difference(quiet.state(), rest.state()) is None


def test_a_break_in_a_window_that_is_weighed_keeps_its_plan(tmp_path: Path) -> None:
    """The total that weigh= has promised holds for the rest of the window."""
    setup = Setup(weigh=True)
    quiet = Run(setup, 1).train()
    rest, count = stop_and_resume(setup, tmp_path, STEPS + 1, inside=False)
    assert difference(quiet.seen[count:], rest.seen) is None
    assert difference(quiet.state(), rest.state()) is None


@pytest.mark.parametrize("until", [4, 10])
def test_a_save_right_after_a_resume_keeps_the_place(until: int, tmp_path: Path) -> None:
    """Nothing has run in between, and no pass was opened."""
    setup = Setup()
    quiet = Run(setup, 1).train()
    rest, count = stop_and_resume(setup, tmp_path, until, inside=True, again=2)
    assert count + len(rest.seen) == 16
    assert difference(quiet.state(), rest.state()) is None
