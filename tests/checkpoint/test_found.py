"""Faults that were found by attacking the checkpoints from outside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accumplug import Accumulator, Checkpointer


def run(directory: Path, samples: int, batch_size: int, until: int = 0) -> int:
    """How many samples were seen, from where the run was saved."""
    model = nn.Linear(1, 1)
    accum = Accumulator(4, optimizer=torch.optim.SGD(model.parameters(), 1e-3))
    data = [torch.tensor([float(i)]) for i in range(samples)]
    loader = DataLoader(data, batch_size, shuffle=True)  # type: ignore[arg-type]
    seen = 0
    with Checkpointer(directory, accum, model=model, loader=loader) as checkpoint:
        checkpoint.resume()
        for x in accum.batches(loader):
            with accum(model):
                accum.backward(model(x).mean())
            seen += len(x)
            if until and accum.micro_batches == until:
                checkpoint.save()
                break
    return seen


@pytest.mark.parametrize(
    ("samples", "batch_size", "message"),
    [(50, 8, "batch_size is 8 here, and 4"), (50, 2, "set batch_size=4"), (40, 4, "40 samples")],
)
def test_other_micro_batches_do_not_lose_the_place_in_a_pass(
    tmp_path: Path, samples: int, batch_size: int, message: str
) -> None:
    assert run(tmp_path, 50, 4, until=6) == 24
    with pytest.raises(ValueError, match=message):
        run(tmp_path, samples, batch_size)
    assert run(tmp_path, 50, 4) == 26


def test_after_the_last_item_the_micro_batches_may_become_others(tmp_path: Path) -> None:
    assert run(tmp_path, 50, 4, until=13) == 50
    assert run(tmp_path, 60, 10) == 0  # nothing is left of the pass
