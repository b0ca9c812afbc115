"""A Checkpointer that is closed and dropped keeps nothing alive, and waits for no collector."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accumplug import Accumulator, Checkpointer


def run(folder: Path, stop: int) -> list[weakref.ref[object]]:
    """Train up to `stop` micro-batches, saving each; what the run was made of."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    accum = Accumulator(2, optimizer=optimizer)
    loader = DataLoader([torch.ones(1) * i for i in range(6)], 2)  # type: ignore[arg-type]
    checkpoint = Checkpointer(folder, accum, model=model, loader=loader, every=1)
    for x in accum.batches(loader):
        with accum(model):
            accum.backward(model(x).mean())
        if accum.micro_batches == stop:
            break
    handle = checkpoint.save(wait=False)
    assert handle.result() is not None
    checkpoint.close()
    return [weakref.ref(thing) for thing in (model, optimizer, accum, loader, checkpoint)]


@pytest.mark.parametrize("stop", [2, 3], ids=["a pass that was left", "a whole pass"])
def test_what_a_closed_checkpointer_knew_is_freed_with_it(stop: int, tmp_path: Path) -> None:
    """A model that lives on holds its memory and its process group; a loader its workers."""
    run(tmp_path / "first", stop)  # imports that torch makes late hold frames
    gc.disable()
    try:
        assert [thing() for thing in run(tmp_path / "second", stop)] == [None] * 5
    finally:
        gc.enable()
