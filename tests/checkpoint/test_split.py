"""A stop inside of an item that is cut into parts: the parts that were trained on are left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from accumplug import Accumulator, Checkpointer

DATA = list(torch.arange(60.0).view(4, 5, 3) / 60)
"""Four items of five rows, so of three parts of two rows."""


def train(
    directory: Path | None, stop: int | None = None, size: int = 2, steps: int | None = 4
) -> tuple[list[Tensor], list[Tensor]]:
    """The parts that this process trained on, and the parameters; it ends after `stop` blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accum, seen = Accumulator(steps, optimizer=optimizer), []
    checkpoint = directory and Checkpointer(directory, accum, model=model, loader=DATA)
    if checkpoint:
        checkpoint.resume()
    for batch in accum.batches(DATA):
        for part in accum.split(batch, size):
            with accum(model, weight=len(part)):
                accum.backward(model(part.double()).square().mean())
            seen.append(part)
            if checkpoint and len(seen) == stop:
                checkpoint.save()
                checkpoint.close()
                return seen, [p.detach().clone() for p in model.parameters()]
    if checkpoint:
        checkpoint.close()
    return seen, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("steps", [4, None])
@pytest.mark.parametrize("stop", range(1, 12))
def test_a_resume_inside_of_an_item_goes_on_with_its_next_part(
    tmp_path: Path, stop: int, steps: int | None
) -> None:
    """The item is fetched again; no part is lost or seen twice, and the weights are the same."""
    whole, expected = train(None, steps=steps)
    first, _ = train(tmp_path, stop, steps=steps)
    rest, after = train(tmp_path, steps=steps)
    assert len(first) == stop
    assert all(map(torch.equal, [*first, *rest], whole))
    assert len(first) + len(rest) == len(whole)
    assert all(map(torch.equal, after, expected))


def test_another_size_inside_of_an_item_is_an_error(tmp_path: Path) -> None:
    """Its parts would not be those that were trained on."""
    train(tmp_path, stop=4)
    with pytest.raises(
        ValueError, match=r"had trained on 1 of 3 parts of 2 rows.*split\(batch, 2\)"
    ):
        train(tmp_path, size=3)
