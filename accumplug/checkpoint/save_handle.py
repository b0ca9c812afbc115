"""A save that is written beside the loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class SaveHandle:
    """What `Checkpointer.save(wait=False)` returns. No method of it waits for another rank."""

    def __init__(self, busy: Callable[[], bool], wait: Callable[[], None]) -> None:
        self._busy = busy
        self._wait = wait
        self._settled = False
        self._path: Path | None = None
        self.error: RuntimeError | None = None
        """Why it was not written."""

    def done(self) -> bool:
        """Whether nothing of the save is still to be written by this rank."""
        return self._settled or not self._busy()

    def result(self) -> Path | None:
        """Wait until this rank has written its part: on rank 0 until the checkpoint is whole.

        Returns:
            Where the checkpoint is, on rank 0; None on the others.

        Raises:
            RuntimeError: it was not written.
        """
        if not self._settled:
            self._wait()
        if self.error is not None:
            raise self.error
        return self._path

    def settle(self, path: Path | None, error: RuntimeError | None) -> None:
        """It was written, or failed with `error`; the first word counts."""
        if not self._settled:
            self._settled, self._path, self.error = True, path, error
            self._busy, self._wait = bool, lambda: None  # those before know the Checkpointer
