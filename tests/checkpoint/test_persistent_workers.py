"""Workers that stay from pass to pass, in a run that is gone on from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accumplug import Accumulator, Checkpointer


def run(
    directory: Path, until: int | None = None, resume: bool = False, between: bool = False
) -> list[list[float]]:
    """The micro-batches of two passes, or the first few (to the end of a pass), or the rest."""
    torch.manual_seed(9 if resume else 1)
    model = nn.Linear(1, 1)
    accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), 1e-3))
    data = [torch.tensor([float(i)]) for i in range(6)]
    loader = DataLoader(data, 2, shuffle=True, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    seen: list[list[float]] = []
    with Checkpointer(directory, accum, model=model, loader=loader, every=1) as checkpoint:
        if resume:
            assert checkpoint.resume() is not None
        for _ in range(accum.epoch, 2):
            for x in accum.batches(loader):
                with accum(model):
                    accum.backward(model(x).mean())
                seen.append(x.flatten().tolist())
                if len(seen) == until and not between:
                    return seen
            if len(seen) == until:
                checkpoint.save()
                return seen
    return seen


@pytest.mark.parametrize(("until", "between"), [(2, False), (3, False), (3, True), (4, False)])
def test_each_pass_has_the_order_of_the_run_that_went_on(
    until: int, between: bool, tmp_path: Path
) -> None:
    """The first pass draws a seed for them before its order, and later ones don't."""
    quiet = run(tmp_path / "quiet")
    assert run(tmp_path / "a", until, between=between) == quiet[:until]
    assert run(tmp_path / "a", resume=True) == quiet[until:]
