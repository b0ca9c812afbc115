"""A pass through the data: the last item, the position, and ranks whose data end early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from accumplug.core.normalization import Plan
from accumplug.core.window import Weight, check_weight
from accumplug.loop.registry import count_micro_batches

if TYPE_CHECKING:
    from accumplug.accumulator import Accumulator

T = TypeVar("T")


@dataclass
class DataPassState:
    """What an Accumulator knows of the pass that is under way."""

    last: bool = False
    """The item that was handed out is the last one (of all ranks, where they go in step)."""
    alive: float = 1.0
    """Ranks that had data left when they last told each other."""
    begins: bool = False
    """The pass begins, and the ranks have not told each other yet."""
    in_step: bool = False
    """All ranks go from micro-batch to micro-batch together (sync="every")."""
    plan: Plan | None = None
    resumed: bool = False
    """Another process began this pass; what the ranks told each other then is known."""
    others: dict[int, int] = field(default_factory=dict)
    """How many micro-batches each other Accumulator had run when the pass began, by id."""


class SyncPoint(Enum):
    """Whether the ranks meet right after a pause, and what one may have missed until then."""

    NONE = auto()
    """They don't."""
    FULL = auto()
    """This rank has run as many micro-batches since the last meeting as any other."""
    SHORT = auto()
    """It may have run fewer than others, as its data end (or did, in the same window)."""
    PASS = auto()
    """A pass begins, perhaps inside of a window (tail="carry")."""
    STEP = auto()
    """They meet before each micro-batch (sync="every")."""


class PassObserver(Protocol):
    """What a `Checkpointer` does in a pass."""

    def open_pass(self, feed: DataPassState, loader: Any) -> Iterator[tuple[Any, bool]]:
        """The items of a pass, each with whether it is the last; from where another process was
        in it, if `feed.resumed` says so then."""

    def must_stop(self, meeting: SyncPoint) -> bool:
        """Whether the pass is to end here, between two blocks."""

    def after_body(self) -> bool:
        """The loop has come back for another item; whether the pass is to end."""


class Pass(Iterator[T]):
    """A pass that knows its end, as Accelerate's loaders do, so that others need not look ahead."""

    def __init__(self, accum: Accumulator, items: Iterator[T]) -> None:
        self._accum = accum
        self._items = items

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return next(self._items)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the item in hand is the last one."""
        return self._accum._feed is not None and self._accum._feed.last


class _Stopped(Exception):
    """The pass ends here, on all ranks, because they were told to."""


def iterate(
    accum: Accumulator, loader: Iterable[T], weigh: Callable[[T], Weight] | None
) -> Iterator[T]:
    """The generator behind `Accumulator.batches`."""
    feed = DataPassState(in_step=accum._options.sync == "every" and accum._ranks.size > 1)
    feed.others = count_micro_batches(accum)
    keeper = accum._keeper
    if keeper is None:
        accum._feed, accum.position = feed, 0
    try:
        items = with_last(loader) if keeper is None else keeper.open_pass(feed, loader)
        if weigh is not None:
            stream = _planned(accum, feed, items, weigh)
        elif feed.in_step:
            stream = _in_step(accum, feed, items)
        else:
            stream = _freely(accum, feed, items)
        for item in stream:
            accum.position += 1
            yield item
            if keeper is not None and keeper.after_body():
                return
        accum._end_pass()
    except _Stopped:
        return
    finally:
        accum._feed = None


def _pause(accum: Accumulator, meeting: SyncPoint) -> None:
    """A place between two blocks where the pass may have to end."""
    if accum._keeper is not None and accum._keeper.must_stop(meeting):
        raise _Stopped


def _pause_before_block(accum: Accumulator, feed: DataPassState) -> None:
    if accum._keeper is None:
        return
    meeting, run = SyncPoint.NONE, accum.pending + 1
    if accum._window is not None:
        steps = accum._window.steps
    else:
        steps = accum.steps if feed.plan is None else len(feed.plan.weights)
    tail = accum._options.tail
    if run >= steps or (feed.last and tail == "flush"):
        meeting = SyncPoint.FULL if run >= accum.steps and tail != "carry" else SyncPoint.SHORT
    _pause(accum, meeting)


def with_last(loader: Iterable[T], iterator: Iterator[T] | None = None) -> Iterator[tuple[T, bool]]:
    """Each item and whether it is the last. One item of look-ahead, never `len`.

    `iterator`: one of `loader` that exists already.
    """
    iterator = iter(loader) if iterator is None else iterator
    if hasattr(loader, "end_of_dataloader"):  # Accelerate's loaders look ahead by themselves
        for item in iterator:
            yield item, bool(loader.end_of_dataloader)
        return
    for item in iterator:
        for following in iterator:
            yield item, False
            item = following
        yield item, True


def _freely(
    accum: Accumulator, feed: DataPassState, items: Iterator[tuple[T, bool]]
) -> Iterator[T]:
    """Ranks meet when a window closes, and nowhere else."""
    first = next(items, None)
    if not feed.resumed:
        _meet(accum, feed, float(first is not None))
    if first is not None and accum._window is not None and accum.pending == accum._window.steps:
        _pause(accum, SyncPoint.SHORT)  # other ranks have the rest of the window
        accum._join()
    while first is not None:
        item, feed.last = first
        _pause_before_block(accum, feed)
        yield item
        first = next(items, None)  # after the last one too: a prepared loader counts its passes
    feed.last = True
    while feed.alive > 0 and accum._ranks.size > 1:
        _pause(accum, SyncPoint.SHORT)
        accum._join()


def _in_step(
    accum: Accumulator, feed: DataPassState, items: Iterator[tuple[T, bool]]
) -> Iterator[T]:
    """Every micro-batch is reduced, so ranks meet before each of them."""
    current = next(items, None)
    while True:
        _pause(accum, SyncPoint.STEP)
        more = float(current is not None and not current[1])
        sums = _floats(accum._ranks.sum([float(current is not None), more]))
        feed.alive, feed.last = sums[0], sums[1] == 0
        if feed.alive == 0:
            return
        if current is None:
            accum._join()
            continue
        before = accum.micro_batches
        yield current[0]
        if accum.micro_batches == before:  # the loop left it out, and the others reduce
            accum._join()
        current = next(items, None)


def _planned(
    accum: Accumulator,
    feed: DataPassState,
    items: Iterator[tuple[T, bool]],
    weigh: Callable[[T], Weight],
) -> Iterator[T]:
    """One window is fetched and weighed before it runs; ranks meet when it opens."""
    if accum._options.tail == "carry":
        raise ValueError('weigh= looks at a whole window, which tail="carry" spreads over passes')
    if accum._options.nonfinite == "skip_micro_batch":
        raise ValueError('weigh= promises a total, which nonfinite="skip_micro_batch" breaks')
    if accum.pending and feed.plan is None:
        raise RuntimeError(
            f"weigh= needs to see a window from its start, and {accum.pending} micro-batches are "
            f"pending; flush() or discard() first"
        )
    while True:
        if feed.plan is None:
            window = [item for item, _ in islice(items, accum.steps)]
            if not _plan(accum, feed, window, weigh):
                return
        else:
            window = [item for item, _ in islice(items, feed.plan.left)]
        yield from _run_plan(accum, feed, window)
        feed.plan = None


def _plan(
    accum: Accumulator, feed: DataPassState, window: list[T], weigh: Callable[[T], Weight]
) -> bool:
    """Ranks tell each other what they will run in the next window; whether there is one."""
    weights = [check_weight(weigh(item)) for item in window]
    full = float(len(window) == accum.steps)
    _pause(accum, SyncPoint.FULL)
    places = [float(i < len(window)) for i in range(accum.steps)] if feed.in_step else []
    told = [sum(weights, 0.0), float(len(window)), float(bool(window)), full, *places]
    sums = accum._ranks.sum(told)
    _, count, feed.alive, full, *taken = _floats(sums)
    if count == 0 or (full == 0 and accum._options.tail == "drop"):
        return False
    # under sync="every" each micro-batch is reduced: who has fewer stands in with weight 0
    weights += [0.0] * (sum(ranks > 0 for ranks in taken) - len(weights))
    feed.plan = Plan(weights, sums[0], count, left=max(len(window), 1))
    return True


def _run_plan(accum: Accumulator, feed: DataPassState, window: list[T]) -> Iterator[T]:
    """Hand out the items of a planned window, or take part in it without any."""
    if (plan := feed.plan) is None:
        return
    feed.last = not window and not feed.in_step
    before, first = accum.micro_batches, accum.pending
    for item in window:
        _pause_before_block(accum, feed)
        plan.left -= 1
        yield item
        if plan.discarded:
            accum.position += plan.left
            break
    for _ in range(first + len(window), max(len(plan.weights), 1)):
        _pause(accum, SyncPoint.SHORT)
        plan.left = 0
        accum._join()
    ran = accum.micro_batches - before
    if accum.pending or (ran != len(window) and not plan.discarded):
        raise RuntimeError(
            f"weigh= counted {len(plan.weights)} micro-batches for this window, but {ran} blocks "
            f"were run; one block an item, and let weigh return 0 for what the loop leaves out"
        )


def _meet(accum: Accumulator, feed: DataPassState, has_data: float) -> None:
    """At the start of a pass: how many ranks have data at all."""
    feed.alive, feed.begins = has_data, True
    _pause(accum, SyncPoint.PASS)
    feed.begins = False
    if accum._ranks.size > 1:
        feed.alive = _floats(accum._ranks.sum([has_data]))[0]


def _floats(sums: Any) -> list[float]:
    return sums if isinstance(sums, list) else sums.tolist()
