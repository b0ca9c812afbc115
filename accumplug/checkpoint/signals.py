"""Signals that ask a run to save and end, for as long as a Checkpointer is open."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

SAME = 1.0  # seconds in which another signal is the same request


class Signals:
    """Notes that one of `signals` came, once installed. What they did before is not lost.

    The first signal is noted; a function of the program's own that handled it before is called
    as well. One that comes more than a second later goes to what was there before, be it the
    default, which ends the process: whoever sends it does not want to wait. (Within a second it
    is the same request: a scheduler signals all processes, and torchrun its own once more.)

    """

    def __init__(self, signals: Sequence[int]) -> None:
        self.arrived = False
        self._signals = tuple(signals)
        self._since = 0.0
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Set the handlers, in the main thread. A second call does nothing."""
        signals, self._signals = self._signals, ()
        for number in signals:
            self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Set the handlers that were there before, where nobody has set others since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()
        self._signals = ()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a forked worker: the process that has it will save
        before = self._before.get(number)
        now = time.monotonic()
        if not self.arrived:
            self.arrived, self._since = True, now
        insists = now - self._since > SAME
        if callable(before) and (insists or before is not signal.default_int_handler):
            before(number, frame)
        elif insists and before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@dataclass(frozen=True)
class WorkerStart:
    """A worker_init_fn that lets a loader's workers live through signals that ask to save.

    A signal to the whole process group would otherwise end them, and with them the run, before it
    has saved. SIGTERM from the process that has the worker still ends it. The worker has been
    started with all of them blocked, see `protect_workers`.
    """

    signals: tuple[int, ...]
    function: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        ignored = set(self.signals) - {signal.SIGTERM}
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
        if signal.SIGTERM in self.signals:
            # torch 2.13 lets a worker die of a SIGTERM that its parent has not sent. Python's
            # handlers don't see who sent it, sigwaitinfo does.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_for_parent, args=(os.getppid(),), daemon=True).start()
        if self.function is not None:
            self.function(worker)


def _end_for_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


@contextmanager
def protect_workers(loader: Any, signals: Sequence[int]) -> Iterator[None]:
    """Workers that `loader` starts in this block live through `signals`."""
    loader = getattr(loader, "base_dataloader", loader)
    if not signals or not getattr(loader, "num_workers", 0):
        yield
        return
    if (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
        resource_tracker.ensure_running()  # unblocks SIGTERM in this process when it starts
    before = loader.worker_init_fn
    loader.worker_init_fn = WorkerStart(tuple(signals), before)
    # A new process inherits what is blocked: nothing ends it while it starts, and each thread that
    # its libraries make (OpenBLAS does) has SIGTERM blocked, as sigwaitinfo needs it.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        loader.worker_init_fn = before
