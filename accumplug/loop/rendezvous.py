"""Where the ranks meet: the micro-batch that ends a window, and ranks that have no data for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accumplug.core.window import Weight, is_number
from accumplug.loop.registry import ran_beside
from accumplug.parallel.ddp import has_sparse_gradients

if TYPE_CHECKING:
    from accumplug.accumulator import Accumulator
    from accumplug.loop.micro_batch import MicroBatch

_ENDED = "the data of some ranks have ended and others go on"


def settle(accum: Accumulator, micro: MicroBatch) -> None:
    """In the micro-batch that ends the window: the ranks meet, and the sum is made to fit."""
    if micro.settled or not (micro.ends or micro.virtual):
        return
    micro.settled = True
    window, feed, plan = accum._open_window(), accum._feed, accum._plan()
    if plan is not None:  # they met when the window opened
        micro.ends, micro.void = True, is_number(plan.total) and plan.total == 0
        accum._weights.total = plan.total
        return
    more = 0.0 if feed is None else float(not feed.last)
    closing = float(not micro.virtual or micro.flushes)
    count: Weight = window.index + (not micro.virtual)
    company = float(ran_beside(accum))
    told = [window.total, count, more, closing, company, company and accum._sum.elements()]
    total, count, alive, closing, company, elements = accum._ranks.sum(told)
    if float(company):
        size = accum._ranks.size
        uneven = float(count) != size * (window.index + (not micro.virtual))
        differ = float(company) == size and float(elements) != size * accum._sum.elements()
        _refuse_company(accum, float(alive), uneven or differ)
    if feed is not None and not feed.in_step:
        feed.alive = float(alive)
    if micro.virtual:
        flushes = float(closing) > 0 or accum._options.tail == "flush"
        micro.ends = flushes and float(count) > 0
        if not micro.ends:
            return
        _refuse_unstepped(accum, micro)
    micro.closers = int(closing) if accum._loop is not None else 0
    micro.void = accum._weights.settle(window, total, count)


def refuse_absent(accum: Accumulator) -> None:
    """Some ranks have no data left: raise RuntimeError where they can't stand in."""
    if accum._sum.roots(accum._sum.models):
        raise RuntimeError(
            f"{_ENDED}; under fully_shard every rank runs each forward. Even out the data (e.g. "
            f"drop_last=True)"
        )
    if any(has_sparse_gradients(ddp) for ddp in accum._sum.ddp_modules(accum._sum.models)):
        raise RuntimeError(
            f"{_ENDED}; a rank without data can't stand in for an embedding with sparse=True. Even "
            f"out the data, or use sparse=False"
        )
    if not accum.takes_step and accum._loop is None:
        raise RuntimeError(
            f"{_ENDED}; without optimizer= or accelerator= accum can't take their steps. Give one, "
            f"or even out the data"
        )


def _refuse_company(accum: Accumulator, alive: float, uneven: bool) -> None:
    """Another Accumulator runs in this pass, whose windows a rank without data can't join.

    `uneven`: the ranks have run different numbers of micro-batches, or close the windows of
    different Accumulators, whose sums differ in size. All of them raise together.
    """
    ended = accum._feed is not None and 0 < alive < accum._ranks.size
    if ended or uneven or accum._absent():
        raise RuntimeError(
            f"{_ENDED}, and another Accumulator runs in the same pass: a rank without data can "
            f"join the windows of one Accumulator only. Even out the data (e.g. drop_last=True, or "
            f"a DistributedSampler)"
        )


def _refuse_unstepped(accum: Accumulator, micro: MicroBatch) -> None:
    """A window that ends outside of a block, where a plain loop would not step."""
    if not (micro.flushes or accum.takes_step or accum._loop):
        raise RuntimeError(
            f"the loop left out the last item of the pass, so {accum.pending} micro-batches wait "
            f"for a close that the loop would not step on; call micro.skip() in its block, or give "
            f"optimizer="
        )
