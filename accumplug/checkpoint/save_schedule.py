"""When the next save is due, by micro-batches and by the clock."""

from __future__ import annotations

import math
import time

from accumplug.accumulator import Accumulator


class SaveSchedule:
    """Counts micro-batches so that all ranks find the same number due.

    On one rank it is `accum.micro_batches`, and on several ranks too while their data are even.
    Where some had fewer in a window, all of them count the mean, rounded up, once it closes.

    Windows whose number of micro-batches is open (steps=None) may have others on each rank, so
    several ranks save when one closes in which a save has come due.
    """

    def __init__(
        self,
        accum: Accumulator,
        every: int | None,
        seconds: float | None,
        every_updates: int | None,
    ) -> None:
        self._accum = accum
        self._every = every
        self._seconds = seconds
        self._every_updates = every_updates
        self._updates = accum.updates
        self._is_update = self._is_owed = self._is_crossed = False
        self._closed_at = 0
        self._last = time.monotonic()
        self._windows = 0
        self._micro_batches = 0
        self._lead = 0

    @property
    def count(self) -> int:
        """Micro-batches so far."""
        return self._accum.micro_batches + self._lead

    @property
    def has_clock(self) -> bool:
        """Whether saves are due by the clock."""
        return self._seconds is not None

    def block_ended(self) -> None:
        """Count it."""
        accum = self._accum
        self._is_update = accum.updates != self._updates
        self._updates = accum.updates
        if accum.parts.group.size > 1 and accum.windows == self._windows:
            dropped = max(0, accum.micro_batches - self._micro_batches - accum.pending)
            self._lead -= dropped  # a tail, which may have been another number on each rank
            self._micro_batches += dropped
        if accum.parts.group.size > 1 and accum.windows != self._windows:
            own = min(accum.micro_batches - self._micro_batches, _closed(accum))
            self._lead += math.ceil(_of_all_ranks(accum) / accum.parts.group.size) - own
        if accum.windows != self._windows:
            self._windows, self._micro_batches = accum.windows, accum.micro_batches
            every = self._every or 1
            self._is_crossed = self.count // every > self._closed_at // every
            self._closed_at = self.count

    def is_due(self) -> bool:
        """Whether a save is due after this micro-batch."""
        if self._is_owed:
            self._is_owed = False
            return True
        if self._every_updates is not None and self._is_update:
            self._is_update = False
            if self._updates % self._every_updates == 0:
                return True
        if (
            self._every is not None
            and self._accum.steps is None
            and self._accum.parts.group.size > 1
        ):
            crossed, self._is_crossed = self._is_crossed, False
            return crossed
        return self._every is not None and self.count % self._every == 0

    def is_time(self) -> bool:
        """Whether a save is due by this rank's clock."""
        return self._seconds is not None and time.monotonic() - self._last >= self._seconds

    def owe(self) -> None:
        """A save was given up. One rank makes up for it; several do where they wait for it."""
        self._is_owed = self._accum.parts.group.size == 1

    def saved(self) -> None:
        """The clock starts anew, and nothing is owed."""
        self._last = time.monotonic()
        self._is_owed = False

    def start_at(self, count: int) -> None:
        """Another process has counted to `count`."""
        accum = self._accum
        self._updates = accum.updates
        self._lead = count - accum.micro_batches
        self._closed_at = count - accum.pending
        self._windows = accum.windows
        self._micro_batches = accum.micro_batches - accum.pending


def _closed(accum: Accumulator) -> int:
    return 0 if accum.parts.state.closed is None else accum.parts.state.closed.micro_batches


def _of_all_ranks(accum: Accumulator) -> float:
    return float(accum.parts.normalizer.micro_batches)
