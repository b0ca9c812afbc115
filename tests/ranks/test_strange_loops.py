"""Loops of strangers on ranks: they read ahead, cut items, train what nobody wrapped."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator

from .harness import RankError, Ranks
from .reference import (
    Gradients,
    Item,
    big_batches,
    equal,
    error,
    errors,
    grads,
    items,
    loss,
    net,
    parameters,
    sgd,
    windows_of,
)

SIZES = [3, 8, 1, 5, 2, 9, 4]


# -- reading ahead --------------------------------------------------------------------------


def ahead(batches: Iterable[Item], count: int) -> Iterator[Item]:
    """`count` items are fetched, then their blocks run."""
    batches = iter(batches)
    while window := list(itertools.islice(batches, count)):
        yield from window


def read_ahead(rank: int, counts: tuple[int, ...], size: int, sync: str) -> Any:
    """Two passes in windows of four."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(4, optimizer=sgd(ddp.parameters()), sync=sync)
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    for pass_ in range(2):
        for item in ahead(accum.batches(items(rank, SIZES[: counts[rank]], pass_)), size):
            with accum(ddp, weight=len(item[0])):
                accum.backward(loss(ddp, item))
    return seen, parameters(ddp), (accum.updates, accum.pending, accum.epoch)


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_loop_that_reads_ahead_is_right_on_ranks_with_even_data(
    ranks: Ranks, world: int, size: int, sync: str
) -> None:
    """Windows of four and three, whatever the loop has fetched."""
    results = ranks.run(world, read_ahead, (7,) * world, size, sync)
    windows = [
        window
        for pass_ in range(2)
        for window in windows_of([items(r, SIZES, pass_) for r in range(world)], 4)
    ]
    expected, weights = big_batches(windows)
    for seen, after, counters in results:
        assert counters == (4, 0, 2)
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13
    assert equal([after for _, after, _ in results])


def test_uneven_data_are_right_where_accum_takes_the_step(ranks: Ranks) -> None:
    """The rank whose data end first joins behind its last block."""
    results = ranks.run(2, read_ahead, (7, 5), 4, "last")
    windows = [
        window
        for pass_ in range(2)
        for window in windows_of([items(0, SIZES, pass_), items(1, SIZES[:5], pass_)], 4)
    ]
    expected, weights = big_batches(windows)
    for seen, after, counters in results:
        assert counters == (4, 0, 2)
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13


# -- one item, several blocks ---------------------------------------------------------------


def cut(rank: int, world: int, steps: int | None, sync: str, weigh: bool) -> Any:
    """Items of other sizes on each rank, so of other numbers of parts of two rows."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(steps, optimizer=sgd(ddp.parameters()), sync=sync)
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    data = items(rank, [3, 8 - rank, 1 + 2 * rank])
    for batch in accum.batches(data, weigh=(lambda b: len(b[0])) if weigh else None):
        for part in accum.split(batch, 2):
            with accum(ddp, weight=1 if weigh else len(part[0])):
                accum.backward(loss(ddp, part))
    return seen, parameters(ddp), (accum.pending, accum.epoch)


def parts(rank: int) -> list[Item]:
    """What `cut` trains on, part by part."""
    return [
        part
        for x, y in items(rank, [3, 8 - rank, 1 + 2 * rank])
        for part in zip(x.split(2), y.split(2), strict=True)
    ]


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts_of_other_numbers_on_each_rank_count_like_micro_batches(
    ranks: Ranks, world: int, sync: str
) -> None:
    """Windows of four parts; who has none left takes part with nothing."""
    results = ranks.run(world, cut, world, 4, sync, False)
    expected, weights = big_batches(windows_of([parts(r) for r in range(world)], 4))
    for seen, after, counters in results:
        assert counters == (0, 1)
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13
    assert equal([after for _, after, _ in results])


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_without_steps_one_item_of_each_rank_is_one_update(
    ranks: Ranks, world: int, weigh: bool
) -> None:
    """However many parts it has on each."""
    results = ranks.run(world, cut, world, None, "last", weigh)
    data = [items(r, [3, 8 - r, 1 + 2 * r]) for r in range(world)]
    expected, weights = big_batches(windows_of(data, 1))
    for seen, after, counters in results:
        assert counters == (0, 1)
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13


def budget(rank: int, closes: tuple[int, int]) -> Any:
    """Windows that blocks close, after other numbers of micro-batches on each rank."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(None, optimizer=sgd(ddp.parameters()))
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    for index, item in enumerate(items(rank, SIZES[: closes[1] + 1])):
        with accum(ddp, weight=len(item[0]), closes=index in closes):
            accum.backward(loss(ddp, item))
    return seen, parameters(ddp), accum.syncs


def budgets(rank: int) -> Any:
    """Ranks close their two windows at other places."""
    return budget(rank, [(2, 4), (0, 5)][rank])


def test_ranks_may_have_other_numbers_of_micro_batches_in_a_window(ranks: Ranks) -> None:
    """But not of windows; one reduction each."""
    results = ranks.run(2, budgets)
    first, second = items(0, SIZES), items(1, SIZES)
    windows = [[*first[:3], *second[:1]], [*first[3:5], *second[1:6]]]
    expected, weights = big_batches(windows)
    for seen, after, syncs in results:
        assert syncs == 2
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13


# -- parameters that no wrapper reduces -----------------------------------------------------


class Scaled(nn.Module):
    """A criterion with a parameter of its own: a learnable temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean over the rows."""
        return nn.functional.mse_loss(output * self.scale, target)


def unwrapped(rank: int, case: str, sync: str) -> Any:
    """The first layer is unfrozen behind the wrapping, or the criterion has a parameter."""
    model, criterion = net(), Scaled()
    if case == "unfrozen":
        model[0].requires_grad_(False)  # type: ignore[index]
    ddp = DistributedDataParallel(model)
    model.requires_grad_(True)
    owned = [*model.parameters(), *criterion.parameters()]
    accum = Accumulator(3, optimizer=sgd(owned), sync=sync)
    for x, y in accum.batches(items(rank, SIZES)):
        with accum(ddp, weight=len(x)):
            accum.backward(criterion(ddp(x), y))
    return [p.detach().clone() for p in owned]


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("case", ["unfrozen", "in the criterion"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parameters_that_no_wrapper_reduces_are_reduced_with_the_rest(
    ranks: Ranks, world: int, case: str, sync: str
) -> None:
    """All that the optimizer steps: one big batch in one process has the same weights."""
    results = ranks.run(world, unwrapped, case, sync)
    model, criterion = net(), Scaled()
    owned = [*model.parameters(), *criterion.parameters()]
    optimizer = sgd(owned)
    for window in windows_of([items(r, SIZES) for r in range(world)], 3):
        x, y = (torch.cat(part) for part in zip(*window, strict=True))
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    for found in results:
        assert error(found, [p.detach() for p in owned]) <= 1e-13
    assert equal(results)


# -- fully_shard and a micro-batch without targets ------------------------------------------


def branches() -> list[nn.Module]:
    """Two models, the same on each rank, whose outputs are added."""
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), nn.Linear(3, 2)]


def without_targets(rank: int, world: int, sync: str, count: int) -> Any:
    """Micro-batch 1 of rank 0 and 2 of the last rank have no targets: their loss is NaN."""
    models: Any = branches()[:count]
    fully_shard(models[0][0])
    for model in models:
        fully_shard(model)
    owned = [p for model in models for p in model.parameters()]
    accum = Accumulator(2, optimizer=torch.optim.AdamW(owned, lr=0.1), sync=sync)
    warnings.filterwarnings("ignore", "deferring the reduction")
    for index, (x, y) in enumerate(items(rank, SIZES[:4])):
        empty = (rank, index) in ((0, 1), (world - 1, 2))
        with accum(*models, weight=0 if empty else len(x)):
            value = nn.functional.mse_loss(sum(model(x) for model in models), y)
            accum.backward(value * float("nan") if empty else value)
    return [p.full_tensor().detach() for p in owned], accum.last.loss  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [1, 2], ids=["one root", "two roots"])
@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_loss_of_nan_with_weight_0_under_fully_shard_adds_nothing(
    ranks: Ranks, world: int, sync: str, count: int
) -> None:
    """Its backward runs with those of the other ranks, from zeros at the outputs of all roots."""
    results = ranks.run(world, without_targets, world, sync, count)
    models = branches()[:count]
    owned = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.AdamW(owned, lr=0.1)
    for start in (0, 2):
        window = [
            item
            for rank in range(world)
            for index, item in enumerate(items(rank, SIZES[:4]))
            if start <= index < start + 2 and (rank, index) not in ((0, 1), (world - 1, 2))
        ]
        x, y = (torch.cat(part) for part in zip(*window, strict=True))
        optimizer.zero_grad()
        value = nn.functional.mse_loss(sum(model(x) for model in models), y)
        value.backward()
        optimizer.step()
    for found, last in results:
        assert error(found, [p.detach() for p in owned]) <= 1e-10  # AdamW's division
        assert last == pytest.approx(value.item(), rel=1e-9)


# -- what can't be made right ---------------------------------------------------------------


def never_run(rank: int) -> None:
    """Rank 1 has one item and leaves it out: it never sees the module that rank 0 reduces."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()))
    for item in accum.batches(items(rank, [3])):
        if rank == 0:
            with accum(ddp):
                accum.backward(loss(ddp, item))


def test_a_rank_that_has_run_no_block_says_what_it_needs(ranks: Ranks) -> None:
    """Without data from the start it is joined by hand; with an item that it leaves out, not."""
    with pytest.raises(RankError, match=r"give them to the Accumulator: models=\[\.\.\.\]"):
        ranks.run(2, never_run)
