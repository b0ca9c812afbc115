"""A pass through the data: the last item, the position, and ranks whose data end early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from accumplug.window import Weight, check_weight

if TYPE_CHECKING:
    from accumplug.accumulator import Accumulator

T = TypeVar("T")


@dataclass
class Plan:
    """A window that was looked at before it ran (`weigh=`)."""

    weights: list[Weight]
    """Of this rank's micro-batches."""
    total: Weight
    """Sum over all ranks."""
    micro_batches: float
    """Of all ranks together."""


@dataclass
class Feed:
    """What an Accumulator knows of the pass that is under way."""

    last: bool = False
    """The item that was handed out is the last one (of all ranks, where they go in step)."""
    alive: float = 1.0
    """Ranks that had data left when they last told each other."""
    in_step: bool = False
    """All ranks go from micro-batch to micro-batch together (sync="every")."""
    plan: Plan | None = None


def iterate(
    accum: Accumulator, loader: Iterable[T], weigh: Callable[[T], Weight] | None
) -> Iterator[T]:
    """The generator behind `Accumulator.batches`."""
    feed = Feed(in_step=accum._options.sync == "every" and accum._ranks.size > 1)
    accum._feed, accum.position = feed, 0
    try:
        items = _with_last(loader)
        if weigh is not None:
            yield from _planned(accum, feed, items, weigh)
        elif feed.in_step:
            yield from _in_step(accum, feed, items)
        else:
            yield from _freely(accum, feed, items)
        accum._end_pass()
    finally:
        accum._feed = None


def _with_last(loader: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item and whether it is the last. One item of look-ahead, never `len`."""
    if hasattr(loader, "end_of_dataloader"):  # Accelerate's loaders look ahead by themselves
        for item in loader:
            yield item, bool(loader.end_of_dataloader)
        return
    iterator = iter(loader)
    for item in iterator:
        for following in iterator:
            yield item, False
            item = following
        yield item, True


def _freely(accum: Accumulator, feed: Feed, items: Iterator[tuple[T, bool]]) -> Iterator[T]:
    """Ranks meet when a window closes, and nowhere else."""
    first = next(items, None)
    _meet(accum, feed, float(first is not None))
    while first is not None:
        item, feed.last = first
        accum.position += 1
        yield item
        first = None if feed.last else next(items, None)
    feed.last = True
    while feed.alive > 0 and accum._ranks.size > 1:
        accum._join()


def _in_step(accum: Accumulator, feed: Feed, items: Iterator[tuple[T, bool]]) -> Iterator[T]:
    """Every micro-batch is reduced, so ranks meet before each of them."""
    current = next(items, None)
    while True:
        more = float(current is not None and not current[1])
        sums = _floats(accum._ranks.sum([float(current is not None), more]))
        feed.alive, feed.last = sums[0], sums[1] == 0
        if feed.alive == 0:
            return
        if current is None:
            accum._join()
            continue
        accum.position += 1
        yield current[0]
        current = next(items, None)


def _planned(
    accum: Accumulator,
    feed: Feed,
    items: Iterator[tuple[T, bool]],
    weigh: Callable[[T], Weight],
) -> Iterator[T]:
    """One window is fetched and weighed before it runs; ranks meet when it opens."""
    if accum._options.tail == "carry":
        raise ValueError('weigh= looks at a whole window, which tail="carry" spreads over passes')
    if accum._options.nonfinite == "skip_micro_batch":
        raise ValueError('weigh= promises a total, which nonfinite="skip_micro_batch" breaks')
    if accum.pending:
        raise RuntimeError(
            f"weigh= needs to see a window from its start, and {accum.pending} micro-batches are "
            f"pending; flush() or discard() first"
        )
    while True:
        steps = accum.steps
        window = [item for item, _ in islice(items, steps)]
        weights = [check_weight(weigh(item)) for item in window]
        full = float(len(window) == steps)
        sums = accum._ranks.sum([sum(weights, 0.0), float(len(window)), float(bool(window)), full])
        _, count, feed.alive, full = _floats(sums)
        if count == 0 or (full == 0 and accum._options.tail == "drop"):
            return
        feed.plan = Plan(weights, sums[0], count)
        feed.last = not window
        if not window:
            accum._join()
        for item in window:
            accum.position += 1
            yield item
        if accum.pending:
            raise RuntimeError(
                f"weigh= counted {len(window)} micro-batches for this window, but only "
                f"{accum.pending} blocks were run; let weigh return 0 for what the loop leaves out"
            )
        feed.plan = None


def _meet(accum: Accumulator, feed: Feed, has_data: float) -> None:
    """At the start of a pass: how many ranks have data at all."""
    feed.alive = has_data
    if accum._ranks.size > 1:
        feed.alive = _floats(accum._ranks.sum([has_data]))[0]


def _floats(sums: Any) -> list[float]:
    return sums if isinstance(sums, list) else sums.tolist()
