"""A thread that writes checkpoints, one at a time, while the loop continues."""

from __future__ import annotations

import os
import secrets
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path

from accumplug.errors import CheckpointError
from accumplug.storage.commit import Destination, Job, write
from accumplug.storage.files import FileEntry
from accumplug.storage.manifest import name_of
from accumplug.storage.probe import missing_calls
from accumplug.storage.retention import WRITING, remove_leftovers, remove_older


class Writer:
    """Writes checkpoints into `directory`, on each rank the files of that rank.

    Every rank submits the same saves in the same order. The tensors of a job must not change
    until `wait` returns or the next `submit` does, its `live` ones until `job.live.release()` does.
    Several ranks need a `token` that is the same on all of them and new in each run, and a
    directory that all of them see.

        writer = Writer("runs/a", keep=2)
        writer.submit(Job({"update": 3, "micro_batch": 52}, {"model": encode(model.state_dict())}))
        ...                 # the loop continues
        writer.check()      # raises if the write has failed, doesn't wait
        writer.close()

    A failure is raised once, as a RuntimeError, by whichever of `check`, `submit`, `wait` and
    `close` comes next. `last` is the newest checkpoint that this writer made whole (rank 0).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 2,
        keep_every: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        token: str | None = None,
        background: bool = True,
        timeout: float = 600.0,
    ) -> None:
        if token is None:
            if world_size > 1:
                raise ValueError(
                    f"{world_size} ranks need one token that is the same on all of them"
                )
            token = secrets.token_hex(8)
        self.destination = Destination(
            Path(directory), token, rank, world_size, keep, timeout, keep_every
        )
        self.background = background
        self.last: Path | None = None
        self.files: dict[str, FileEntry] = {}
        """The files that this rank has written so far, by name."""
        self._notices: list[str] = []
        self._stays = False
        self._resumed: Path | None = None
        self._unchecked: set[str] = set()
        self._number = 0
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        """Set while nothing is in flight. The thread's own liveness would not do: Python 3.11 takes
        a thread for ended if Ctrl-C interrupts a `join` of it."""
        self._idle.set()
        self._failure: tuple[Job, Exception] | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a write is in flight."""
        return not self._idle.is_set()

    def resume_from(self, path: Path, files: Mapping[str, FileEntry]) -> None:
        """Link the `files` of a checkpoint of another process where they have not changed, after
        they are checked. The first save removes what that process should have removed."""
        self._resumed, self.files, self._unchecked = path, dict(files), set(files)

    def submit(self, job: Job) -> None:
        """Starts to write, after waiting for the write before it."""
        if self._closed:
            raise RuntimeError(f"the writer of {self.destination.directory} is closed")
        self.wait()
        self._number += 1
        if self.background:
            # Not a daemon: a program that ends normally still finishes its last checkpoint.
            thread = threading.Thread(target=self._write, args=(job,), name="checkpoint")
            self._idle.clear()
            self._thread = thread
            try:
                thread.start()
            except BaseException:
                if thread.ident is None:  # it never ran: out of threads, or interrupted before
                    self._idle.set()
                    self._thread = None
                raise
        else:
            self._write(job)
            self.check()

    def check(self) -> None:
        """Raises the failure of a write that has ended; never waits."""
        if self._failure is not None and not self.busy:
            (job, error), self._failure = self._failure, None
            name = name_of(job.position["update"], job.position["micro_batch"])
            raise RuntimeError(
                f"the checkpoint {name} in {self.destination.directory} was not written: {error} "
                f"(the ones before it are untouched)"
            ) from error

    def warn(self) -> None:
        """Warns once of what is no failure: a limited file system, a checkpoint that stays."""
        while self._notices and not self.busy:
            warnings.warn(self._notices.pop(0), stacklevel=3)

    def wait(self) -> Path | None:
        """Waits until nothing is in flight; returns `last`."""
        self._idle.wait()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        return self.last

    def close(self) -> None:
        """Waits, and takes no more. Closing twice is fine."""
        self._closed = True
        self.wait()

    def _write(self, job: Job) -> None:
        try:
            if self._number == 1 and self.destination.rank == 0:
                self._prepare()
            path = write(self.destination, job, self._number, self.files, self._unchecked)
            if path is not None:
                self.last = path
                self._remove_older(path)
        except Exception as error:
            self._failure = job, error
        finally:
            job.live.close()
            self._idle.set()

    def _prepare(self) -> None:
        to = self.destination
        remove_leftovers(to.directory, to.token)
        if self._resumed is not None:  # killed after each save, many processes would leave a pile
            self._remove_older(self._resumed)
        room = to.directory / f"{WRITING}{to.token}-probe"
        if missing := "; ".join(missing_calls(room)):
            self._notices.append(f"the file system of {to.directory} is limited: {missing}")

    def _remove_older(self, newest: Path) -> None:
        """The new checkpoint is on disk by now, so a failure here is none of the save."""
        to = self.destination
        try:
            remove_older(to.directory, newest, to.keep, to.token, to.keep_every)
        except (OSError, CheckpointError) as error:
            if not self._stays:
                self._notices.append(f"an old checkpoint could not be removed ({error})")
            self._stays = True
