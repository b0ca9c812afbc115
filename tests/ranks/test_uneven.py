"""Ranks whose data end early: all make the same updates, nothing hangs, nothing is lost."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator

from .harness import RankError, Ranks
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

SIZES = [3, 8, 1, 5, 2, 9, 4]
COUNTS = [(5, 2), (4, 3), (6, 4), (3, 4), (0, 3), (3, 0), (7, 3, 0), (0, 1, 4)]
"""Micro-batches of each rank."""


def train(
    rank: int,
    counts: tuple[int, ...],
    epochs: int = 1,
    weigh: bool = False,
    **options: Any,
) -> tuple[list[Gradients], list[Tensor], tuple[int, ...]]:
    """Gradients of all updates, the parameters after them, and the counters."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()), **options)
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    for epoch in range(epochs):
        data = items(rank, SIZES[: counts[rank]], epoch)
        for item in accum.batches(data, weigh=(lambda i: len(i[0])) if weigh else None):
            with accum(ddp, weight=1 if weigh else len(item[0])):
                accum.backward(loss(ddp, item))
    return seen, parameters(ddp), (accum.updates, accum.micro_batches, accum.epoch, accum.pending)


def data_of(counts: tuple[int, ...], epoch: int = 0) -> list[list[Item]]:
    """The micro-batches of each rank."""
    return [items(rank, SIZES[:count], epoch) for rank, count in enumerate(counts)]


def check(results: Any, windows: list[list[Item]]) -> None:
    """All ranks have made one update for each of `windows`, as plain torch makes it."""
    expected, weights = big_batches(windows)
    for seen, after, (updates, *_) in results:
        assert updates == len(windows)
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13
    assert equal([after for _, after, _ in results])


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_sample_counts_once(ranks: Ranks, counts: tuple[int, ...], sync: str) -> None:
    """Over two passes; a rank that never had data finds the model by its optimizer."""
    results = ranks.run(len(counts), train, counts, 2, sync=sync)
    check(results, [w for epoch in range(2) for w in windows_of(data_of(counts, epoch), 2)])
    for rank, (_, _, (_, micro_batches, epochs, pending)) in enumerate(results):
        assert (micro_batches, epochs, pending) == (2 * counts[rank], 2, 0)


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_sample_counts_once_with_look_ahead(
    ranks: Ranks, counts: tuple[int, ...], sync: str
) -> None:
    """With weigh= the ranks meet when a window opens, and stand in where they have fewer."""
    results = ranks.run(len(counts), train, counts, 2, weigh=True, sync=sync)
    check(results, [w for epoch in range(2) for w in windows_of(data_of(counts, epoch), 2)])


@pytest.mark.parametrize("sync", ["last", "every"])
def test_drop_leaves_out_what_no_rank_fills(ranks: Ranks, sync: str) -> None:
    """5 and 2 micro-batches in windows of 2: two updates, and the fifth is left out."""
    results = ranks.run(2, train, (5, 2), tail="drop", sync=sync)
    first, second = data_of((5, 2))
    check(results, [first[0:2] + second, first[2:4]])


def test_drop_with_nothing_to_fill(ranks: Ranks) -> None:
    """One and no micro-batches in windows of 2: no update, and no gradient."""
    for seen, _, counters in ranks.run(2, train, (1, 0), tail="drop"):
        assert not seen
        assert counters[0] == counters[3] == 0


@pytest.mark.parametrize("sync", ["last", "every"])
def test_carry_goes_on_in_the_next_pass(ranks: Ranks, sync: str) -> None:
    """5 and 4 micro-batches in windows of 2, twice: the fifth waits for the next pass."""
    results = ranks.run(2, train, (5, 4), 2, tail="carry", sync=sync)
    own = [a + b for a, b in zip(data_of((5, 4), 0), data_of((5, 4), 1), strict=True)]
    if sync == "every":  # micro-batches go in step, so that window 3 has one of each rank less
        first, second = own
        groups = [first[w : w + 2] for w in range(0, 10, 2)]
        others = [second[0:2], second[2:4], second[4:5], second[5:7], second[7:8]]
        check(results, [a + b for a, b in zip(groups, others, strict=True)])
    else:
        check(results, windows_of(own, 2))


HEADS = {
    "early on one rank": (["aa", "b"], ["a"]),
    "other heads on each rank": (["a", "a", "a", "b"], ["b", "b"]),
    "only a rank that has ended": (["a", "a", "a"], ["b"]),
    "nobody from the second window on": (["ab", "ab", "a", "a", "a"], ["ab", "ab"]),
}
"""Heads that each micro-batch of each rank uses."""


def train_heads(
    rank: int, heads: tuple[list[str], ...], **options: Any
) -> tuple[list[Gradients], list[Tensor], tuple[int, ...]]:
    """The same with heads that vary."""
    ddp = DistributedDataParallel(forked(), find_unused_parameters=True)
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()), **options)
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    own = heads[rank]
    for item, names in accum.batches(list(zip(items(rank, SIZES[: len(own)]), own, strict=True))):
        with accum(ddp):
            accum.backward(ddp(item[0], names).square().mean())
    return seen, parameters(ddp), (accum.updates,)


def windows_of_heads(heads: tuple[list[str], ...]) -> tuple[list[Gradients], list[Tensor]]:
    """Plain torch in one process: each window is a mean over its micro-batches."""
    model = forked()
    optimizer = sgd(model.parameters())
    gradients = []
    for start in range(0, max(len(own) for own in heads), 2):
        losses = [
            model(item[0], names).square().mean()
            for rank, own in enumerate(heads)
            for item, names in list(zip(items(rank, SIZES), own, strict=False))[start : start + 2]
        ]
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        gradients.append(grads(model))
        optimizer.step()
    return gradients, parameters(model)


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("case", HEADS)
def test_heads_that_vary_while_ranks_end(ranks: Ranks, case: str, sync: str) -> None:
    """With find_unused_parameters; a head that no rank uses in a window has no gradient."""
    results = ranks.run(2, train_heads, HEADS[case], sync=sync)
    expected, weights = windows_of_heads(HEADS[case])
    for seen, after, _ in results:
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13
    assert equal([after for _, after, _ in results])


def train_now_and_then(rank: int, passes: list[tuple[int, ...]], tensors: bool) -> Any:
    """Ranks that have data in some passes and none in others; weights that nobody reads."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()))
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    for epoch, counts in enumerate(passes):
        for item in accum.batches(items(rank, SIZES[: counts[rank]], epoch)):
            weight = torch.tensor(len(item[0])) if tensors else len(item[0])
            with accum(ddp, weight=weight):
                accum.backward(loss(ddp, item))
    return seen, parameters(ddp), (accum.updates,)


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize(
    "passes",
    [[(0, 3), (3, 0), (2, 2)], [(0, 0), (5, 1)], [(1, 4, 0), (0, 0, 5), (3, 1, 1)]],
    ids=str,
)
def test_ranks_with_data_now_and_then(
    ranks: Ranks, passes: list[tuple[int, ...]], tensors: bool
) -> None:
    """Each pass ends on all ranks together."""
    results = ranks.run(len(passes[0]), train_now_and_then, passes, tensors)
    check(
        results,
        [w for epoch, counts in enumerate(passes) for w in windows_of(data_of(counts, epoch), 2)],
    )


def flush_in_between(rank: int, at: int) -> Any:
    """Rank 0 flushes after some of its micro-batches, when rank 1 has none left."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()))
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    for index, item in enumerate(accum.batches(items(rank, SIZES[: (7, 1)[rank]]))):
        with accum(ddp, weight=len(item[0])):
            accum.backward(loss(ddp, item))
        if rank == 0 and index == at:
            accum.flush()
    return seen, parameters(ddp), (accum.updates,)


def test_a_flush_while_a_rank_has_no_data(ranks: Ranks) -> None:
    """The rank without data takes part in it."""
    results = ranks.run(2, flush_in_between, 4)
    first, second = data_of((7, 1))
    check(results, [first[0:2] + second, first[2:4], first[4:5], first[5:7]])


def train_with_buffers(
    rank: int, counts: tuple[int, ...], sync: str, norm: bool
) -> tuple[list[Gradients], list[Tensor], float]:
    """A model with a buffer that each forward moves; gradients, buffers, calls of rank 0."""
    ddp = DistributedDataParallel(counting(norm))
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()), sync=sync)
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BatchNorm
        for epoch in range(2):
            for item in accum.batches(items(rank, [4, 8, 5, 6, 2][: counts[rank]], epoch)):
                with accum(ddp, weight=len(item[0])):
                    accum.backward(loss(ddp, item))
    return seen, parameters(ddp), ddp.module[0].calls.item()


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("counts", [(5, 2), (2, 5), (0, 3), (3, 0), (1, 5, 3)], ids=str)
def test_buffers_are_broadcast_while_ranks_end(
    ranks: Ranks, counts: tuple[int, ...], sync: str
) -> None:
    """DDP's broadcast of the buffers is in the first forward of a window; all take part in it."""
    results = ranks.run(len(counts), train_with_buffers, counts, sync, False)
    data = [
        [items(r, [4, 8, 5, 6, 2][:count], epoch) for r, count in enumerate(counts)]
        for epoch in range(2)
    ]
    expected, weights = big_batches(
        [window for epoch in data for window in windows_of(epoch, 2)], counting(False)
    )
    for seen, after, _ in results:
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13
    assert equal([after for _, after, _ in results])
    assert results[0][2] == 2 * counts[0], "rank 0 is the one that tells"


@pytest.mark.parametrize("counts", [(5, 2), (2, 5), (0, 3)], ids=str)
def test_batch_norm_while_ranks_end(ranks: Ranks, counts: tuple[int, ...]) -> None:
    """The statistics are those of each micro-batch, but the replicas stay equal."""
    results = ranks.run(2, train_with_buffers, counts, "last", True)
    assert equal([after for _, after, _ in results])
    assert len(results[0][0]) == len(results[1][0]) == 2 * -(-max(counts) // 2)


class Table(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 2)

    def forward(self, indices: Tensor) -> Tensor:
        """Rows of the table through a layer."""
        return self.out(self.table(indices))


def sparse_loss(model: nn.Module, rank: int, index: int) -> Tensor:
    """Of two rows, others for each rank and micro-batch."""
    return model(torch.tensor([(index + 2 * rank) % 10, 9 - index])).square().mean()


def train_sparse(rank: int, counts: tuple[int, ...], sync: str) -> tuple[list[Tensor], int]:
    """Windows of two of a model with sparse gradients."""
    ddp = DistributedDataParallel(Table())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    accum = Accumulator(2, optimizer=optimizer, sync=sync)
    for index in accum.batches(range(counts[rank])):
        with accum(ddp):
            accum.backward(sparse_loss(ddp, rank, index))
    return parameters(ddp), accum.updates


def test_sparse_gradients_while_ranks_end_are_refused(ranks: Ranks) -> None:
    """On all ranks, in the first window that one of them has no data for."""
    with pytest.raises(RankError, match="(?s)rank 0: .*sparse=False.*rank 1: .*sparse=False"):
        ranks.run(2, train_sparse, (4, 1), "last")


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("counts", [(4, 4), (5, 5)], ids=str)
def test_sparse_gradients_of_even_ranks(ranks: Ranks, counts: tuple[int, ...], sync: str) -> None:
    """Rows of an embedding that no rank has used are not touched."""
    results = ranks.run(2, train_sparse, counts, sync)
    model = Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, max(counts), 2):
        losses = [
            sparse_loss(model, rank, index)
            for rank, count in enumerate(counts)
            for index in range(start, min(start + 2, count))
        ]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / len(losses)).backward()
        optimizer.step()
    for after, updates in results:
        assert updates == -(-max(counts) // 2)
        assert error(after, parameters(model)) <= 1e-13
    assert equal([after for after, _ in results])


def train_with_garbage(rank: int) -> Any:
    """An earlier wrapper of the same model is dead, but not collected; rank 1 has no data."""
    model = net()
    earlier = DistributedDataParallel(model)
    object.__setattr__(earlier, "cycle", [earlier])
    del earlier
    ddp = DistributedDataParallel(model)
    accum = Accumulator(2, optimizer=sgd(model.parameters()))
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(model)))
    for item in accum.batches(items(rank, SIZES[: (3, 0)[rank]])):
        with accum(ddp, weight=len(item[0])):
            accum.backward(loss(ddp, item))
    return seen, parameters(model), (accum.updates,)


def test_a_wrapper_that_is_garbage_is_not_joined(ranks: Ranks) -> None:
    """A rank that never had data finds the one that is in use."""
    check(ranks.run(2, train_with_garbage), windows_of(data_of((3, 0)), 2))


def train_with_own_steps(rank: int, steps: tuple[int, ...], counts: tuple[int, ...]) -> Any:
    """Each rank has a window of its own length."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(steps[rank], optimizer=sgd(ddp.parameters()))
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    for item in accum.batches(items(rank, SIZES[: counts[rank]])):
        with accum(ddp, weight=len(item[0])):
            accum.backward(loss(ddp, item))
    return seen, parameters(ddp), (accum.updates,)


@pytest.mark.parametrize("steps", [(2, 4), (1, 3)], ids=str)
def test_ranks_with_steps_of_their_own(ranks: Ranks, steps: tuple[int, ...]) -> None:
    """A slow rank may take fewer micro-batches; the weights make it right."""
    counts = (7, 6)
    first, second = data_of(counts)
    windows = [
        first[n * steps[0] : (n + 1) * steps[0]] + second[n * steps[1] : (n + 1) * steps[1]]
        for n in range(7)
    ]
    check(
        ranks.run(2, train_with_own_steps, steps, counts), [window for window in windows if window]
    )


def train_sharded_state(rank: int, counts: tuple[int, ...]) -> tuple[list[Tensor], int]:
    """An optimizer whose step has collectives of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

        ddp = DistributedDataParallel(net())
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    accum = Accumulator(2, optimizer=optimizer)
    for item in accum.batches(items(rank, SIZES[: counts[rank]])):
        with accum(ddp, weight=len(item[0])):
            accum.backward(loss(ddp, item))
    return parameters(ddp), accum.updates


def test_an_optimizer_that_shares_its_state_over_the_ranks(ranks: Ranks) -> None:
    """ZeroRedundancyOptimizer steps on a rank without data, too."""
    results = ranks.run(2, train_sharded_state, (5, 2))
    _, weights = big_batches(
        windows_of(data_of((5, 2)), 2), optimizer=lambda p: torch.optim.Adam(p, lr=0.01)
    )
    for after, updates in results:
        assert updates == 3
        assert error(after, weights) <= 1e-13
    assert equal([after for after, _ in results])


def step_in_loop(rank: int, counts: tuple[int, ...]) -> str:
    """A loop that takes its own steps, without an Accelerator: what happened, in words."""
    ddp = DistributedDataParallel(net())
    optimizer = sgd(ddp.parameters())
    accum = Accumulator(2)
    with pytest.warns(UserWarning, match="without optimizer= or accelerator="):
        batches = accum.batches(items(rank, SIZES[: counts[rank]]))
    try:
        for item in batches:
            with accum(ddp) as micro:
                accum.backward(loss(ddp, item))
            if micro.closes:
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return f"{accum.updates} updates, {accum.pending} pending"


def test_even_data_need_no_optimizer(ranks: Ranks) -> None:
    """Where the loop steps, ranks with equally many micro-batches are fine."""
    assert ranks.run(2, step_in_loop, (5, 5)) == ["3 updates, 0 pending"] * 2


@pytest.mark.parametrize("counts", [(5, 2), (2, 5), (0, 3), (7, 3, 0)], ids=str)
def test_uneven_data_need_an_optimizer(ranks: Ranks, counts: tuple[int, ...]) -> None:
    """All ranks say so, none of them hangs."""
    for said in ranks.run(len(counts), step_in_loop, counts):
        assert "without optimizer= or accelerator= accum can't take their steps" in said
