"""A loop that is left in the middle of a pass leaves no workers behind."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accumplug import Accumulator, Checkpointer


def test_workers_end_when_the_loop_is_left(tmp_path: Path) -> None:
    """Not at a later garbage collection, which waits 5 seconds for each of them."""
    data: Any = [torch.ones(2)] * 64
    loader = DataLoader(data, num_workers=2)
    model = nn.Linear(2, 1)
    accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    before = set(multiprocessing.active_children())
    gc.disable()
    try:
        with Checkpointer(tmp_path, accum, model=model, loader=loader) as checkpoint:
            for item in accum.batches(loader):
                with accum(model):
                    accum.backward(model(item).sum())
                if accum.micro_batches == 3:
                    assert len(set(multiprocessing.active_children()) - before) == 2
                    break
            assert set(multiprocessing.active_children()) <= before
            checkpoint.save()
    finally:
        gc.enable()
