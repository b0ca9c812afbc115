"""When a run saves and when it ends early: counts, clock and signals, and the ranks' agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accumplug.accumulator import Accumulator
from accumplug.checkpoint.coordination import RankStore, SaveCounts, SharedRequest
from accumplug.checkpoint.save_schedule import SaveSchedule
from accumplug.checkpoint.signals import Signals
from accumplug.core.state import SyncPoint
from accumplug.parallel.ddp import before_forward


class SavePolicy:
    """Looks, when a block is over, whether a save is due on this rank or on all.

    Args:
        accum: the Accumulator whose blocks are followed.
        schedule: when a save is due by itself.
        signals: those that save and end the run.
        store: what the ranks agree through; None on one rank.
        save: takes a save of this moment.
        finish: waits, with all ranks, until the last one is on disk.
        moved: whether the run has changed since its last save.
    """

    def __init__(
        self,
        accum: Accumulator,
        schedule: SaveSchedule,
        signals: Sequence[int],
        store: RankStore | None,
        save: Callable[[], object],
        finish: Callable[[], None],
        moved: Callable[[], bool],
    ) -> None:
        self.signals = Signals(signals)
        self.interrupted = False
        """Whether a signal has ended the pass, and the run was saved for it."""
        self._accum = accum
        self._schedule = schedule
        self._save_counts = SaveCounts(store) if store else None
        self._request = SharedRequest(store) if store and (signals or schedule.has_clock) else None
        self._save, self._finish, self._moved = save, finish, moved
        self._waits_for_step = False
        self._ran = self._met_at = accum.micro_batches
        self._uneven: int | None = None
        """The window in which ranks had run different numbers of micro-batches before a resume."""

    @property
    def counts_blocks(self) -> bool:
        """Whether the ranks may have to agree on a micro-batch, which `batches` makes possible."""
        return self._request is not None

    def saved(self) -> None:
        """A save was taken. Other ranks hear of it before rank 0 may wait for their parts."""
        if self._save_counts is not None:
            self._save_counts.saved()
        self._schedule.saved()

    def start_at(self, count: int) -> None:
        """Another process has come so far, with a schedule of `count`. All ranks call it."""
        accum = self._accum
        self._schedule.start_at(count)
        self._ran = self._met_at = accum.micro_batches
        told = [float(accum.pending), float(accum.pending) ** 2]
        total, squares = (float(n) for n in accum.parts.group.sum(told))
        self._uneven = accum.windows if squares * accum.parts.group.size != total**2 else None

    def block_ended(self) -> None:
        """Act now, or, if the loop has its step still to take, when it has."""
        self._schedule.block_ended()
        accum = self._accum
        if accum.pending == 0 or accum.micro_batches == self._ran:  # closed, or met without data
            self._met_at = accum.micro_batches
        self._ran = accum.micro_batches
        self._waits_for_step = self._steps_later()
        if not self._waits_for_step:
            self._act()

    def loop_came_back(self) -> None:
        """The loop has come back from its body: whatever it does behind a block is done."""
        if self._waits_for_step:
            self._act()

    def must_stop(self, sync_point: SyncPoint) -> bool:
        """Whether the pass has to end before the next block."""
        self.loop_came_back()
        if self.interrupted:
            return True
        if sync_point is SyncPoint.FULL and self._uneven == self._accum.windows:
            sync_point = SyncPoint.SHORT
        if self._save_counts is not None:
            if not self._agree(sync_point) and sync_point not in (SyncPoint.NONE, SyncPoint.STEP):
                self._equal_saves(self._save_counts, sync_point)
        elif self.signals.arrived:
            self._answer("stop")
        return self.interrupted

    def _steps_later(self) -> bool:
        """Whether the window has closed and the loop has its step still to take."""
        accum = self._accum
        return not (accum.pending or accum.parts.host.has_stepped)

    def _act(self) -> None:
        """A block is over: do what is to be done then."""
        self._waits_for_step = False
        if self._schedule.is_due() and self._moved() and not self._has_met():
            self._save()
        if self._save_counts is not None:
            self._agree(SyncPoint.NONE)
        elif self.signals.arrived and not self.interrupted:
            self._answer("stop")
        elif self._schedule.is_time():
            self._answer("save")

    def _has_met(self) -> bool:
        """Whether the others have counted the saves of this rank in the open window: its last item
        is cut into several micro-batches."""
        accum = self._accum
        data_pass = accum.parts.state.data_pass if self._save_counts is not None else None
        return data_pass is not None and accum.pending > 0 and data_pass.met == accum.windows

    def _agree(self, sync_point: SyncPoint) -> bool:
        """On several ranks: ask for what is due here, and do what the ranks have agreed on.

        Returns whether the run is interrupted.
        """
        if (request := self._request) is None or (counts := self._save_counts) is None:
            return False
        meets = sync_point not in (SyncPoint.NONE, SyncPoint.STEP)
        while not self.interrupted:
            if request.known is None and self.signals.arrived:
                request.ask("stop")
            elif (
                request.known is None
                and self._accum.parts.group.rank == 0
                and self._schedule.is_time()
            ):
                request.ask("save")
            if not request.is_time(self._index(), counts.saves, meets):
                return False
            if sync_point is SyncPoint.SHORT and request.target:
                self._join_forward()
            while counts.saves < request.saves:
                self._save()
            what = request.known
            request.done()
            self._answer(what)
        return True

    def _equal_saves(self, counts: SaveCounts, sync_point: SyncPoint) -> None:
        """Before the ranks meet: make the saves that the others make and this one would miss."""
        counts.reach_sync_point()
        if sync_point is not SyncPoint.FULL:
            if sync_point is SyncPoint.SHORT:
                self._join_forward()
            counts.catch_up(self._save, lambda: self._agree(sync_point))
        counts.pass_sync_point()

    def _join_forward(self) -> None:
        """Wait for the others only after what they need from this rank to come so far.

        In its first forward of a window DistributedDataParallel broadcasts its buffers.
        """
        if self._accum.pending == 0:
            models = self._accum.parts.models.known()
            for ddp in self._accum.parts.gradients.ddp_modules(models):
                before_forward(ddp)

    def _answer(self, what: str | None) -> None:
        stops = what == "stop"  # the process may end right after, so all ranks wait for the disk
        if self._moved() or self._save_counts is not None:
            self._save()
        if stops:
            self._finish()
        self._schedule.saved()
        self.interrupted = stops

    def _index(self) -> int:
        """Micro-batches since the ranks last met. (In the window it would be others on each rank
        that has carried some into it.)"""
        accum = self._accum
        each = accum.parts.options.sync == "every"  # they meet in each one, and go in step
        return accum.pending if each else accum.micro_batches - self._met_at
