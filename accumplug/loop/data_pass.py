"""A pass through the data: the last item, the position, and ranks whose data end early."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from torch import Tensor

from accumplug.core.gradients import GradientBuffer
from accumplug.core.host import Host
from accumplug.core.normalization import WindowPlan
from accumplug.core.options import Options
from accumplug.core.state import REAL, BlockKind, BlockState, DataPassState, LoopState, SyncPoint
from accumplug.core.window import Weight, check_weight
from accumplug.loop.registry import Registry
from accumplug.parallel.group import DataParallelGroup

T = TypeVar("T")


class _Stopped(Exception):
    """The pass ends here, on all ranks, because they were told to."""


@dataclass(eq=False)
class DataPass:
    """Goes through loaders, and lets a rank without data take part in the others' windows.

    Args:
        state: of the Accumulator.
        group: the data-parallel ranks.
        options: of the Accumulator.
        host: who takes the step.
        registry: the Accumulators of this process.
        knows_models: whether this rank knows the modules that other ranks reduce.
        gradients: the running sum, where weights belong.
        join: runs a block of the kind that it is given, for a rank that has no data.
        end_pass: the data of all ranks have ended.
    """

    state: LoopState
    group: DataParallelGroup
    options: Options
    host: Host
    registry: Registry
    knows_models: Callable[[], bool]
    gradients: GradientBuffer
    join: Callable[[BlockKind], object]
    end_pass: Callable[[], None]

    # -- blocks ----------------------------------------------------------------------------------

    def open_block(self, block: BlockState, data_pass: DataPassState) -> bool:
        """A block of the loop begins; return whether it is the last one of the pass."""
        parts = self.state.parts
        last = data_pass.items.open_block() and (parts is None or parts.is_last)
        if data_pass.plans:
            return False  # the window's plan knows
        if data_pass.in_step:
            last = self._step(1.0, not last)
            if data_pass.alive < self.group.size and data_pass.items.outstanding > 1:
                raise RuntimeError(
                    'the data of some ranks have ended, and under sync="every" a loop that reads '
                    "ahead would pair its micro-batches with others. Even out the data, or take "
                    "items one by one"
                )
        data_pass.last = last
        return last

    def count_block(self, block: BlockState, data_pass: DataPassState) -> None:
        """A block that counts has ended well: so may have its item."""
        parts = self.state.parts
        if block.kind is REAL and (parts is None or parts.is_last):
            data_pass.items.end_block()
            self.state.position = data_pass.items.done
        if (plan := data_pass.plan) is not None and (parts is None or parts.is_last):
            plan.done += 1

    def end_behind(self, data_pass: DataPassState) -> None:
        """The loop has seen the end of the data already: end the pass behind its last block."""
        if data_pass.items.outstanding:
            return
        if self.group.size > 1 and data_pass.alive > 0 and not self.host.has_stepped:
            raise RuntimeError(
                "the data of this rank have ended and others go on; the loop reads ahead and "
                "steps behind its last block, where accum can't take part any more. Step "
                "inside of the block, give optimizer=, or even out the data"
            )
        self._finish_behind(data_pass)

    def finish_previous(self) -> None:
        """Something new begins: end a pass whose loop has left out what it had read ahead."""
        data_pass = self.state.data_pass
        if data_pass is not None and data_pass.ended:
            if data_pass.items.reads_ahead:
                warnings.warn(
                    f"{data_pass.items.outstanding} items that the loop had read ahead in the last "
                    f"pass had no block; call micro.skip() in a block for what is left out",
                    stacklevel=4,
                )
            self._finish_behind(data_pass)

    # -- items -----------------------------------------------------------------------------------

    def batches(self, loader: Iterable[T], weigh: Callable[[T], Weight] | None) -> Iterator[T]:
        """The generator behind `Accumulator.batches`."""
        state = self.state
        self.finish_previous()
        data_pass = DataPassState(
            in_step=self.options.sync == "every" and self.group.size > 1,
            alive=float(self.group.size),
            others=self.registry.count_others(),
            weigh=weigh,
        )
        observer = state.observer
        if observer is None:
            state.data_pass, state.position = data_pass, 0
        try:
            source: Iterator[tuple[T, bool]]
            if observer is None:
                source = with_last(loader)
            else:
                source = observer.open_pass(data_pass, loader)
            data_pass.items.handed_out = data_pass.items.done = state.position
            if weigh is not None:
                yield from self._planned(data_pass, source, weigh)
            else:
                yield from self._freely(data_pass, source)
            self._at_the_end(data_pass)
        except _Stopped:
            return
        finally:
            if state.data_pass is data_pass and not data_pass.ended:
                state.data_pass = None

    def _hand_out(self, data_pass: DataPassState, item: T, exhausted: bool) -> Iterator[T]:
        """Yield `item` to the loop, and update the counts when it asks for the next one."""
        data_pass.items.handed_out += 1
        data_pass.items.exhausted = exhausted
        yield item
        state = self.state
        if state.block is not None:  # `next` inside of a block
            return
        state.parts = None
        data_pass.items.came_back()
        state.position = data_pass.items.done
        if state.observer is not None and state.observer.after_body():
            raise _Stopped

    def _freely(self, data_pass: DataPassState, source: Iterator[tuple[T, bool]]) -> Iterator[T]:
        """Yield items as they come: ranks agree when a window closes (or in each block)."""
        state = self.state
        first = next(source, None)
        if not (data_pass.resumed or data_pass.in_step):
            self._begin(data_pass, first is not None)
        window = state.window
        full = window is not None and not window.is_open and window.index == window.steps
        if first is not None and full:
            self._pause(SyncPoint.SHORT)  # other ranks have the rest of the window
            self.join(BlockKind.JOIN)
        while first is not None:
            item, exhausted = first
            self._pause_before_block(data_pass, exhausted, data_pass.items.outstanding)
            yield from self._hand_out(data_pass, item, exhausted)
            first = next(source, None)  # after the last too: a prepared loader counts its passes
        data_pass.items.exhausted = True

    def _planned(
        self,
        data_pass: DataPassState,
        source: Iterator[tuple[T, bool]],
        weigh: Callable[[T], Weight],
    ) -> Iterator[T]:
        """Fetch and weigh a whole window before it runs: ranks agree when it opens."""
        state = self.state
        if self.options.tail == "carry":
            raise ValueError(
                'weigh= looks at a whole window, which tail="carry" spreads over passes'
            )
        if self.options.nonfinite == "skip_micro_batch":
            raise ValueError('weigh= promises a total, which nonfinite="skip_micro_batch" breaks')
        if state.pending and data_pass.plan is None:
            raise RuntimeError(
                f"weigh= needs to see a window from its start, and {state.pending} micro-batches "
                f"are pending; flush() or discard() first"
            )
        if data_pass.plan is not None:  # resumed inside of a window
            window = list(islice(source, data_pass.plan.left))
            yield from self._run_plan(data_pass, data_pass.plan, window)
        while True:
            window = list(islice(source, state.next_steps(data_pass.planned_updates)))
            if not self._plan(data_pass, [item for item, _ in window], weigh):
                return
            yield from self._run_plan(data_pass, data_pass.plans[-1], window)

    def _plan(
        self, data_pass: DataPassState, window: list[T], weigh: Callable[[T], Weight]
    ) -> bool:
        """Agree between ranks on the next window; return whether there is one."""
        steps = self.state.next_steps(data_pass.planned_updates)
        weights = [check_weight(weigh(item)) for item in window]
        weights = [self.gradients.at_home(w) if isinstance(w, Tensor) else w for w in weights]
        self._pause(SyncPoint.FULL)
        places = [float(i < len(window)) for i in range(steps)] if data_pass.in_step else []
        full = float(len(window) == steps)
        total: Weight = sum(weights, 0.0)
        unknown = float(not window and not self.knows_models())
        numbers = [float(len(window)), float(bool(window)), full, unknown, *places]
        total, _, sums = self.group.agree(total, [], numbers, self.gradients.device)
        count, data_pass.alive, full, all_unknown, *taken = sums
        data_pass.by_hand = data_pass.by_hand or all_unknown > 0
        if count == 0 or (full == 0 and self.options.tail == "drop"):
            return False
        # under sync="every" each micro-batch is reduced: who has fewer stands in with weight 0
        weights += [0.0] * (sum(ranks > 0 for ranks in taken) - len(weights))
        left = max(len(window), 1)
        data_pass.plans.append(WindowPlan(weights, total, count, len(window), left))
        return True

    def _run_plan(
        self, data_pass: DataPassState, plan: WindowPlan, window: list[tuple[T, bool]]
    ) -> Iterator[T]:
        """Hand out the items of a planned window, or take part in it without any."""
        items, state = data_pass.items, self.state
        data_pass.last = not window and not data_pass.in_step
        done = plan.done
        for item, exhausted in window:
            self._pause_before_block(data_pass, exhausted, data_pass.items.outstanding)
            plan.left -= 1
            yield from self._hand_out(data_pass, item, exhausted)
            if plan.discarded:
                items.handed_out += plan.left
                items.done = state.position = items.handed_out
                return
        ahead = items.reads_ahead is not False or state.block is not None
        missing = max(len(plan.weights), 1) - (done + len(window))
        if items.outstanding and ahead and missing <= 0:
            return  # the window's blocks are still to come
        if missing > 0 and items.outstanding:
            raise RuntimeError(
                f"this rank has {len(window)} items for a window in which others have more, and "
                f"the loop reads ahead; even out the data, or take items one by one"
            )
        kind = BlockKind.PADDING if data_pass.in_step else BlockKind.JOIN
        for later in reversed(range(missing)):
            self._pause(SyncPoint.STEP if later else SyncPoint.SHORT)
            plan.left = 0
            self.join(kind)
        ran = plan.done - done - (missing if data_pass.in_step else 0)
        if state.pending or (ran != len(window) and not plan.discarded):
            data_pass.plans.clear()
            raise RuntimeError(
                f"weigh= counted {len(plan.weights)} micro-batches for this window, but {ran} "
                f"blocks were run; one block an item (or accum.split), and let weigh return 0 for "
                f"what the loop leaves out"
            )

    # -- where ranks agree -----------------------------------------------------------------------

    def _begin(self, data_pass: DataPassState, has_data: bool) -> None:
        """At the start of a pass: how many ranks have data at all, and can reduce through DDP."""
        data_pass.alive, data_pass.begins = float(has_data), True
        self._pause(SyncPoint.PASS)
        data_pass.begins = False
        if self.group.size > 1:
            unknown = not (has_data or self.knows_models())
            data_pass.alive, all_unknown = self.group.sum([float(has_data), float(unknown)])
            data_pass.by_hand = all_unknown > 0

    def _step(self, has_item: float, more: bool) -> bool:
        """Under sync="every", before each micro-batch; return whether no rank has more."""
        data_pass = self.state.data_pass
        assert data_pass is not None
        unknown = float(not has_item and not self.knows_models())
        data_pass.alive, others, all_unknown = self.group.sum([has_item, float(more), unknown])
        data_pass.by_hand = data_pass.by_hand or all_unknown > 0
        return others == 0

    def _at_the_end(self, data_pass: DataPassState) -> None:
        """The loop has asked for an item after the last one."""
        items = data_pass.items
        waiting = items.outstanding > (0 if self.group.size == 1 else 1)
        ahead = items.outstanding if items.reads_ahead else items.reads_ahead is None and waiting
        if self.state.block is not None or ahead:
            data_pass.ended = True  # the last block ends the pass
        else:
            self._finish(data_pass)

    def _finish(self, data_pass: DataPassState) -> None:
        """This rank has run all of its blocks: join the others, until all have."""
        data_pass.ended, data_pass.last = False, True
        try:
            if data_pass.weigh is None and self.group.size > 1:
                while data_pass.in_step or data_pass.alive > 0:
                    self._pause(SyncPoint.STEP if data_pass.in_step else SyncPoint.SHORT)
                    if data_pass.in_step:
                        data_pass.last = self._step(0.0, False)
                        if data_pass.alive == 0:
                            break
                    self.join(BlockKind.PADDING if data_pass.in_step else BlockKind.JOIN)
            self.end_pass()
        finally:
            if self.state.data_pass is data_pass:
                self.state.data_pass = None

    def _finish_behind(self, data_pass: DataPassState) -> None:
        """Finish behind the pass's last block, where nobody waits for another item."""
        with suppress(_Stopped):
            self._finish(data_pass)

    def _pause(self, sync_point: SyncPoint) -> None:
        """A place between two blocks where the pass may have to end."""
        observer = self.state.observer
        if observer is not None and self.state.block is None and observer.must_stop(sync_point):
            raise _Stopped

    def _pause_before_block(self, data_pass: DataPassState, exhausted: bool, ahead: int) -> None:
        """Before the first block of an item, or of a part: does it close the window?

        `exhausted`: no block is known to follow it. `ahead`: items that have their blocks before.
        """
        state, plan = self.state, data_pass.plan
        if state.observer is None:
            return
        if data_pass.in_step and plan is None:
            self._pause(SyncPoint.STEP)
            return
        sync_point, run = SyncPoint.NONE, ahead + 1 + (plan.done if plan else state.pending)
        steps = state.next_steps() if state.steps is not None else None
        if plan is not None:
            planned: int | None = len(plan.weights)
        elif state.window is not None:
            planned = None if state.window.is_open else state.window.steps
        else:
            planned = steps
        if planned is not None and (run >= planned or (exhausted and self.options.tail == "flush")):
            is_full = steps is not None and run >= steps and self.options.tail != "carry"
            sync_point = SyncPoint.FULL if is_full else SyncPoint.SHORT
            if not ahead:
                if data_pass.met == state.windows:
                    sync_point = SyncPoint.NONE  # the ranks have met for this window
                data_pass.met = state.windows
        self._pause(sync_point)

    def stops_before_part(self, is_last: bool) -> bool:
        """Whether the pass ends before a part of an item that is not the first one."""
        data_pass = self.state.data_pass
        if data_pass is None:
            return False
        try:
            if data_pass.plan is None:
                self._pause_before_block(data_pass, is_last and data_pass.items.exhausted, 0)
            else:
                self._pause(SyncPoint.NONE)
        except _Stopped:
            return True
        return False


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
