"""Loops that read ahead go on from each micro-batch: what had no block is fetched again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop.test_reading_ahead import READERS
from torch import nn

from accumplug import Accumulator, Checkpointer

SIZES = [3, 1, 5, 1, 2, 4]
PASSES = 2
DATA = [torch.randn(n, 2, generator=torch.Generator().manual_seed(n)) for n in SIZES]


def train(
    folder: Path, read: Callable[[Any], Iterator[Any]], steps: int, weighs: bool, stop: int = 0
) -> tuple[list[torch.Tensor], int]:
    """Weights and updates at the end, or after `stop` more micro-batches, where it is saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3), nn.Linear(3, 1))
    accum = Accumulator(steps, optimizer=torch.optim.Adam(model.parameters(), 0.05))
    with Checkpointer(folder, accum, model=model, loader=DATA) as checkpoint:
        checkpoint.resume()
        while accum.epoch < PASSES:
            items: Iterable[Any] = accum.batches(DATA, weigh=len if weighs else None)
            for x in read(items):
                with accum(model, weight=len(x)):
                    accum.backward(model(x).square().mean())
                if accum.micro_batches == stop:
                    checkpoint.save()
                    return [], 0
    return [p.detach() for p in model.parameters()], accum.updates


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("weighs", [False, True], ids=["freely", "under weigh"])
@pytest.mark.parametrize("steps", [2, 3])
def test_a_loop_that_reads_ahead_goes_on_from_each_micro_batch(
    read: Callable[[Any], Iterator[Any]], weighs: bool, steps: int, tmp_path: Path
) -> None:
    """With dropout and Adam, the weights of the run that was never stopped."""
    straight, updates = train(tmp_path / "straight", read, steps, weighs)
    for stop in range(1, PASSES * len(SIZES)):
        train(tmp_path / f"{stop}", read, steps, weighs, stop)
        resumed, again = train(tmp_path / f"{stop}", read, steps, weighs)
        assert all(map(torch.equal, resumed, straight)), stop
        assert again == updates
