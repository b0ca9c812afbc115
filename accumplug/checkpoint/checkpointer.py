"""Saves a run at any micro-batch while it goes on, and brings a new process back to it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from accumplug.accumulator import Accumulator
from accumplug.batches import Feed
from accumplug.options import inner

from . import window
from .background import Writer
from .format import list_checkpoints
from .order import Order
from .restore import Position, find
from .snapshot import Snapshot
from .subject import State, Subject


class Checkpointer:
    """Checkpoints of a run at any micro-batch, from which a new process goes on exactly.

    >>> checkpoint = Checkpointer("runs/a", accum, model=model, loader=loader, every=50)
    >>> position = checkpoint.resume()  # None on a fresh start
    >>> for epoch in range(accum.epoch, epochs):
    ...     for x, y in accum.batches(loader):
    ...         with accum(model):
    ...             accum.backward(loss_fn(model(x), y))
    ...     if checkpoint.interrupted:
    ...         break

    Once built it acts by itself when a block ends. What it saves: models, optimizers, schedulers
    and scaler of `accum`, the open window with its gradients, random numbers, the place in the
    data. Weights and moments are written once for each update and linked after that.

    Args:
        directory: where the checkpoints are; one run at a time writes there.
        accum: the Accumulator whose blocks are followed.
        model: the model or models, as they are given to `accum`; an Accelerator's if left out.
        loader: what `accum.batches` goes through, or what the order of that comes from.
        every: save after so many micro-batches.
        every_seconds: save when so much time has passed since the last save.
        keep: how many checkpoints stay.
        background: write in a thread, so that the loop waits for a copy in memory only.
        signals: save and end the pass when one of these arrives.
        stateful: other objects with state_dict and load_state_dict (an EMA of the weights; the
            optimizer, if `accum` was not given it).

    Raises:
        ValueError: a loader whose order can't be drawn again, or something that would not be
            saved.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        accum: Accumulator,
        *,
        model: nn.Module | Sequence[nn.Module] | None = None,
        loader: Any = None,
        every: int | None = None,
        every_seconds: float | None = None,
        keep: int = 2,
        background: bool = True,
        signals: Sequence[int] = (),
        **stateful: Any,
    ) -> None:
        _check_intervals(every, every_seconds)
        if accum._keeper is not None:
            raise ValueError("this Accumulator has a Checkpointer already; close() it first")
        self.directory = Path(directory)
        self._accum = accum
        self._every = every
        self._every_seconds = every_seconds
        self._order = Order(loader)
        self._subject = _subject(accum, model, stateful)
        self._snapshot = Snapshot(accum, self._subject, self._order, 0, background)
        self._writer = Writer(directory, keep=keep, background=background)
        self._source: Path | None = None
        self._resumed = False
        self._feed_state: State | None = None
        self._saved_at: tuple[int, ...] | None = None
        self._last_save = time.monotonic()
        self._waits_for_step = False
        self._interrupted = False
        accum._keeper = self
        accum._before_block.append(self._before_block)
        accum._after_block.append(self._after_block)

    # -- what a run calls ----------------------------------------------------------------------

    @property
    def interrupted(self) -> bool:
        """Whether a signal has ended the pass, and the run was saved for it."""
        return self._interrupted

    def save(self) -> Path:
        """Save now, and wait until it is on disk; between two blocks."""
        self._save()
        if (path := self.wait()) is None:
            raise RuntimeError(f"nothing was written into {self.directory}")
        return path

    def resume(self) -> Position | None:
        """Go on from the newest whole checkpoint; None if there is none.

        A newer one that is damaged is passed over with a warning that names the file.

        Raises:
            RuntimeError: inside of a block or a pass.
            ValueError: the checkpoint is of other objects than these.
        """
        accum = self._accum
        if accum._micro is not None or accum._feed is not None:
            raise RuntimeError("resume inside of a pass; call it before accum.batches(...)")
        self.wait()
        found = find(self.directory)
        self._resumed = True
        for reason in found.passed:
            warnings.warn(f"passed over: {reason}", stacklevel=2)
        if found.checkpoint is None:
            return None
        path, parts = found.checkpoint.path, found.parts
        self._load(parts)
        self._source = path
        self._snapshot.is_of(path)
        self._saved_at = self._here()
        return Position(
            update=accum.updates,
            micro_batch=accum.micro_batches,
            epoch=accum.epoch,
            position=accum.position,
            pending=accum.pending,
            path=path,
            passed=found.passed,
        )

    def wait(self) -> Path | None:
        """Wait until nothing is being written; the newest checkpoint of this run, if any."""
        try:
            return self._writer.wait()
        except RuntimeError:
            self._snapshot.forget()
            raise

    def close(self) -> None:
        """Wait, and let go of the Accumulator. Closing twice is fine."""
        accum = self._accum
        if accum._keeper is self:
            accum._keeper = None
            accum._before_block.remove(self._before_block)
            accum._after_block.remove(self._after_block)
        self._writer.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- what accum.batches calls --------------------------------------------------------------

    def open_pass(self, feed: Feed, loader: Any) -> Iterator[tuple[Any, bool]]:
        """The items of a pass, from where it is to go on."""
        if self._interrupted:
            raise RuntimeError(
                "the run was interrupted and saved; leave the loop: if checkpoint.interrupted: "
                "break"
            )
        accum = self._accum
        state, self._feed_state = self._feed_state, None
        accum._feed = feed
        if self._order.begun and state is not None:
            window.put_feed(state, feed)
        else:
            accum.position = 0
        return self._order.open(loader, accum.position)

    def must_stop(self, meets: bool) -> bool:
        """Whether the pass has to end before the next block."""
        return self._interrupted

    def after_body(self) -> bool:
        """The loop has come back for the next item; whether the pass has to end."""
        self._order.handed_out(self._accum.position)
        if self._waits_for_step:
            self._act()
        return self._interrupted

    # -- what accum calls ----------------------------------------------------------------------

    def _before_block(self) -> None:
        try:
            self._writer.check()
        except RuntimeError:
            self._snapshot.forget()
            raise
        if self._accum._feed is None:
            if self._order.loader is not None:
                raise RuntimeError(
                    "the place in the data is not known, as the loop goes through it by itself; "
                    "let it go through accum.batches(loader), or leave out loader= and bring the "
                    "data to accum.micro_batches yourself"
                )
            if self._waits_for_step:
                self._act()
        self._order.settle()

    def _after_block(self) -> None:
        self._waits_for_step = self._steps_later()
        if not self._waits_for_step:
            self._act()

    def _steps_later(self) -> bool:
        """Whether the window has closed and the loop has its step still to take."""
        accum = self._accum
        if accum.takes_step or accum.pending:
            return False
        loop = accum._loop
        return loop is None or not (loop.stepped or loop.was_skipped())

    def _act(self) -> None:
        """Between two blocks: save, if it is time."""
        self._waits_for_step = False
        if self._is_due() and self._here() != self._saved_at:
            self._save()

    def _is_due(self) -> bool:
        if self._every is not None and self._accum.micro_batches % self._every == 0:
            return True
        seconds = self._every_seconds
        return seconds is not None and time.monotonic() - self._last_save >= seconds

    # -- saving and loading --------------------------------------------------------------------

    def _here(self) -> tuple[int, ...]:
        accum = self._accum
        return accum.windows, accum.pending, accum.micro_batches, accum.epoch, accum.position

    def _save(self) -> None:
        self._refuse_foreign_directory()
        if (last := self.wait()) is not None:
            self._source = last
        job = self._snapshot.take(self._source)
        try:
            self._writer.submit(job)
        except RuntimeError:
            self._snapshot.forget()
            raise
        self._saved_at, self._last_save = self._here(), time.monotonic()

    def _load(self, parts: State) -> None:
        models, optimizers = len(self._subject.models), len(self._subject.optimizers)
        own = parts["rank-0"]
        self._subject.load_weights(_several(parts["model"], models))
        self._subject.load_progress(parts["progress"], _several(parts["optimizer"], optimizers))
        self._subject.load_others(parts.get("objects-0", {}))
        window.put(own, self._accum, self._subject, self._order)
        self._feed_state = own["feed"]

    def _refuse_foreign_directory(self) -> None:
        """A later checkpoint of another run would be taken for this one's."""
        if self._resumed:
            return
        if found := list_checkpoints(self.directory):
            raise RuntimeError(
                f"{found[-1]} is of another run; call resume() before training to go on from it, "
                f"or give another directory"
            )
        self._resumed = True


def _check_intervals(every: int | None, every_seconds: float | None) -> None:
    if every is not None and (type(every) is not int or every < 1):
        raise ValueError(f"every is a number of micro-batches of at least 1; got {every!r}")
    if every_seconds is not None and not every_seconds > 0:
        raise ValueError(f"every_seconds is a number above 0; got {every_seconds!r}")


def _subject(accum: Accumulator, model: Any, stateful: dict[str, Any]) -> Subject:
    """What is to be saved, complete, or ValueError."""
    loop = accum._loop
    if model is None and loop is not None:
        model = loop.models()
    models = [model] if isinstance(model, nn.Module) else list(model or ())
    if not models or not all(isinstance(one, nn.Module) for one in models):
        raise ValueError("model is the torch module, or the modules, that accum is given")
    optimizers = list(accum._options.optimizers)
    schedulers = list(accum._options.schedulers)
    if loop is not None:
        optimizers += [inner(o) for o in loop.accelerator._optimizers]
        schedulers += [inner(s) for s in loop.accelerator._schedulers]
    for name, thing in stateful.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise ValueError(f"{name} is a {type(thing).__name__} without state_dict")
    if not optimizers and not stateful:
        raise ValueError(
            "neither accum nor the Checkpointer knows an optimizer, so its state would not be "
            "saved; give it to the Accumulator, or here: optimizer=optimizer"
        )
    known = {id(p) for one in models for p in one.parameters()}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"the optimizer steps a parameter of shape {tuple(parameter.shape)} of none of "
                    f"the models given; give all of them: model=[...]"
                )
    return Subject(models, _each(optimizers), _each(schedulers), accum._scaler, stateful)


def _each(things: list[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())


def _several(part: Any, count: int) -> list[Any]:
    """The states in a part: one is stored as it is, see snapshot.py."""
    return [part] if count == 1 else part
