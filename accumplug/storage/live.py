"""Tensors that are written from where they are, and copied only if they are about to change.

The thread that writes a file takes their bytes from the front, block by block. Whoever is about to
change them calls `release` first, which copies what is not written yet from the back, beside the
writer, until the two meet: a fast disk leaves little to copy, a slow one most of it.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accumplug.errors import OverwrittenError
from accumplug.storage.files import BLOCK
from accumplug.storage.safetensors_io import raw

SAMPLES = 16  # words of a tensor that are compared, to notice a write that no counter has counted


class LiveTensors:
    """The tensors of one save that hold still until `release`.

    A write by anybody before that is noticed by the counter that torch has for each tensor, or by
    some of its words if it was made behind torch's back (`.data`, NumPy): the save is given up.
    """

    def __init__(self) -> None:
        self.copied = 0
        """Bytes that `release` had to copy."""
        self.reads = threading.Lock()
        """Held while the writer reads memory that may be about to change."""
        self.copies = threading.Lock()
        """Held while `release` copies."""
        self.claims = threading.Lock()
        """Held while the two divide a tensor between them."""
        self.devices: dict[torch.device, _Device] = {}
        self.sources: dict[int, _LiveTensor] = {}
        """By the id of the tensor."""
        self._places: set[int] = set()
        self._fault: str | None = None

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """Whether a tensor can be read from where it is."""
        return (tensor.is_cpu or tensor.is_cuda) and tensor.is_contiguous() and tensor.numel() > 1

    def add(self, name: str, tensor: Tensor) -> None:
        """Let `tensor`, which is called `name` where it is complained about, be read from here."""
        if tensor.is_cuda and tensor.device not in self.devices:
            self.devices[tensor.device] = _Device(tensor.device)
        self.sources[id(tensor)] = _LiveTensor(self, name, tensor)
        self._places.add(tensor.data_ptr())

    def holds(self, place: int) -> bool:
        """Whether a tensor at this address may still have to be read."""
        return place in self._places

    def release(self) -> None:
        """Before the tensors change: copy what is not written yet, and wait for what is read."""
        self._places = set()
        with self.copies:
            try:
                for live in reversed(list(self.sources.values())):
                    self.copied += live.copy_rest()
            except BaseException:
                self.give_up("the rest of it could not be copied before the optimizer's step")
                raise
            for device in self.devices.values():
                device.hold_loop()
            with self.reads:
                pass  # what the writer is reading now

    def give_up(self, reason: str) -> None:
        """These are not what was to be saved any more."""
        self._fault = self._fault or reason

    def check(self) -> None:
        """Raise OverwrittenError if the save has been given up."""
        if self._fault is not None:
            raise OverwrittenError(self._fault)

    def close(self) -> None:
        """The writer needs them no more."""
        self._places = set()
        with self.copies:
            self.sources = {}


class _LiveTensor:
    """A tensor whose first `read` bytes the writer has claimed, and the last ones the copier."""

    def __init__(self, owner: LiveTensors, name: str, tensor: Tensor) -> None:
        self._owner = owner
        self._name = name
        self._tensor = tensor
        self._version = tensor._version
        self._size = tensor.numel() * tensor.dtype.itemsize
        self._device = owner.devices[tensor.device] if tensor.is_cuda else None
        self._words: np.ndarray[Any, Any] | None = None
        if self._device is None:
            self._bytes = np.frombuffer(raw(tensor), np.uint8)
            words = self._bytes[: self._size // 4 * 4].view("<u4")
            self._words = words[:: max(1, len(words) // SAMPLES)]
            self._before = self._words.tobytes()
        self._read = 0
        self._copied_from = self._size
        self._copies: list[tuple[int, np.ndarray[Any, Any]]] = []
        """Offsets and bytes, the last ones first."""

    def __len__(self) -> int:
        return self._size

    def read_into(self, room: memoryview, start: int) -> None:
        """Fill `room` with the bytes from `start` on, in order. The writer calls it."""
        owner = self._owner
        with owner.reads:
            with owner.claims:
                own = max(0, min(len(room), self._copied_from - start))
                self._read = start + own
            if own:
                self._fetch(np.frombuffer(room[:own], np.uint8), start)
                self._notice_writes()
        if own < len(room):
            with owner.copies:  # until it has what it has claimed
                self._take_copies(room[own:], start + own)
        owner.check()

    def copy_rest(self) -> int:
        """Copy what the writer has not claimed; how many bytes. The loop's thread calls it."""
        copied = 0
        while True:
            with self._owner.claims:
                end = self._copied_from
                start = self._copied_from = max(self._read, end - BLOCK)
            if start == end:
                break
            if self._device is None:
                room = np.empty(end - start, np.uint8)
                np.copyto(room, self._bytes[start:end])
            else:
                room = self._device.copy(self._tensor, start, end)
            self._copies.append((start, room))
            copied += end - start
        if copied:
            self._notice_writes()
        return copied

    def _fetch(self, room: np.ndarray[Any, Any], start: int) -> None:
        end = start + len(room)
        if self._device is None:
            np.copyto(room, self._bytes[start:end])
        else:
            self._device.fetch(room, self._tensor, start, end)

    def _take_copies(self, room: memoryview, start: int) -> None:
        self._owner.check()
        if self._device is not None:
            self._device.await_copies()
        while room:
            offset, copy = self._copies[-1]
            part = copy[start - offset : start - offset + len(room)]
            np.copyto(np.frombuffer(room[: len(part)], np.uint8), part)
            room, start = room[len(part) :], start + len(part)
            if start == offset + len(copy):
                self._copies.pop()  # and free it

    def _notice_writes(self) -> None:
        same = self._tensor._version == self._version
        if not same or (self._words is not None and self._words.tobytes() != self._before):
            self._owner.give_up(f"{self._name} was written to while it was being saved")


class _Device:
    """Copies from a GPU on a stream of its own, which the host waits for in the writer only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._staging: Tensor | None = None
        self._copied: Any = None

    def fetch(self, room: np.ndarray[Any, Any], tensor: Tensor, start: int, end: int) -> None:
        """Fill `room`, through pinned memory that is used again. In the writer."""
        if self._staging is None:
            self._staging = torch.empty(BLOCK, dtype=torch.uint8, device="cpu", pin_memory=True)
        staging = self._staging[: end - start]
        with torch.cuda.stream(self._stream):
            staging.copy_(_bytes(tensor)[start:end], non_blocking=True)
            copied = self._stream.record_event()
        copied.synchronize()
        np.copyto(room, staging.numpy())

    def copy(self, tensor: Tensor, start: int, end: int) -> np.ndarray[Any, Any]:
        """A copy in pinned memory, once `await_copies` is over. In the loop's thread."""
        room = torch.empty(end - start, dtype=torch.uint8, device="cpu", pin_memory=True)
        with torch.cuda.stream(self._stream):
            room.copy_(_bytes(tensor)[start:end], non_blocking=True)
            self._copied = self._stream.record_event()
        tensor.record_stream(self._stream)
        return room.numpy()

    def hold_loop(self) -> None:
        """Let what the loop's stream does from here on wait for the copies; the host does not."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def await_copies(self) -> None:
        """Wait until they are there."""
        if self._copied is not None:
            self._copied.synchronize()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
