"""Saves of ranks that cut their items into different numbers of micro-batches."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator, Checkpointer
from accumplug.storage.layout import list_checkpoints, open_checkpoint, read_part

from .harness import Ranks
from .test_strange_loops import items, loss, net, parameters, sgd

SIZES = [3, 1, 4, 2, 5, 1]
Told = tuple[list[Tensor], int]


def train(
    rank: int, directory: Path | None, steps: int | None, weighs: bool = False, **options: Any
) -> Told:
    """Weights and updates after two passes over items of one to four parts, others on each rank."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(steps, optimizer=sgd(ddp.parameters()))
    data = items(rank, [1 + (size + 2 * rank) % 8 for size in SIZES])
    saves: Any = nullcontext()
    if directory is not None:
        saves = Checkpointer(directory, accum, model=ddp, loader=data, keep=99, **options)
    with saves as checkpoint:
        if checkpoint is not None:
            checkpoint.resume()
        while accum.epoch < 2:
            for batch in accum.batches(data, weigh=(lambda b: len(b[0])) if weighs else None):
                for part in accum.split(batch, 2):
                    with accum(ddp, weight=1 if weighs else len(part[0])):
                        accum.backward(loss(ddp, part))
    return parameters(ddp), accum.updates


def assert_same(found: list[Told], expected: list[Told]) -> None:
    for (weights, updates), (right, count) in zip(found, expected, strict=True):
        assert all(map(torch.equal, weights, right))
        assert updates == count


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("steps", "weighs", "every"),
    [
        (2, False, "every"),
        (3, False, "every"),
        (2, False, "every_updates"),
        (None, False, "every"),
        (2, True, "every_updates"),
        (None, True, "every_updates"),
    ],
)
def test_ranks_save_one_moment_and_go_on_from_each(
    ranks: Ranks, world: int, steps: int | None, weighs: bool, every: str, tmp_path: Path
) -> None:
    """The run that saves is the one that doesn't, and no rank is an update ahead of another."""
    quiet = ranks.run(world, train, None, steps, weighs)
    assert_same(ranks.run(world, train, tmp_path / "all", steps, weighs, **{every: 2}), quiet)
    saved = list_checkpoints(tmp_path / "all")
    assert len(saved) >= 3
    for path in saved:
        checkpoint = open_checkpoint(path)
        own = [read_part(checkpoint, f"rank-{rank}")["accum"] for rank in range(world)]
        assert len({state["updates"] for state in own}) == 1
    for path in saved[:: len(saved) // 2]:
        shutil.copytree(path, tmp_path / f"{path.name}-alone" / path.name)
        assert_same(ranks.run(world, train, tmp_path / f"{path.name}-alone", steps, weighs), quiet)


def refused(rank: int, directory: Path) -> str:
    try:
        train(rank, directory, 2, True, every=2)
    except RuntimeError as error:
        return str(error)
    return ""


def test_micro_batches_are_not_counted_where_a_planned_window_has_others_on_each_rank(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Before anything is trained."""
    for message in ranks.run(2, refused, tmp_path):
        assert "every= counts; give every_updates= instead" in message


def planned(rank: int, directory: Path | None) -> Told:
    """Two passes of 7 and 10 items in planned windows of two, each micro-batch reduced."""
    ddp = DistributedDataParallel(net())
    options: dict[str, Any] = {"sync": "every", "tail": "drop"}
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()), **options)
    data = items(rank, [2] * (7 + 3 * rank))
    saves: Any = nullcontext()
    if directory is not None:
        saves = Checkpointer(directory, accum, model=ddp, loader=data, every_updates=1)
    with saves:
        for _ in range(2):
            for batch in accum.batches(data, weigh=lambda b: len(b[0])):
                with accum(ddp):
                    accum.backward(loss(ddp, batch))
    return parameters(ddp), accum.updates


def test_a_rank_without_items_for_a_planned_window_meets_the_others_once(
    ranks: Ranks, tmp_path: Path
) -> None:
    """However many micro-batches of it are reduced."""
    assert_same(ranks.run(2, planned, tmp_path), ranks.run(2, planned, None))
