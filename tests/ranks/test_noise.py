"""The noise scale over several ranks: their first micro-batches are the small batches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator, NoiseScale

from .harness import Ranks

MEAN, DEVIATION = torch.linspace(0.2, 0.6, 40), torch.linspace(2.0, 0.5, 40)
TRUE = float(DEVIATION.square().sum() / MEAN.square().sum())
SIZES = [(3, 8, 1, 5), (7, 2, 2, 6)]


def draw(rank: int, windows: int) -> list[list[Tensor]]:
    """Micro-batches of a rank: the gradient of `w . x` for an item is x, normal around MEAN."""
    generator = torch.Generator().manual_seed(rank)
    options: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    return [
        [
            (MEAN + DEVIATION * torch.randn(size, 40, **options)).to(torch.get_default_device())
            for size in SIZES[rank]
        ]
        for _ in range(windows)
    ]


def train(
    rank: int, world: int, windows: int, short: bool = False, sharded: bool = False
) -> dict[str, Any]:
    """Train on what `draw` gives, the last window without rank 1 if `short`; give the state."""
    model: nn.Module = nn.Linear(40, 1, bias=False)
    if sharded:
        fully_shard(model, mesh=init_device_mesh(torch.get_default_device().type, (world,)))
    else:
        model = DistributedDataParallel(model)
    accum = Accumulator(4, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    accum.noise_scale = NoiseScale(decay=0.9999)
    warnings.filterwarnings("ignore", "deferring the reduction", UserWarning)
    data = draw(rank, windows)[: windows - 1 if short and rank == 1 else windows]
    for micro_batch in accum.batches([piece for window in data for piece in window]):
        with accum(model, weight=len(micro_batch)):
            accum.backward(model(micro_batch).mean())
    return accum.noise_scale.state_dict()


def by_hand(world: int, windows: int, short: bool = False) -> NoiseScale:
    """The same from plain means over items."""
    noise, data = NoiseScale(decay=0.9999), [draw(rank, windows) for rank in range(world)]
    for number in range(windows):
        present = data[:1] if short and number == windows - 1 else data
        firsts = [of_rank[number][0] for of_rank in present]
        items = torch.cat([piece for of_rank in present for piece in of_rank[number]])
        noise.update(
            sum(float(first.mean(0).square().sum()) for first in firsts) / len(firsts),
            float(items.mean(0).square().sum()),
            len(firsts) / sum(1 / len(first) for first in firsts),
            len(items),
        )
    return noise


@pytest.mark.parametrize(("world", "short"), [(1, False), (2, False), (2, True)])
def test_ranks_find_the_noise_scale_of_all_their_items(
    ranks: Ranks, world: int, short: bool
) -> None:
    """Uneven weights, and a rank without data at the end: as by hand, the same on each rank."""
    for state in ranks.run(world, train, world, 6, short):
        assert state == pytest.approx(by_hand(world, 6, short).state_dict())


def test_sharded_ranks_find_the_same(ranks: Ranks) -> None:
    """Under fully_shard with deferred reduction, where the sum is not in `.grad` until the end."""
    for state in ranks.run(2, train, 2, 6, sharded=True):
        assert state == pytest.approx(by_hand(2, 6).state_dict())


def test_two_ranks_meet_the_closed_form(ranks: Ranks) -> None:
    """A linear model whose noise is known: within 10 % and inside of the interval."""
    noise = NoiseScale()
    noise.load_state_dict(ranks.run(2, train, 2, 400)[0])
    now = noise.estimate
    assert now.value == pytest.approx(TRUE, rel=0.1)
    assert now.low < TRUE < now.high < 1.3 * now.low
