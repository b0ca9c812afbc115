"""Micro-batches that add nothing on one rank only: the others do not wait for ever, and the
window is the mean over what is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator

from .harness import Ranks
from .reference import (
    Gradients,
    Item,
    big_batches,
    counting,
    equal,
    error,
    errors,
    forked,
    grads,
    items,
    loss,
    net,
    parameters,
    sgd,
    windows_of,
)

SIZES = [3, 8, 1, 5, 2]
WAYS = ["weight", "backward", "skip", "skip after forward", "no backward"]
"""How a micro-batch is left out: a loss of NaN with weight 0, or none at all."""
OUT = {
    "closing": [[], [1]],
    "first": [[], [0]],
    "first window": [[], [0, 1]],
    "second window": [[], [2, 3]],
    "tail": [[], [4]],
    "closing of all": [[1], [1]],
    "closing of the other": [[1, 4], []],
    "all but one": [[0, 2, 3], [1, 2]],
}
"""Indices of what each rank leaves out."""
MODELS = {"plain": (net, {}), "unused": (net, {"find_unused_parameters": True})}
MODELS |= {
    "buffers": (counting, {}),
    "bucket view": (net, {"gradient_as_bucket_view": True}),
    "unused and buffers": (counting, {"find_unused_parameters": True}),
    "last unused": (forked, {"find_unused_parameters": True}),
}


def leave_out(accum: Accumulator, ddp: nn.Module, item: Item, way: str) -> None:
    """One block that adds nothing."""
    if way in ("weight", "no backward"):
        with accum(ddp, weight=0):
            if way == "weight":
                accum.backward(loss(ddp, item) * float("nan"))
    elif way == "backward":
        with accum(ddp):
            accum.backward(loss(ddp, item) * float("nan"), weight=0)
    else:
        with accum(ddp) as micro:
            if way == "skip after forward":
                loss(ddp, item)
            micro.skip()


def train(
    rank: int, model: str, way: str, out: list[list[int]], steps: int, batches: bool, **options: Any
) -> tuple[list[Gradients], list[Tensor], tuple[int, int, int]]:
    """Gradients of the updates, parameters, and windows, updates and pending micro-batches."""
    make, wrap_with = MODELS[model]
    ddp = DistributedDataParallel(make(), **wrap_with)
    accum = Accumulator(steps, optimizer=sgd(ddp.parameters()), **options)
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    data: Iterable[Item] = items(rank, SIZES)
    for index, item in enumerate(accum.batches(data) if batches else data):
        if index in out[rank]:
            leave_out(accum, ddp, item, way)
        else:
            with accum(ddp, weight=len(item[0])):
                accum.backward(loss(ddp, item))
    if not batches:
        accum.flush()
    assert all(p.grad is None for p in ddp.parameters())
    return seen, parameters(ddp), (accum.windows, accum.updates, accum.pending)


def train_all(rank: int, model: str, way: str, steps: int, batches: bool) -> list[Any]:
    """`train` for each of `OUT`."""
    return [train(rank, model, way, out, steps, batches) for out in OUT.values()]


def windows(out: list[list[int]], steps: int) -> Iterator[list[Item]]:
    """What is left in each window that has something left."""
    for start in range(0, len(SIZES), steps):
        window = [
            item
            for rank in range(len(out))
            for index, item in enumerate(items(rank, SIZES))
            if start <= index < start + steps and index not in out[rank]
        ]
        if window:
            yield window


def check(results: Any, out: list[list[int]], steps: int, model: nn.Module) -> None:
    """All ranks have made the updates that plain torch makes of what is left."""
    left = list(windows(out, steps))
    expected, weights = big_batches(left, model)
    for seen, after, counters in results:
        assert counters == (-(-len(SIZES) // steps), len(left), 0)
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13
    assert equal([after for _, after, _ in results])


def check_all(results: Any, steps: int, model: str) -> None:
    """`check` for each of `OUT`."""
    for index, out in enumerate(OUT.values()):
        check([result[index] for result in results], out, steps, MODELS[model][0]())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_the_rest_is_the_window(ranks: Ranks, model: str, way: str) -> None:
    """Wherever it is in the window, and whatever DDP's options are; windows of two."""
    check_all(ranks.run(2, train_all, model, way, 2, True), 2, model)


@pytest.mark.parametrize("model", ["plain", "buffers", "unused"])
@pytest.mark.parametrize("way", ["weight", "skip"])
def test_the_rest_is_the_window_of_one(ranks: Ranks, model: str, way: str) -> None:
    """Where each micro-batch closes."""
    check_all(ranks.run(2, train_all, model, way, 1, True), 1, model)


@pytest.mark.parametrize("model", ["plain", "buffers", "unused"])
def test_the_rest_is_the_window_that_flush_closes(ranks: Ranks, model: str) -> None:
    """In a loop without batches, where flush reduces the tail."""
    check_all(ranks.run(2, train_all, model, "skip", 2, False), 2, model)


def end_without_block(rank: int, model: str, counts: list[int], sync: str) -> Any:
    """Rank 1 leaves out its last micro-batch by `continue`; its data end there, or the others' go
    on."""
    make, wrap_with = MODELS[model]
    ddp = DistributedDataParallel(make(), **wrap_with)
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()), sync=sync, models=[ddp])
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    for index, item in enumerate(accum.batches(items(rank, SIZES[: counts[rank]]))):
        if rank == 1 and index == counts[1] - 1:
            continue
        with accum(ddp, weight=len(item[0])):
            accum.backward(loss(ddp, item))
    return seen, parameters(ddp), accum.updates


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("counts", [[4, 4], [3, 3], [5, 2], [5, 3], [1, 1], [2, 5]], ids=str)
@pytest.mark.parametrize("model", ["plain", "buffers", "last unused"])
def test_an_item_without_a_block_at_the_end(
    ranks: Ranks, model: str, counts: list[int], sync: str
) -> None:
    """The window is closed all the same, with what is there."""
    results = ranks.run(2, end_without_block, model, counts, sync)
    own = [items(0, SIZES[: counts[0]]), items(1, SIZES[: counts[1] - 1])]
    expected, weights = big_batches(windows_of(own, 2), MODELS[model][0]())
    for seen, after, updates in results:
        assert updates == len(expected)
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13
    assert equal([after for _, after, _ in results])


def end_left_out(rank: int, model: str, way: str, counts: list[int]) -> Any:
    """Rank 1 leaves out the last of its micro-batches while rank 0 has more."""
    make, wrap_with = MODELS[model]
    ddp = DistributedDataParallel(make(), **wrap_with)
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()))
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    for index, item in enumerate(accum.batches(items(rank, SIZES[: counts[rank]]))):
        if rank == 1 and index == counts[1] - 1:
            leave_out(accum, ddp, item, way)
        else:
            with accum(ddp, weight=len(item[0])):
                accum.backward(loss(ddp, item))
    return seen, parameters(ddp), accum.updates


@pytest.mark.parametrize("way", ["weight", "skip", "skip after forward"])
@pytest.mark.parametrize("counts", [[5, 2], [5, 3], [2, 5]], ids=str)
@pytest.mark.parametrize("model", ["plain", "buffers", "last unused"])
def test_a_rank_that_leaves_out_its_last_micro_batch(
    ranks: Ranks, model: str, counts: list[int], way: str
) -> None:
    """The others go on with data of their own."""
    results = ranks.run(2, end_left_out, model, way, counts)
    own = [items(0, SIZES[: counts[0]]), items(1, SIZES[: counts[1] - 1])]
    expected, weights = big_batches(windows_of(own, 2), MODELS[model][0]())
    for seen, after, updates in results:
        assert updates == len(expected)
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13
    assert equal([after for _, after, _ in results])


def forward_twice(rank: int, model: str, out: list[int]) -> Any:
    """Two forwards and one backward in each block; rank 1 skips some."""
    make, wrap_with = MODELS[model]
    ddp = DistributedDataParallel(make(), **wrap_with)
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()))
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    for index, item in enumerate(items(rank, SIZES[:4])):
        with accum(ddp, weight=len(item[0])) as micro:
            if rank == 1 and index in out:
                micro.skip()
            else:
                accum.backward((loss(ddp, item) + loss(ddp, item)) / 2)
    return seen, parameters(ddp), accum.updates


@pytest.mark.parametrize("out", [[], [3], [2, 3]], ids=str)
@pytest.mark.parametrize("model", ["plain", "buffers", "unused and buffers"])
def test_two_forwards_in_a_block(ranks: Ranks, model: str, out: list[int]) -> None:
    """Each forward of a synced block would broadcast the buffers again."""
    results = ranks.run(2, forward_twice, model, out)
    first = items(0, SIZES[:4])
    second = items(1, SIZES[:4])
    left = [first[start : start + 2] for start in (0, 2)]
    for index in set(range(4)) - set(out):
        left[index // 2].append(second[index])
    expected, weights = big_batches(left, MODELS[model][0]())
    for seen, after, updates in results:
        assert updates == 2
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13
    assert equal([after for _, after, _ in results])
