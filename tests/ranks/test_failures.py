"""Exceptions, windows thrown away, and gradients that are not finite, on some ranks or on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator, NonFiniteError, TornWindowError

from .harness import Ranks
from .reference import (
    Gradients,
    Item,
    big_batches,
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
)

SIZES = [[3, 8, 1, 5], [7, 2, 2, 6], [4, 1, 9, 2]]
Trained = tuple[list[Gradients], list[Tensor], Any]


def data_of(*indices: tuple[int, ...]) -> list[Item]:
    """Of each rank the micro-batches of these indices."""
    return [items(rank, SIZES[rank])[i] for rank, own in enumerate(indices) for i in own]


def check(results: Any, windows: list[list[Item]]) -> None:
    """All ranks have made the updates that plain torch makes of `windows`."""
    expected, weights = big_batches(windows)
    for seen, after, _ in results:
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13
    assert equal([after for _, after, _ in results])


class Loop:
    """DDP, an Accumulator that takes the step, and what it has seen."""

    def __init__(self, rank: int, steps: int = 2, **options: Any) -> None:
        self.ddp = DistributedDataParallel(net())
        self.items = items(rank, SIZES[rank])
        self.accum = Accumulator(steps, optimizer=sgd(self.ddp.parameters()), **options)
        self.seen: list[Gradients] = []
        self.accum.on_update(lambda: self.seen.append(grads(self.ddp)))

    def block(self, index: int, factor: float = 1.0, weight: Any = None) -> None:
        """One micro-batch, its loss times `factor`."""
        item = self.items[index]
        with self.accum(self.ddp, weight=len(item[0]) if weight is None else weight):
            self.accum.backward(loss(self.ddp, item) * factor)

    def fail(self, index: int, after: str) -> None:
        """An exception in a block, before its backward or after it."""
        item = self.items[index]
        with pytest.raises(KeyError, match="bad"), self.accum(self.ddp, weight=len(item[0])):
            value = loss(self.ddp, item)
            if after == "backward":
                self.accum.backward(value)
            raise KeyError("bad")
        assert self.ddp.require_backward_grad_sync, "no_sync is left"

    def result(self, more: Any = None) -> Trained:
        """What a program returns."""
        return self.seen, parameters(self.ddp), more


def fail_before_backward(rank: int, where: str, who: str) -> Trained:
    """A forward fails in the first or the closing micro-batch; the loop goes on behind it."""
    loop = Loop(rank)
    if where == "closing":
        loop.block(0)
    if who == "all" or rank == 1:
        loop.fail(3, "forward")
    if where == "first":
        loop.block(0)
    loop.block(1)
    loop.block(2)
    loop.block(3)
    return loop.result()


@pytest.mark.parametrize("where", ["first", "closing"])
@pytest.mark.parametrize("who", ["all", "one"])
def test_a_micro_batch_whose_forward_fails_does_not_count(
    ranks: Ranks, where: str, who: str
) -> None:
    """The window is filled by the next ones, with no_sync restored."""
    results = ranks.run(2, fail_before_backward, where, who)
    check(results, [data_of((0, 1), (0, 1)), data_of((2, 3), (2, 3))])


def fail_after_backward(rank: int, where: str) -> Trained:
    """A block fails when something was added; the window is torn until it is thrown away."""
    loop = Loop(rank)
    if where == "closing":
        loop.block(2)
    loop.fail(3, "backward")
    with pytest.raises(TornWindowError, match=r"KeyError in micro-batch.*discard\(\)"):
        loop.block(0)
    loop.accum.discard()
    assert loop.accum.pending == 0
    for index in range(4):
        loop.block(index)
    return loop.result()


@pytest.mark.parametrize("where", ["first", "closing"])
def test_a_torn_window_is_thrown_away_as_a_whole(ranks: Ranks, where: str) -> None:
    """The windows after it are right, also if it had been reduced already."""
    results = ranks.run(2, fail_after_backward, where)
    check(results, [data_of((0, 1), (0, 1)), data_of((2, 3), (2, 3))])


def discard_heads(rank: int, way: str) -> Any:
    """Head b is used in a window that never becomes an update, and not again."""
    ddp = DistributedDataParallel(forked(), find_unused_parameters=True)
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()), nonfinite="skip_window")
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    data = items(rank, SIZES[rank])

    def block(index: int, names: str, factor: float = 1.0, weight: Any = 1) -> None:
        with accum(ddp, weight=weight):
            accum.backward(ddp(data[index][0], names).square().mean() * factor)

    if way == "discard":
        block(0, "ab")
        accum.discard()
    elif way == "not finite":
        block(0, "ab", float("inf"))
        block(1, "a")
    else:
        block(0, "ab", weight=torch.tensor(0))
        block(1, "a", weight=torch.tensor(0))
    assert accum.updates == 0
    block(2, "a")
    block(3, "a")
    return seen, parameters(ddp), None


@pytest.mark.parametrize("way", ["discard", "not finite", "weight 0"])
def test_heads_of_a_discarded_window_are_forgotten(ranks: Ranks, way: str) -> None:
    """DDP keeps marks of what was used since its last reduction."""
    results = ranks.run(2, discard_heads, way)
    model = forked()
    losses = [model(item[0], "a").square().mean() for item in data_of((2, 3), (2, 3))]
    (sum(losses) / 4).backward()
    for seen, _, _ in results:
        assert errors(seen, [grads(model)]) <= 1e-13
    assert equal([after for _, after, _ in results])


def take_back_heads(rank: int, bad: int) -> Any:
    """Head b is used in rank 1's third micro-batch only; `bad` is left out again."""
    ddp = DistributedDataParallel(forked(), find_unused_parameters=True)
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()), nonfinite="skip_micro_batch")
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    for index, item in enumerate(items(rank, SIZES[rank])):
        with accum(ddp):
            value = ddp(item[0], "ab" if rank == 1 and index == 2 else "a").square().mean()
            accum.backward(value * float("nan") if rank == 1 and index == bad else value)
    return seen, parameters(ddp), None


@pytest.mark.parametrize("bad", [2, 3])
def test_heads_of_a_micro_batch_that_is_left_out_are_forgotten(ranks: Ranks, bad: int) -> None:
    """And only those: a head that another one has used is reduced, one that none has is not."""
    results = ranks.run(2, take_back_heads, bad)
    model = forked()
    optimizer, expected = sgd(model.parameters()), []
    left = [("a", item) for item in data_of((2, 3), ())]
    left += [("ab" if bad == 3 else "a", data_of((), (5 - bad,))[0])]
    for window in ([("a", item) for item in data_of((0, 1), (0, 1))], left):
        optimizer.zero_grad()
        losses = [model(item[0], heads).square().mean() for heads, item in window]
        (torch.stack(losses).sum() / len(losses)).backward()
        expected.append(grads(model))
        optimizer.step()
    for seen, _, _ in results:
        assert errors(seen, expected) <= 1e-13
    assert equal([after for _, after, _ in results])


def discard_on_one(rank: int, sync: str, unused: bool) -> Trained:
    """Rank 1 fails after its backward, and throws its own share of the window away."""
    ddp = DistributedDataParallel(net(), find_unused_parameters=unused)
    accum = Accumulator(3, optimizer=sgd(ddp.parameters()), sync=sync)
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    for index, item in enumerate(accum.batches(items(rank, SIZES[rank]))):
        try:
            with accum(ddp, weight=len(item[0])):
                accum.backward(loss(ddp, item))
                if rank == 1 and index == 1:
                    raise KeyError("bad")
        except KeyError:
            accum.discard()
    return seen, parameters(ddp), accum.micro_batches


@pytest.mark.parametrize("unused", [False, True], ids=["", "find_unused"])
def test_one_rank_may_throw_its_share_away(ranks: Ranks, unused: bool) -> None:
    """What the others have in the window is not touched by it."""
    results = ranks.run(2, discard_on_one, "last", unused)
    check(results, [data_of((0, 1, 2), (2, 3)), data_of((3,), ())])


def discard_closing(rank: int, everywhere: bool, unused: bool) -> Trained:
    """Fail between forward and backward of the first and third closing micro-batch, start again."""
    ddp = DistributedDataParallel(net(), find_unused_parameters=unused)
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()))
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    data = items(rank, SIZES[rank])
    for number in range(4):
        window = data[2 * (number % 2) :][:2]
        for fails in [True, False] if number % 2 == 0 and (everywhere or rank) else [False]:
            for index, item in enumerate(window):
                try:
                    with accum(ddp, weight=len(item[0])):
                        value = loss(ddp, item)
                        if fails and index == 1:
                            raise KeyError("bad")
                        accum.backward(value)
                except KeyError:
                    accum.discard()
    return seen, parameters(ddp), accum.updates


@pytest.mark.parametrize("unused", [False, True], ids=["", "find_unused"])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_a_forward_of_a_closing_micro_batch_may_be_thrown_away(
    ranks: Ranks, world: int, everywhere: bool, unused: bool
) -> None:
    """DDP's reducer, which waits for its backward, is brought to rest on that rank alone."""
    results = ranks.run(world, discard_closing, everywhere, unused)
    data = [items(rank, SIZES[rank]) for rank in range(world)]
    windows = [[i for own in data for i in own[start : start + 2]] for start in (0, 2, 0, 2)]
    check(results, windows)


def flush_early(rank: int, pending: list[int], loop_steps: bool, tail: str) -> Trained:
    """All ranks close the window when they have `pending` micro-batches each."""
    ddp = DistributedDataParallel(net())
    optimizer = sgd(ddp.parameters())
    accum = Accumulator(4, optimizer=None if loop_steps else optimizer, tail=tail)
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    data = items(rank, SIZES[rank])
    for item in data[: pending[rank]]:
        with accum(ddp, weight=len(item[0])):
            accum.backward(loss(ddp, item))
    assert accum.flush() == any(pending)
    if loop_steps and any(pending):
        optimizer.step()
        optimizer.zero_grad()
    assert not accum.flush()
    for item in data:
        with accum(ddp, weight=len(item[0])) as micro:
            accum.backward(loss(ddp, item))
        if loop_steps and micro.closes:
            optimizer.step()
            optimizer.zero_grad()
    return seen, parameters(ddp), (accum.updates, accum.pending)


# a rank that has run no block knows the model by its optimizer only
PENDING = [(pending, False) for pending in ([3, 1], [2, 2], [1, 0], [0, 2], [0, 0])]
PENDING += [([3, 1], True), ([2, 2], True)]


@pytest.mark.parametrize("tail", ["flush", "drop"])
@pytest.mark.parametrize(("pending", "loop_steps"), PENDING, ids=str)
def test_flush_closes_what_any_rank_has(
    ranks: Ranks, pending: list[int], loop_steps: bool, tail: str
) -> None:
    """Whatever becomes of a tail, it reduces by itself, and a rank with nothing takes part."""
    results = ranks.run(2, flush_early, pending, loop_steps, tail)
    first = data_of(tuple(range(pending[0])), tuple(range(pending[1])))
    whole = data_of((0, 1, 2, 3), (0, 1, 2, 3))
    check(results, [first, whole] if first else [whole])


def window_of_nothing(rank: int, kind: str) -> Any:
    """A window whose weights are 0 on all ranks, between two that are right."""
    ddp = DistributedDataParallel(net())
    optimizer = sgd(ddp.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    accum = Accumulator(2, optimizer=optimizer, scheduler=scheduler)
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    data = items(rank, SIZES[rank])
    for index, item in enumerate([data[0], data[1], data[2], data[3], data[2], data[3]]):
        out = index in (2, 3)
        factor = float("nan") if out and kind == "number" else 1.0
        weight: Any = 0 if out else len(item[0])
        with accum(ddp, weight=torch.tensor(weight) if kind == "tensor" else weight):
            accum.backward(loss(ddp, item) * factor)
        if index == 3:
            assert all(p.grad is None for p in ddp.parameters())
            assert accum.last is not None
            assert (accum.last.stepped, accum.last.weight) == (False, 0.0)
    assert scheduler.last_epoch == 2
    return seen, parameters(ddp), (accum.windows, accum.updates, accum.skipped)


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_window_without_weight_is_no_update(ranks: Ranks, kind: str) -> None:
    """The scheduler stays, no gradient is left, and the next window is right."""
    results = ranks.run(2, window_of_nothing, kind)
    check(results, [data_of((0, 1), (0, 1)), data_of((2, 3), (2, 3))])
    assert [counters for _, _, counters in results] == [(3, 2, 1)] * 2


def one_bad_rank(rank: int, nonfinite: str, scaled: bool, sync: str, factor: float) -> Trained:
    """Rank 1's second micro-batch is not finite; then a good window follows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    loop = Loop(rank, nonfinite=nonfinite, scaler=scaler, sync=sync)
    before = parameters(loop.ddp)
    loop.block(0)
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError, match="not finite"):
            loop.block(1, factor if rank == 1 else 1.0)
        assert all(map(torch.equal, before, parameters(loop.ddp)))
        with pytest.raises(TornWindowError):
            loop.block(2)
        loop.accum.discard()
    else:
        loop.block(1, factor if rank == 1 else 1.0)
    loop.block(2)
    loop.block(3)
    accum = loop.accum
    scale = scaler.get_scale() if scaler is not None else 1.0
    return loop.result((scale, accum.windows, accum.updates, accum.skipped, accum.micro_batches))


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize("nonfinite", ["skip_window", "skip_micro_batch", "raise"])
def test_one_rank_with_a_gradient_of_nan(
    ranks: Ranks, nonfinite: str, scaled: bool, sync: str
) -> None:
    """All ranks do the same about it, and keep the same scale."""
    results = ranks.run(2, one_bad_rank, nonfinite, scaled, sync, float("nan"))
    good = data_of((2, 3), (2, 3))
    keeps = nonfinite == "skip_micro_batch"
    check(results, [data_of((0, 1), (0,)), good] if keeps else [good])
    halved = 512.0 if nonfinite == "skip_window" else 1024.0
    scales = {(result[2][0]) for result in results}
    if nonfinite == "raise":
        assert len(scales) == 1
        assert {result[2][2] for result in results} == {1}
    else:
        assert scales == {halved if scaled else 1.0}
        assert {result[2][1:4] for result in results} == {(2, 2, 0) if keeps else (2, 1, 1)}


@pytest.mark.parametrize("nonfinite", ["skip_window", "skip_micro_batch"])
def test_one_rank_that_overflows(ranks: Ranks, nonfinite: str) -> None:
    """The loss is finite, and only its scale is too large: the scale backs off on all ranks."""
    results = ranks.run(2, one_bad_rank, nonfinite, True, "last", 1e307)
    good = data_of((2, 3), (2, 3))
    check(results, [data_of((0, 1), (0,)), good] if nonfinite != "skip_window" else [good])
    assert {result[2][0] for result in results} == {512.0}


def scaled_uneven(rank: int, counts: list[int]) -> Trained:
    """A scaler that grows every window, while ranks end."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    loop = Loop(rank, scaler=scaler, max_grad_norm=0.5)
    for item in loop.accum.batches(loop.items[: counts[rank]]):
        with loop.accum(loop.ddp, weight=len(item[0])):
            loop.accum.backward(loss(loop.ddp, item))
    return *loop.result()[:2], scaler.get_scale()


@pytest.mark.parametrize("counts", [[4, 1], [0, 3]], ids=str)
def test_a_scaler_and_clipping_while_ranks_end(ranks: Ranks, counts: list[int]) -> None:
    """The scale doubles with each update on all ranks; clipped as plain torch clips."""
    results = ranks.run(2, scaled_uneven, counts)
    own = [items(r, SIZES[r])[:count] for r, count in enumerate(counts)]
    windows = [[i for o in own for i in o[start : start + 2]] for start in range(0, 4, 2)]
    _, weights = big_batches(windows, clip=0.5)
    for _, after, scale in results:
        assert scale == 8.0 * 2**2
        assert error(after, weights) <= 1e-7  # unscale_ multiplies by 1/scale in fp32
    assert equal([after for _, after, _ in results])
