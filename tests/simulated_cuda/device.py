"""Gives this process CUDA devices that are simulated (device.cpp), and counts the waits for
them. `load` has to be called before torch is imported, so nothing here imports it at the top."""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

COUNT = 4
PACKAGE = str(Path(__file__).parents[2] / "accumplug")
_library: Any = None
_listeners: list[list[Wait]] = []
_mode = ["default"]


@dataclass(frozen=True)
class Wait:
    """The host waited for a device."""

    kind: str
    """What it called: item, synchronize, a copy from one device to another, an operator."""
    place: str
    """The line of accumplug, else of the caller of torch."""
    thread: str
    """Name of the thread: MainThread, or one of autograd's."""
    by_loop: bool
    """No line of accumplug has called it, but one of the loop has."""

    def __str__(self) -> str:
        return f"{self.kind} at {self.place} ({self.thread})"


@contextmanager
def waits() -> Iterator[list[Wait]]:
    """The waits of all threads while the context is open."""
    seen: list[Wait] = []
    _listeners.append(seen)
    try:
        yield seen
    finally:
        _listeners[:] = [each for each in _listeners if each is not seen]


@contextmanager
def silence() -> Iterator[None]:
    """No report of what this thread does here: it stands for work that is done on a device."""
    _library.set_silent(1)
    try:
        yield
    finally:
        _library.set_silent(0)


def pinned_bytes() -> int:
    """Host memory that is pinned now."""
    return int(_library.memory_pinned())


def _place() -> tuple[str, bool]:
    """The innermost line of accumplug in the stack, else the innermost that is not of torch; and
    whether it is the latter."""
    frames = traceback.extract_stack()[:-2]
    own = [f for f in frames if f.filename.startswith(PACKAGE)]
    others = [f for f in frames if "/torch/" not in f.filename and f.filename != __file__]
    for frame in [*own[-1:], *others[-1:]]:
        return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}", not own
    return "torch", False


def _report(kind: bytes | str) -> int:
    """Called by the library at each wait; whether it is an error."""
    if _listeners or _mode[0] != "default":
        text = kind if isinstance(kind, str) else kind.decode()
        place, by_loop = _place()
        wait = Wait(text, place, threading.current_thread().name, by_loop)
        for seen in _listeners:
            seen.append(wait)
    if _mode[0] == "warn":
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
    return int(_mode[0] == "error")


_callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(_report)


def _wait(*_: Any) -> None:
    """A call of Python's side of torch.cuda that waits."""
    if _report("synchronize"):
        raise RuntimeError("called a synchronizing CUDA operation")


def _index(device: Any) -> int:
    import torch

    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(_library.current_device()) if index is None else index


def _exchange(index: int) -> int:
    """Make a device the current one; the one before, or -1 if it is left alone."""
    if index < 0:
        return -1
    before = int(_library.current_device())
    _library.set_device(index)
    return before


class Generator:
    """The default generator of a device."""

    def __init__(self, index: int) -> None:
        self.index = index

    def manual_seed(self, value: int) -> None:
        """Start over from a seed."""
        _library.seed(self.index, ctypes.c_uint64(value))

    def initial_seed(self) -> int:
        """The seed that it started from."""
        return int(_library.initial_seed(self.index))

    def get_state(self) -> torch.Tensor:
        """As of a CPU generator."""
        import torch

        state = torch.get_rng_state()
        _library.get_rng_state(self.index, ctypes.c_void_p(state.data_ptr()))
        return state

    def set_state(self, state: torch.Tensor) -> None:
        """Go on from a state."""
        data = ctypes.c_void_p(state.data_ptr())
        _library.set_rng_state(self.index, data, ctypes.c_int64(state.numel()))


class Stream:
    """All work of a stream is done when a call returns."""

    def __init__(self, device: Any = None, *_: Any, **__: Any) -> None:
        self.device_index = _index(device)
        self.cuda_stream = id(self)

    def wait_stream(self, other: Stream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def query(self) -> bool:
        """Whether its work is done."""
        return True

    def is_capturing(self) -> bool:
        """There are no graphs."""
        return False

    synchronize = _wait

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        """It happens at once."""

    def wait(self, stream: Stream | None = None) -> None:
        """A stream waits, not the host."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """In milliseconds."""
        return 1.0

    synchronize = _wait


def load(library: str) -> None:
    """Simulate the devices from here on, with the library that `build` has made."""
    global _library
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the simulated devices were loaded")
    _library = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    for name in ("memory_allocated", "memory_peak", "memory_pinned"):
        getattr(_library, name).restype = ctypes.c_int64
    _library.initial_seed.restype = ctypes.c_uint64
    _library.on_wait(_callback)
    # autograd's threads may still clear what a backward has left, and would end the process with
    # std::terminate if they found that Python is gone
    atexit.register(time.sleep, 0.1)
    import torch

    streams = [Stream(index) for index in range(COUNT)]
    cuda = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: COUNT,
        "current_device": lambda: int(_library.current_device()),
        "set_device": lambda device: _library.set_device(_index(device)),
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _exchange,
        "get_device_name": lambda device=None: "simulated",
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "default_generators": tuple(Generator(index) for index in range(COUNT)),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: stream,
        "current_stream": lambda device=None: streams[_index(device)],
        "default_stream": lambda device=None: streams[_index(device)],
        "synchronize": _wait,
        "memory_allocated": lambda device=None: _library.memory_allocated(_index(device)),
        "max_memory_allocated": lambda device=None: _library.memory_peak(_index(device)),
        "reset_peak_memory_stats": lambda device=None: _library.reset_memory_peak(_index(device)),
        "empty_cache": lambda: None,
        "set_sync_debug_mode": lambda mode: _mode.__setitem__(0, str(mode)),
        "get_sync_debug_mode": lambda: _mode[0],
    }
    accelerator = {
        "is_available": lambda: True,
        "device_count": lambda: COUNT,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: int(_library.current_device()),
        "synchronize": _wait,
        "current_stream": cuda["current_stream"],
    }
    for name, function in cuda.items():
        setattr(torch.cuda, name, function)
        if hasattr(torch.cuda.random, name):  # imported there by name
            setattr(torch.cuda.random, name, function)
    for name, function in accelerator.items():
        setattr(torch.accelerator, name, function)
    torch.get_device_module = lambda device=None: (
        torch.cuda if device is None or torch.device(device).type == "cuda" else torch.cpu
    )
    deepcopy = torch.Tensor.__deepcopy__

    def copy_on_device(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """torch copies a storage, and knows none of the device in a CPU build."""
        if tensor.device.type != "cuda" or isinstance(tensor, torch.nn.Parameter):
            return deepcopy(tensor, memo)  # type: ignore[no-any-return]
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    torch.Tensor.__deepcopy__ = copy_on_device
    resize = torch.UntypedStorage.resize_

    def resize_on_device(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        """The same of its memory."""
        if storage.device.type != "cuda":
            return resize(storage, size)
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            torch.ops.simulated_cuda.resize_storage(whole, size)
        return storage

    torch.UntypedStorage.resize_ = resize_on_device
    torch.amp.grad_scaler.amp_definitely_not_available = lambda: False
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
