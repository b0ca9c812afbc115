"""What runs between ranks: the reductions of one backward in each window, and a small sum."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator

from .harness import Ranks
from .reference import Reductions, items, loss, net, sgd


def count(
    rank: int,
    sizes: list[int],
    steps: int,
    batches: bool = False,
    weigh: bool = False,
    flush: bool = False,
    wrap_with: dict[str, Any] | None = None,
    **options: Any,
) -> list[tuple[int, int, int, bool]]:
    """After each micro-batch and at the end: buckets, syncs, other all-reduces, whether it closed.

    All are counted from the start.
    """
    ddp = DistributedDataParallel(net(), **(wrap_with or {}))
    accum = Accumulator(steps, optimizer=sgd(ddp.parameters()), **options)
    rows = []
    data: Any = items(rank, sizes)
    with Reductions(ddp) as seen:
        for item in (
            accum.batches(data, weigh=(lambda _: 1) if weigh else None) if batches else data
        ):
            with accum(ddp) as micro:
                accum.backward(loss(ddp, item))
            rows.append((seen.buckets, accum.syncs, len(seen.others), micro.closes))
        if flush:
            accum.flush()
        rows.append((seen.buckets, accum.syncs, len(seen.others), True))
    assert max(seen.others) <= 10, "small ones"
    assert accum.pending == 0
    return rows


def test_one_reduction_in_each_window(ranks: Ranks) -> None:
    """Windows of 4 and a tail of 2 that flush closes; one other sum, none in between."""
    for rows in ranks.run(2, count, [2] * 10, 4, flush=True):
        assert [row[0] for row in rows] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3]
        assert [row[1] for row in rows] == [row[0] for row in rows]
        closed = 0
        for _, _, others, closes in rows:
            closed += closes
            assert others == closed


@pytest.mark.parametrize("weigh", [False, True], ids=["", "weigh"])
def test_batches_costs_one_sum_more_in_each_pass(ranks: Ranks, weigh: bool) -> None:
    """The last window is closed by its last micro-batch, and needs no reduction of its own."""
    for rows in ranks.run(2, count, [2] * 10, 4, batches=True, weigh=weigh):
        assert [row[0] for row in rows] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3]
        assert [row[1] for row in rows] == [row[0] for row in rows]
        assert rows[-1][2] == (2 * 3 if weigh else 3) + 1


def test_sync_in_every_micro_batch(ranks: Ranks) -> None:
    """As many reductions as micro-batches; the weights are agreed on once at the start."""
    for rows in ranks.run(2, count, [2] * 8, 4, sync="every"):
        assert [row[0] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
        assert [row[1] for row in rows] == [row[0] for row in rows]
        assert rows[-1][2] == 2 + 1


def test_ranks_in_step_meet_before_each_micro_batch(ranks: Ranks) -> None:
    """With sync="every", batches asks in each micro-batch who has data left."""
    for rows in ranks.run(2, count, [2] * 8, 4, batches=True, sync="every"):
        assert rows[-1][:2] == (8, 8)
        assert rows[-1][2] == 2 + 1 + 9


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_a_rank_without_data_reduces_as_often(ranks: Ranks, find_unused_parameters: bool) -> None:
    """7 and 2 micro-batches in windows of 2: four windows, four reductions on both."""
    unused = {"find_unused_parameters": find_unused_parameters}
    for rows in ranks.run(2, count_uneven, [[2] * 7, [2] * 2], unused):
        assert rows == (4, 4, 4 + 1)


def count_uneven(rank: int, sizes: list[list[int]], wrap_with: Any) -> tuple[int, int, int]:
    """Totals of a pass in windows of two."""
    rows = count(rank, sizes[rank], 2, batches=True, wrap_with=wrap_with)
    return rows[-1][:3]


def buckets_by_hand(rank: int) -> tuple[int, int]:
    """Buckets in three windows of four: of the textbook loop, and of accum; small buckets."""
    counts = []
    for by_hand in (True, False):
        ddp = DistributedDataParallel(net(), bucket_cap_mb=1e-6)
        accum = Accumulator(4, optimizer=sgd(ddp.parameters()))
        with Reductions(ddp) as seen:
            for index, item in enumerate(items(rank, [2] * 12)):
                if not by_hand:
                    with accum(ddp):
                        accum.backward(loss(ddp, item))
                elif (index + 1) % 4:
                    with ddp.no_sync():
                        loss(ddp, item).backward()
                else:
                    loss(ddp, item).backward()
        counts.append(seen.buckets)
    return counts[0], counts[1]


def test_each_bucket_is_reduced_once(ranks: Ranks) -> None:
    """A window costs the buckets of one backward, also where there are several."""
    for by_hand, by_accum in ranks.run(2, buckets_by_hand):
        assert by_hand == by_accum > 3
