"""The harness itself: what it returns, and that nothing hangs or hides."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from .harness import RankError, Ranks


def sum_of_ranks(rank: int, summand: int) -> tuple[int, float, int]:
    """A collective over all ranks."""
    value = torch.tensor(float(rank + summand))
    dist.all_reduce(value)
    return rank, value.item(), dist.get_world_size()


def raise_on_last(rank: int) -> None:
    """The others wait for a collective that the last rank never joins."""
    if rank == dist.get_world_size() - 1:
        raise ValueError("no data here")
    dist.barrier()


def be_quick(rank: int) -> int:
    """No collective: a rank may end while another still connects."""
    return rank


def hang_on_last(rank: int) -> None:
    """The last rank does something else than the others."""
    if rank == dist.get_world_size() - 1:
        time.sleep(100)
    dist.barrier()


def die_on_first(rank: int) -> None:
    """Rank 0 is gone without a word."""
    if rank == 0:
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_run_has_the_ranks_it_asked_for(ranks: Ranks, world: int) -> None:
    """Results come back in the order of the ranks."""
    total = float(sum(range(world)) + 10 * world)
    assert ranks.run(world, sum_of_ranks, 10) == [(r, total, world) for r in range(world)]


def test_a_rank_that_ends_at_once_does_not_leave_another_while_it_connects(ranks: Ranks) -> None:
    """It would die in init_process_group, now and then."""
    for _ in range(20):
        assert ranks.run(3, be_quick) == [0, 1, 2]


def test_a_rank_that_raises_is_named(ranks: Ranks) -> None:
    """And the ranks that wait for it end, too."""
    with pytest.raises(RankError, match=r"(?s)rank 0: .*rank 1: .*ValueError: no data here"):
        ranks.run(2, raise_on_last)


def test_ranks_that_hang_are_named_and_killed(ranks: Ranks) -> None:
    """The message has the line where each stands."""
    with pytest.raises(RankError, match=r"(?s)rank 1: did not end.*in hang_on_last"):
        ranks.run(2, hang_on_last, timeout=1)


def test_a_rank_that_dies_is_named(ranks: Ranks) -> None:
    """The next run starts new processes."""
    with pytest.raises(RankError, match="rank 0: the process died"):
        ranks.run(2, die_on_first)
    assert len(ranks.run(2, sum_of_ranks, 0)) == 2
