"""The gradient of a window over several ranks is that of one big batch in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator

from .harness import Ranks
from .reference import (
    Gradients,
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

SIZES = [[3, 8, 1, 5, 2, 9, 4], [7, 2, 2, 6, 1, 1, 3], [4, 4, 10, 2, 5, 3, 8]]
"""Samples in each micro-batch of each rank."""


def train(
    rank: int, sizes: list[list[int]], steps: int, weights: str, **options: Any
) -> tuple[list[Gradients], list[Tensor], list[float]]:
    """Gradients of all updates, parameters at the end, and losses of all windows."""
    ddp = DistributedDataParallel(net())
    optimizer = sgd(ddp.parameters())
    accum = Accumulator(steps, optimizer=optimizer, **options)
    seen: list[Gradients] = []
    losses: list[float] = []

    @accum.on_update
    def note() -> None:
        seen.append(grads(ddp))
        assert accum.last is not None
        losses.append(accum.last.loss)

    weigh = (lambda item: len(item[0])) if weights == "weigh" else None
    for item in accum.batches(items(rank, sizes[rank]), weigh=weigh):
        count = len(item[0])
        in_block = {"number": count, "tensor": torch.tensor(count)}.get(weights, 1)
        with accum(ddp, weight=in_block):
            value = loss(ddp, item)
            if weights == "backward":
                accum.backward(value, weight=count)
            elif weights == "sum":
                accum.backward(value * count, weight=count, reduction="sum")
            elif weights == "some" and rank == 0:
                accum.backward(value, weight=torch.tensor(float(count)))
            elif weights == "some":
                accum.backward(value, weight=count)
            else:
                accum.backward(value)
    assert accum.pending == 0
    assert all(p.grad is None for p in ddp.parameters())
    return seen, parameters(ddp), losses


@pytest.mark.parametrize("weights", ["number", "tensor", "backward", "sum", "some", "weigh"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_windows_equal_big_batches(ranks: Ranks, world: int, weights: str) -> None:
    """Over tails, uneven weights and however they are given; the same bits on each rank."""
    results = ranks.run(world, train, SIZES, 3, weights)
    data = [items(rank, SIZES[rank]) for rank in range(world)]
    expected, weights_after = big_batches(windows_of(data, 3))
    for seen, after, _ in results:
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights_after) <= 1e-13
    assert equal([after for _, after, _ in results])


@pytest.mark.parametrize("sync", ["last", "every"])
def test_ranks_count_by_their_tokens(ranks: Ranks, sync: str) -> None:
    """[10, 100] tokens on one rank and [5, 3] on the other: the mean over 118."""
    sizes = [[10, 100], [5, 3]]
    results = ranks.run(2, train, sizes, 2, "number", sync=sync)
    expected, _ = big_batches(windows_of([items(r, sizes[r]) for r in range(2)], 2))
    for seen, _, _ in results:
        assert errors(seen, expected) <= 1e-13


@pytest.mark.parametrize("world", [2, 3])
def test_the_loss_of_a_window_is_that_of_the_big_batch(ranks: Ranks, world: int) -> None:
    """The weighted mean over all ranks, on each rank."""
    results = ranks.run(world, train, SIZES, 3, "number")
    model, expected = net(), []
    optimizer = sgd(model.parameters())
    for window in windows_of([items(r, SIZES[r]) for r in range(world)], 3):
        whole = torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])
        optimizer.zero_grad()
        value = loss(model, whole)
        value.backward()
        optimizer.step()
        expected.append(value.item())
    for _, _, losses in results:
        assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_sync_in_every_micro_batch_gives_the_same_gradient(ranks: Ranks, world: int) -> None:
    """The same updates, in a different order of summation."""
    results = ranks.run(world, train, SIZES, 3, "number", sync="every")
    data = [items(rank, SIZES[rank]) for rank in range(world)]
    expected, weights_after = big_batches(windows_of(data, 3))
    for seen, after, _ in results:
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights_after) <= 1e-13
    assert equal([after for _, after, _ in results])


@pytest.mark.parametrize("weights", ["tensor", "weigh"])
def test_other_weights_with_sync_in_every_micro_batch(ranks: Ranks, weights: str) -> None:
    """Tensors that nobody reads, and totals that are known before."""
    results = ranks.run(2, train, SIZES[:2], 3, weights, sync="every")
    expected, _ = big_batches(windows_of([items(r, SIZES[r]) for r in range(2)], 3))
    for seen, _, _ in results:
        assert errors(seen, expected) <= 1e-13


def textbook(rank: int, dtype: torch.dtype) -> list[tuple[int, float | None]]:
    """For which steps and weights DDP with no_sync and loss / steps has other bits than accum."""
    torch.set_default_dtype(dtype)
    return [
        (steps, weight)
        for steps in (1, 3, 4, 7)
        for weight in (None, 0.1, 1000)
        if not torch.equal(by_hand(rank, steps), by_accum(rank, steps, weight))
    ]


def by_hand(rank: int, steps: int) -> Tensor:
    """The weights after two windows of the textbook loop."""
    ddp = DistributedDataParallel(net())
    optimizer = sgd(ddp.parameters())
    for index, item in enumerate(items(rank, [4] * 2 * steps)):
        if (index + 1) % steps:
            with ddp.no_sync():
                (loss(ddp, item) / steps).backward()
        else:
            (loss(ddp, item) / steps).backward()
            optimizer.step()
            optimizer.zero_grad()
    return nn.utils.parameters_to_vector(ddp.parameters())


def by_accum(rank: int, steps: int, weight: float | None) -> Tensor:
    """The same of accum."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(steps, optimizer=sgd(ddp.parameters()))
    for item in items(rank, [4] * 2 * steps):
        with accum(ddp, weight=1 if weight is None else weight):
            accum.backward(loss(ddp, item))
    return nn.utils.parameters_to_vector(ddp.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("world", [2, 3])
def test_full_windows_have_the_bits_of_the_textbook(
    ranks: Ranks, world: int, dtype: torch.dtype
) -> None:
    """For steps that are a power of two or not, and equal weights that are not 1."""
    assert ranks.run(world, textbook, dtype) == [[]] * world


def in_fp32(rank: int, sizes: list[list[int]]) -> Gradients:
    """The gradient of one window of fp32, with weights of thousands."""
    torch.set_default_dtype(torch.float32)
    ddp = DistributedDataParallel(net())
    accum = Accumulator(len(sizes[rank]))
    for item in items(rank, sizes[rank]):
        with accum(ddp, weight=1000 * len(item[0])):
            accum.backward(loss(ddp, item))
    return grads(ddp)


def test_fp32_is_right_within_its_precision(ranks: Ranks) -> None:
    """Relative error of at most 1e-5."""
    results = ranks.run(2, in_fp32, SIZES[:2])
    torch.set_default_dtype(torch.float32)
    (expected,), _ = big_batches(windows_of([items(r, SIZES[r]) for r in range(2)], 7))
    for seen in results:
        assert error(seen, expected) <= 1e-5
    assert equal(results)


def two_terms(rank: int) -> Gradients:
    """A token mean with an auxiliary term that is a mean over micro-batches."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()))
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    sizes = ([3, 9], [5])[rank]
    for item in accum.batches(items(rank, sizes), weigh=lambda item: len(item[0])):
        with accum(ddp):
            output = ddp(item[0])
            main = nn.functional.mse_loss(output, item[1])
            accum.backward(main, extra=output.square().mean())
    assert len(seen) == 1
    return seen[0]


def test_an_extra_term_has_its_own_denominator(ranks: Ranks) -> None:
    """Over ranks with different numbers of micro-batches, too."""
    results = ranks.run(2, two_terms)
    model = net()
    data = [*items(0, [3, 9]), *items(1, [5])]
    whole = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    extra = sum(model(x).square().mean() for x, _ in data) / 3
    (loss(model, whole) + extra).backward()
    for seen in results:
        assert error(seen, grads(model)) <= 1e-13
