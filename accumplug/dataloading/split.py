"""One item cut into several blocks, which know the last part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from accumplug.core.state import DataPassState, LoopState, Parts
from accumplug.core.window import Weight, check_weight
from accumplug.dataloading.batch_tree import items_in, take
from accumplug.errors import OptionTypeError
from accumplug.parallel.group import DataParallelGroup

T = TypeVar("T")


def split(
    state: LoopState,
    group: DataParallelGroup,
    batch: T,
    size: int,
    stops: Callable[[bool], bool],
) -> Iterator[T]:
    """See `Accumulator.split`. `stops`: whether the pass ends before a part (or the last one)."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise OptionTypeError(f"size is the rows of a part, an int; got {type(size).__name__}")
    if size < 1:
        raise ValueError(f"size is the rows of a part, at least 1; got {size}")
    if state.block is not None:
        raise RuntimeError("split inside of a block; each part has a block of its own")
    rows = items_in(batch)
    parts = Parts(size, count=max(1, -(-rows // size)))
    data_pass = state.data_pass
    if data_pass is not None:
        _resume(parts, data_pass, rows)
        if data_pass.plan is not None and data_pass.weigh is not None:
            _weigh(parts, data_pass, batch, group)
    return _run(state, parts, batch, stops)


def _run(state: LoopState, parts: Parts, batch: T, stops: Callable[[bool], bool]) -> Iterator[T]:
    try:
        for index in range(first := parts.done, parts.count):
            if index > first and stops(index == parts.count - 1):
                return
            parts.index, state.parts = index, parts
            yield take(batch, _rows(parts, index))
    finally:
        if state.data_pass is None and state.parts is parts:  # a `break`, which a pass sees itself
            state.parts = None
    data_pass = state.data_pass
    if parts.done < parts.count and data_pass is not None:  # the loop has left the last part out
        data_pass.items.end_block()
        state.position = data_pass.items.done
    state.parts = None


def _rows(parts: Parts, index: int) -> slice:
    return slice(index * parts.size, (index + 1) * parts.size)


def _resume(parts: Parts, data_pass: DataPassState, rows: int) -> None:
    """Leave out what another process has trained on."""
    before, data_pass.resumed_parts = data_pass.resumed_parts, None
    if before is None:
        return
    if (before.size, before.count) != (parts.size, parts.count):
        raise ValueError(
            f"the run that is resumed had trained on {before.done} of {before.count} parts of "
            f"{before.size} rows of this item; it now has {rows} rows, {parts.count} parts of "
            f"{parts.size}. Call split(batch, {before.size}) until this item is done"
        )
    parts.done = before.done


def _weigh(parts: Parts, data_pass: DataPassState, batch: T, group: DataParallelGroup) -> None:
    """Weigh each part, and see that together they weigh what the item was counted for."""
    plan, weigh = data_pass.plan, data_pass.weigh
    if plan is None or weigh is None or plan.done >= len(plan.weights):
        return
    if data_pass.in_step:
        raise RuntimeError(
            'split under weigh= and sync="every" on several ranks: the ranks would have to know '
            'each other\'s parts. Use sync="last", or leave weigh= out'
        )
    parts.weights = [
        check_weight(weigh(take(batch, _rows(parts, index)))) for index in range(parts.count)
    ]
    total: Weight = sum(parts.weights, 0.0)
    promised = plan.weights[plan.done]
    if not (isinstance(total, float) and isinstance(promised, float)):
        return
    if abs(total - promised) > 1e-9 * promised:
        raise ValueError(
            f"weigh= has counted {promised} items for this batch, and {total} for its "
            f"{parts.count} parts together; it has to count a part as it counts a batch"
        )
