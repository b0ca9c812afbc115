"""Saves a running training loop at any micro-batch, and resumes it in a new process."""

from __future__ import annotations

import inspect
import json
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, overload

from torch import nn

from accumplug.accumulator import Accumulator, Handle
from accumplug.checkpoint import elastic, foreign, window_state
from accumplug.checkpoint.arguments import (
    check_count,
    check_directory,
    check_frozen,
    check_seconds,
    check_signals,
    check_stateful,
)
from accumplug.checkpoint.coordination import RankStore
from accumplug.checkpoint.division import BASE
from accumplug.checkpoint.load import Position, find, leave_behind, left_behind
from accumplug.checkpoint.save_handle import SaveHandle
from accumplug.checkpoint.save_policy import SavePolicy
from accumplug.checkpoint.save_schedule import SaveSchedule
from accumplug.checkpoint.signals import protect_workers
from accumplug.checkpoint.snapshot import Snapshot
from accumplug.checkpoint.train_state import State, find_train_state
from accumplug.core.state import DataPassState, SyncPoint
from accumplug.dataloading.position import DataPosition
from accumplug.dataloading.stream_check import VerifyData
from accumplug.errors import CheckpointError, LeaseHeldError, OverwrittenError
from accumplug.storage.layout import list_checkpoints
from accumplug.storage.lease import Lease
from accumplug.storage.manifest import FORMAT
from accumplug.storage.writer import Writer

OPENED = "opened "
"""Begins what a rank tells of a pass that it can resume."""


class Checkpointer:
    """Checkpoints at any micro-batch, from which a new process continues with the same bits.

    >>> checkpoint = Checkpointer("runs/a", accum, model=model, loader=loader, every=50)
    >>> position = checkpoint.resume()  # None on a fresh start
    >>> for epoch in range(accum.epoch, epochs):
    ...     for x, y in accum.batches(loader):
    ...         with accum(model):
    ...             accum.backward(loss_fn(model(x), y))
    ...     if checkpoint.interrupted:
    ...         break

    It acts by itself at the end of each block. It saves the models, optimizers, schedulers and
    scaler of `accum`, the open window with its gradients, the random states and the position in
    the data. Weights and optimizer state are written once for each update and linked after that.

    Args:
        directory: the directory of the checkpoints; one run at a time writes there.
        accum: the Accumulator whose blocks are followed.
        model: the model or models, as they are given to `accum`; an Accelerator's if left out.
        loader: the loader given to `accum.batches`, or the one whose order that follows.
        every: save after so many micro-batches.
        every_updates: save after so many updates, where a save needs no gradients.
        every_seconds: save when so many seconds have passed since the last save.
        keep: number of checkpoints that are kept.
        keep_every: keep the first checkpoint of each so many updates as well, for an evaluation
            later.
        background: write in a thread, beside the loop.
        frozen: "link" writes weights that are not trained once, and links them from then on. "skip"
            leaves those out that are frozen now, for as long as nobody writes into them: whoever
            resumes the run builds the model with the same ones, which is checked.
        copy: copy weights and optimizer state for that; else they are read from where they are,
            until the next step. For a loop that writes into parts of them behind torch's back
            (through NumPy), which can go unnoticed.
        signals: save and end the pass when one of these arrives.
        generators: random generators (of torch, Python or NumPy) that the data draw from and that
            can't be reached from the loader's attributes, items, closures and globals.
        verify_data: what happens when a resumed pass gives other items than the run that saved was
            given: "raise", "warn", or False for items that hold times or ids.
        stateful: other objects with state_dict and load_state_dict (an EMA of the weights; the
            optimizer, if `accum` was not given it).

    Raises:
        ValueError: a loader whose order can't be reproduced, something that would not be saved, or
            options that differ between ranks.
        TypeError: an option of a wrong type, or an unknown one.
    """

    _open: ClassVar[weakref.WeakValueDictionary[str, Checkpointer]] = weakref.WeakValueDictionary()
    """Those of this process that are not closed, by directory."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        accum: Accumulator,
        *,
        model: nn.Module | Sequence[nn.Module] | None = None,
        loader: Any = None,
        every: int | None = None,
        every_seconds: float | None = None,
        every_updates: int | None = None,
        keep: int = 2,
        keep_every: int | None = None,
        background: bool = True,
        frozen: Literal["link", "skip"] = "link",
        copy: bool = False,
        signals: Sequence[int] = (),
        generators: Sequence[Any] = (),
        verify_data: VerifyData = "raise",
        **stateful: Any,
    ) -> None:
        check_directory(directory)
        if not isinstance(accum, Accumulator):
            raise TypeError(f"accum is an Accumulator; got {accum!r:.100}")
        check_stateful(stateful, OPTIONS)
        check_count("keep", keep, "checkpoints")
        if keep_every is not None:
            check_count("keep_every", keep_every, "updates")
        if every is not None:
            check_count("every", every, "micro-batches")
        if every_updates is not None:
            check_count("every_updates", every_updates, "updates")
        if every_seconds is not None:
            check_seconds("every_seconds", every_seconds)
        check_frozen(frozen, copy)
        self._kinds = check_signals(signals)
        self.directory = Path(directory)
        self._close_forgotten()
        if accum.parts.state.observer is not None:
            raise ValueError("this Accumulator has a Checkpointer already; close() it first")
        self._accum = accum
        own = weakref.proxy(self)  # without a circle, what it knows is freed with it
        making_workers = lambda loader: own._making_workers(loader)  # noqa: E731
        self._order = DataPosition(loader, making_workers, generators, verify_data)
        self._train_state = find_train_state(accum, model, stateful)
        if frozen == "skip":
            self._train_state.leave_out_frozen()
        self._schedule = SaveSchedule(accum, every, every_seconds, every_updates)
        ranks = accum.parts.group
        self._store = RankStore(ranks) if ranks.size > 1 else None
        if self._store is not None:
            options: State = {
                "directory": os.path.realpath(directory),
                "every": every,
                "keep": keep,
            }
            options |= {"every_updates": every_updates, "keep_every": keep_every}
            options |= {"every_seconds": every_seconds, "background": background}
            options["frozen"] = frozen
            options |= {"signals": list(map(int, signals)), "objects by name": sorted(stateful)}
            self._store.compare(options)
        self._counts_blocks = ranks.size > 1 and every is not None
        self._policy = SavePolicy(
            accum,
            self._schedule,
            self._kinds,
            self._store,
            save=lambda: own._save(),
            finish=lambda: own._finish(),
            moved=lambda: own._moved(),
        )
        self._snapshot = Snapshot(
            accum, self._train_state, self._order, ranks.rank, background, copy
        )
        self._lease, token, self._refused = self._take_directory()
        self._writer = Writer(
            directory,
            keep=keep,
            keep_every=keep_every,
            rank=ranks.rank,
            world_size=ranks.size,
            token=token,
            background=background,
            timeout=self._store.timeout if self._store else 600.0,
        )
        self._closed = self._checked = False
        self._source: Path | None = None
        self._resumed = self._loaded = False
        self._feed_state: State | None = None
        """The pass that was under way when the run was saved, until it is opened here."""
        self._opened: tuple[DataPassState, int] | None = None
        """The last pass that was opened here, and its number."""
        self._handle: SaveHandle | None = None
        self._saved_at: tuple[int, ...] | None = None
        self._failed: RuntimeError | None = None
        """Why a save was not written, until it is raised."""
        self._given_up = False
        """Whether the last one was, as somebody wrote into what was to be saved."""
        accum.parts.models.declare(self._train_state.models)
        accum.observe_pass(self)
        self._callbacks: list[Handle[Any]] = [
            accum.on_block_start(self._before_block),
            accum.on_block_end(self._after_block),
        ]
        Checkpointer._open[os.path.realpath(directory)] = self

    def _take_directory(self) -> tuple[Lease | None, str, str]:
        """The lease (on rank 0), a token of this run, and why the directory can't be written."""
        token, lease, refused = secrets.token_hex(8), None, ""
        if self._accum.parts.group.rank == 0:
            try:
                lease = Lease(self.directory, token)
            except (LeaseHeldError, OSError) as error:
                refused = str(error)
        if self._store is not None:
            token, refused = json.loads(self._store.share(json.dumps([token, refused])))
        return lease, token, refused

    def _close_forgotten(self) -> None:
        """A notebook's cell that is run again builds its Checkpointer again."""
        before = Checkpointer._open.get(os.path.realpath(self.directory))
        if before is not None:
            warnings.warn(
                f"{self.directory} has a Checkpointer in this process already, which is closed now",
                stacklevel=3,
            )
            before.close()

    # -- what a run calls ----------------------------------------------------------------------

    @property
    def interrupted(self) -> bool:
        """Whether a signal has ended the pass, and the run was saved for it."""
        return self._policy.interrupted

    @overload
    def save(self, *, wait: Literal[True] = True) -> Path: ...

    @overload
    def save(self, *, wait: Literal[False]) -> SaveHandle: ...

    def save(self, *, wait: bool = True) -> Path | SaveHandle:
        """Save now, between two blocks. All ranks have to call it, all of them in the same way.

        Args:
            wait: until the checkpoint is on disk, on all ranks. Else it is written beside the
                loop (with `background=True`), and what is returned tells when it is done. The
                next save waits for it, and the end of the process finishes it.

        Returns:
            Where the checkpoint is, or a handle with `done()` and `result()`.

        Raises:
            RuntimeError: inside of a block, or the checkpoint was not written.
        """
        if not wait:
            return self._save()
        self.wait()
        self._save()
        return self._whole(self._finished())

    def _finished(self) -> Path | None:
        """Wait until the last save is on disk, on all ranks; where it is, if this run made it."""
        path = self._written()
        again = self._given_up
        if self._store is not None:  # what one rank has given up is no checkpoint on any of them
            again = bool(self._store.share("again" if again else ""))
        if again:
            self._snapshot.copies_all = True
            self._save()
            path = self._written()
        failed = self._saved_at is None
        name = path.name if path is not None and not failed else ""
        if self._store is not None:
            name = self._store.share(name)
        if failed:
            self._raise_failed()
        return self.directory / name if name else None

    def _finish(self) -> None:
        """The same for a run that ends here; an error on all ranks if rank 0 could not write."""
        path = self._finished()
        if self._store is not None:
            self._whole(path)

    def resume(
        self, *, start_over: bool = False, start_from: str | os.PathLike[str] | None = None
    ) -> Position | None:
        """Resume from the newest whole checkpoint; None if there is none. All ranks call it.

        A newer one that is proven to be damaged is passed over with a warning that names the file.
        The number of ranks may differ from that of the run that saved, if the effective batch
        stays the same (elastic.py).

        Args:
            start_over: load nothing, and train from the start beside the checkpoints that are
                there. They stay where they are, and no later resume looks at them.
            start_from: what a run is started from that has no checkpoint here yet: a file of
                torch.save with a dict of state_dicts, or a directory of Accelerate's `save_state`.
                Weights, optimizers, schedulers and scaler are loaded; the data, the counters and
                the random numbers begin anew. It is not looked at once there is a checkpoint.

        Raises:
            CheckpointError: there are checkpoints, and the newest can't be read (which is no
                proof of damage), or all of them are damaged.
            RuntimeError: inside of a block or a pass.
            ValueError: the checkpoint is of other objects than these, or of a number of ranks that
                this run can't take over from; the message names the setting to change.
        """
        accum = self._accum
        if accum.parts.state.block is not None or accum.parts.state.data_pass is not None:
            raise RuntimeError("resume inside of a pass; call it before accum.batches(...)")
        self.wait()
        ranks = accum.parts.group
        if start_over:
            if self._refused:
                raise LeaseHeldError(self._refused)
            if ranks.rank == 0:
                leave_behind(self.directory)
            self._resumed = True
            return self._start_from(start_from)
        found = find(self.directory, ranks, self._store, left_behind(self.directory))
        self._resumed = True
        for reason in found.passed:
            warnings.warn(f"passed over: {reason}", stacklevel=2)
        if found.checkpoint is None:
            return self._start_from(start_from)
        path = found.checkpoint.path
        try:
            self._load(found.parts, found.checkpoint.manifest.world_size)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: not what these objects have saved ({error!r})"
            ) from error
        self._source = path
        if found.checkpoint.manifest.format == FORMAT:  # else nothing of it is linked
            self._snapshot.is_saved(found.checkpoint.manifest.world_size, found.parts["still"])
        self._writer.resume_from(path, found.checkpoint.manifest.files)
        self._saved_at = self._here()
        return self._position(path, found.passed)

    def _position(self, path: Path, passed: tuple[str, ...] = ()) -> Position:
        accum = self._accum
        return Position(
            update=accum.updates,
            micro_batch=accum.micro_batches,
            epoch=accum.epoch,
            position=accum.position,
            pending=accum.pending,
            path=path,
            passed=passed,
        )

    def _start_from(self, source: str | os.PathLike[str] | None) -> Position | None:
        """Load what another tool has saved, or raise on all ranks if one can't read it."""
        if source is None:
            return None
        path, states, wrong = Path(source), {}, None
        try:
            states = foreign.read(path)
        except (ValueError, OSError, RuntimeError) as error:
            wrong = error
        failed = self._accum.parts.group.sum([float(wrong is not None)])[0]
        if wrong is not None:
            raise wrong
        if failed:
            raise ValueError(f"{path} can't be read on another rank, see there")
        foreign.load(path, states, self._train_state)
        return self._position(path)

    def wait(self) -> Path | None:
        """Wait until this rank writes nothing; the newest checkpoint of this run, on rank 0."""
        last = self._written()
        self._raise_failed()
        return last

    def close(self) -> None:
        """Wait, and let go of the Accumulator and of the signals. Closing twice is fine.

        A save that was given up, as its weights were written to, is made anew on one rank.
        On several ranks rank 0, which serves the process group's store, waits until the others have
        closed theirs, for a minute at most.
        """
        if not self._closed and self._store is None and self._accum.parts.state.block is None:
            self._written()
            if self._given_up:
                self._save()
        self._close()
        if self._store is not None:
            try:
                self._store.leave()
            except RuntimeError as error:
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)

    def _close(self) -> None:
        self._closed = True
        accum = self._accum
        self._policy.signals.restore()
        if accum.parts.state.observer is self:
            accum.observe_pass(None)
            while self._callbacks:
                self._callbacks.pop().remove()
        if Checkpointer._open.get(os.path.realpath(self.directory)) is self:
            del Checkpointer._open[os.path.realpath(self.directory)]
        try:
            self._written()
            self._writer.close()
        finally:
            self._snapshot.leave()
            if self._lease is not None:
                self._lease.release()
            self._raise_failed()

    def __enter__(self) -> Checkpointer:
        self._policy.signals.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close()  # and don't wait for other ranks, which may have ended with an error too
        except Exception as failure:
            _note(error, f"and while the Checkpointer was closed: {failure}")

    # -- what accum.batches calls --------------------------------------------------------------

    def open_pass(self, data_pass: DataPassState, loader: Any) -> Iterator[tuple[Any, bool]]:
        """The items of a pass, from its first one or from where the saved run was."""
        if self._refused:
            raise LeaseHeldError(self._refused)
        self._policy.signals.install()
        if self._policy.interrupted:
            raise RuntimeError(
                "the run was interrupted and saved; leave the loop: if checkpoint.interrupted: "
                "break"
            )
        state, self._feed_state = self._feed_state, None
        self._accum.parts.state.data_pass, self._opened = (
            data_pass,
            (data_pass, self._accum.parts.state.epoch),
        )
        if self._order.begun and state is not None:
            window_state.restore_pass(state, data_pass)
        else:
            self._accum.parts.state.position = 0
        items = partial(self._order.open, loader, self._accum.parts.state.position)
        loaded, self._loaded = self._loaded, False
        if not loaded or self._store is None:
            return items()
        return self._open_together(items, self._store, data_pass.weigh is not None)

    def _open_together(
        self, resume: Callable[[], Iterator[tuple[Any, bool]]], store: RankStore, weighs: bool
    ) -> Iterator[tuple[Any, bool]]:
        """The items of the first pass after a resume; an error on all ranks if one has other data.

        What the saved run had fetched has been fetched again before the first item is there.
        """
        try:
            items = resume()
            first = list(islice(items, 1))
        except Exception as error:
            with suppress(RuntimeError):
                store.share_all(f"{type(error).__name__}: {error}")
            raise
        buckets = self._train_state.prepared_buckets
        told = store.share_all(f"{OPENED}{[last for _, last in first]} {buckets.waits}")
        # else, and under weigh=, a rank may wait for the others before its first block
        buckets.agreed = told == told[:1] * store.size and not weighs
        failed = {rank: text for rank, text in enumerate(told) if not text.startswith(OPENED)}
        if failed:
            each = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise CheckpointError(f"not all ranks can resume their data. {each}")
        return chain(first, items)

    def must_stop(self, sync_point: SyncPoint) -> bool:
        """Whether the pass has to end before the next block."""
        return self._policy.must_stop(sync_point)

    def after_body(self) -> bool:
        """The loop has come back for the next item; whether the pass has to end."""
        self._order.blocks_ran(self._accum.parts.state.position)
        self._policy.loop_came_back()
        return self._policy.interrupted

    # -- what accum calls ----------------------------------------------------------------------

    def _before_block(self) -> None:
        if self._refused:
            raise LeaseHeldError(self._refused)
        self._policy.signals.install()
        if not self._writer.busy:
            self._written()
        self._raise_failed()
        state = self._accum.parts.state
        if state.data_pass is None:
            self._refuse_unseen_data()
            self._policy.loop_came_back()
        elif self._counts_blocks and state.parts is not None and state.plan is not None:
            raise RuntimeError(
                "under weigh= ranks may cut (split) a window into different numbers of "
                "micro-batches, which every= counts; give every_updates= instead"
            )
        self._order.before_block()
        if not self._checked and self._accum.updates:
            self._check_savable()

    def _after_block(self) -> None:
        if not self._checked and self._accum.updates and self._train_state.has_optimizer_state:
            self._check_savable()
        self._policy.block_ended()

    def _check_savable(self) -> None:
        """After the first update, on all ranks: later only rank 0 would say so, in mid-run."""
        self._checked = True
        self._train_state.check_savable()

    # -- saving and loading --------------------------------------------------------------------

    def _data_pass(self) -> State | None:
        """The state of the pass that is under way, or that the loop has left by a `break`."""
        if self._feed_state is not None:
            return self._feed_state
        if self._opened is None or self._opened[1] != self._accum.parts.state.epoch:
            return None
        return window_state.pass_state(self._opened[0], self._accum)

    def _here(self) -> tuple[int, ...]:
        accum = self._accum
        return accum.windows, accum.pending, accum.micro_batches, accum.epoch, accum.position

    def _moved(self) -> bool:
        return self._here() != self._saved_at

    def _save(self) -> SaveHandle:
        if self._closed:
            raise RuntimeError("save after close(); build another Checkpointer")
        if self._accum.parts.state.block is not None:
            raise RuntimeError("save inside of a block; a micro-batch is saved when it ends")
        if self._refused:
            raise LeaseHeldError(self._refused)
        self._refuse_foreign_directory()
        if (last := self._written()) is not None:
            self._source = last
        more: State = {"count": self._schedule.count, "steps": self._accum.steps}
        job = self._snapshot.take(self._source, self._data_pass(), more)
        self._policy.saved()
        self._given_up = False
        self._saved_at = self._here()
        self._handle = handle = SaveHandle(lambda: self._writer.busy, self._hear_of_it)
        try:
            if self._lease is not None:
                self._lease.check()
            self._writer.submit(job)
        except RuntimeError as error:
            self._fail(error)
        except OSError as error:
            self._fail(RuntimeError(f"the lease of {self.directory} can't be read: {error}"))
        except BaseException:  # Ctrl-C: nothing may be linked as if it had been written
            self._snapshot.forget()
            self._saved_at = None
            raise
        return handle

    def _hear_of_it(self) -> None:
        """Wait for the write in flight for its handle, which raises the failure itself."""
        self._written()
        if self._handle is not None and self._failed is self._handle.error:
            self._failed = None

    def _written(self) -> Path | None:
        """Wait for the write in flight. A failure is kept: at the end of a block it would look as
        if the block had failed, whose micro-batch counts."""
        try:
            path = self._writer.wait()
        except RuntimeError as error:
            self._fail(error)
            return None
        if self._handle is not None:
            self._handle.settle(path, None)
        return path

    def _fail(self, error: RuntimeError) -> None:
        if isinstance(error.__cause__, OverwrittenError):
            warnings.warn(f"{error}; from now on weights are copied, as by copy=True", stacklevel=4)
            self._snapshot.copies_all = self._given_up = True
            self._schedule.owe()
        else:
            self._failed = self._failed or error
        if self._handle is not None:
            self._handle.settle(None, error)
        self._snapshot.forget()
        self._saved_at = None

    def _raise_failed(self) -> None:
        self._writer.warn()
        error, self._failed = self._failed, None
        if error is not None:
            raise error

    def _load(self, parts: State, world: int) -> None:
        """Load what a run on `world` ranks has saved."""
        accum, ranks = self._accum, self._accum.parts.group
        others = parts.get("objects", [{}])
        self._train_state.check(parts["progress"], others[0])
        self._check_base(parts[BASE], world)
        if world == ranks.size:
            own = parts[f"rank-{ranks.rank}"]
        else:
            states = [parts[f"rank-{rank}"] for rank in range(world)]
            own = elastic.redistribute(states, accum, self._train_state)
        self._train_state.load(parts)
        self._train_state.load_objects(others)
        window_state.restore(own, accum, self._train_state, self._order)
        self._feed_state, self._opened, self._loaded = own["feed"], None, True
        self._policy.start_at(own["count"])

    def _check_base(self, base: list[State], world: int) -> None:
        """Raise ValueError, on all ranks, if weights that were left out are other ones here."""
        ranks = self._accum.parts.group
        if not base:
            return
        if self._train_state.is_sharded and world != ranks.size:
            raise ValueError(
                f'a sharded checkpoint with frozen="skip" of {world} ranks can\'t be compared with '
                f"the weights on {ranks.size}; start {world}"
            )
        wrong = self._train_state.difference_from(base)
        if ranks.sum([float(bool(wrong))])[0]:
            raise ValueError(
                f'the checkpoint was saved with frozen="skip", without weights that this run has '
                f"otherwise: {wrong or 'see another rank'}. Build the model with the same ones"
            )

    @contextmanager
    def _making_workers(self, loader: Any) -> Iterator[None]:
        if getattr(loader, "num_workers", 0):
            self.wait()  # a process must not fork while another thread of it holds locks
        with protect_workers(loader, self._kinds):
            yield

    def _whole(self, path: Path | None) -> Path:
        if path is None:
            raise RuntimeError(f"no checkpoint was written into {self.directory}; see rank 0")
        return path

    def _refuse_unseen_data(self) -> None:
        if self._order.loader is None and not self._policy.counts_blocks:
            return
        raise RuntimeError(
            "the place in the data is not known, as the loop goes through it by itself; let it go "
            "through accum.batches(loader), or leave out loader= (and, on several ranks, signals= "
            "and every_seconds=) and bring the data to accum.micro_batches yourself"
        )

    def _refuse_foreign_directory(self) -> None:
        """A later checkpoint of another run would be taken for this one's."""
        if self._resumed or self._accum.parts.group.rank:
            return
        if found := list_checkpoints(self.directory):
            raise RuntimeError(
                f"{found[-1]} is of another run; call resume() before training to continue it, "
                f"or give another directory"
            )
        self._resumed = True


def _note(error: BaseException, text: str) -> None:
    """Let the traceback of `error` show `text` too."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif error.__context__ is None:  # Python 3.10
        error.__context__ = RuntimeError(text)


OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(Checkpointer).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)
