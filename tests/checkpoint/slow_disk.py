"""A disk that stops while a save is being written, until the loop has gone on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from accumplug.storage import live

PIECE = 64


class SlowDisk:
    """Takes `pieces` of the tensors that are read from where they are, of 64 bytes at most, and
    then nothing until `go_on`.

    `within`: it stops in the middle of reading the next piece, not before it.
    """

    def __init__(self, pieces: int, within: bool = False) -> None:
        self.left = pieces
        self.within = within
        self.stopped = threading.Event()
        self._on = threading.Event()
        self._fetch = live._LiveTensor._fetch
        self._read = live._LiveTensor.read_into

    def go_on(self) -> None:
        """Write the rest."""
        self._on.set()

    @contextmanager
    def installed(self) -> Iterator[SlowDisk]:
        """All saves are written to it."""
        slow = self

        def read_into(tensor: Any, room: memoryview, start: int) -> None:
            for at in range(0, len(room), PIECE):
                if not slow.within:
                    slow._wait()
                slow._read(tensor, room[at : at + PIECE], start + at)

        def fetch(tensor: Any, room: Any, start: int) -> None:
            if not slow.within:
                slow._fetch(tensor, room, start)
                return
            half = len(room) // 2
            slow._fetch(tensor, room[:half], start)
            slow._wait()
            slow._fetch(tensor, room[half:], start + half)

        with (
            mock.patch.object(live._LiveTensor, "read_into", read_into),
            mock.patch.object(live._LiveTensor, "_fetch", fetch),
            mock.patch.object(live, "BLOCK", PIECE),
        ):
            yield self

    def _wait(self) -> None:
        if self.left == 0:
            self.stopped.set()
            assert self._on.wait(20)
        self.left -= 1
