"""The values that can be reached from a loader, and the bounds at which the search stopped.

A loader keeps generators and counters in attributes, `__slots__`, lists, dicts, closures (also of a
collate_fn), class attributes, modules of torch, and in globals that its functions use. The same
code builds the same loader in another process, so a value is known by the path that leads to it,
such as "sampler.generator".
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

DEPTH = 12
OBJECTS = 10_000
ITEMS = 1_000  # of one list or dict
SAMPLE = 64
"""A list or dict that begins with so many items of plain data is taken for nothing but data."""
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "accelerate", "accumplug"}
LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.Tensor,
    torch.dtype,
    slice,
    range,
)
_CLOSED = (
    "accumplug.",
    "accelerate.state.",
    "threading.",
    "_thread.",
    "multiprocessing.",
    "concurrent.",
    "asyncio.",
    "logging.",
    "socket.",
    "subprocess.",
    "_io.",
    "io.",
    "numpy.",
    "torch._C.",
)
_CONTAINERS = (list, tuple, deque, dict)


@dataclass(frozen=True)
class Place:
    """An attribute, an item, or a cell of a closure, and the path that leads to it."""

    path: str
    owner: Any
    key: Any

    @property
    def value(self) -> Any:
        """What is there now; None if nothing is."""
        try:
            if isinstance(self.owner, types.CellType):
                return self.owner.cell_contents
            if isinstance(self.owner, _CONTAINERS):
                return self.owner[self.key]
            return getattr(self.owner, self.key)
        except (AttributeError, LookupError, ValueError):
            return None

    def set(self, value: Any) -> None:
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        else:
            setattr(self.owner, self.key, value)


class Reachable:
    """All places that can be reached from `root`, each object once, the nearest first."""

    def __init__(self, root: Any) -> None:
        self.places: list[tuple[Place, Any]] = []
        """Each with the value that it has now."""
        self.skipped: list[str] = []
        """What was not looked at, and why, in words."""
        self._seen = {id(root)}
        self._alive = [root]
        """What is known by its id must not be freed meanwhile."""
        self._queue: deque[tuple[str, Any, int]] = deque([("", root, 0)])
        while self._queue:
            prefix, owner, depth = self._queue.popleft()
            for place in self._inside(prefix, owner):
                value = place.value
                self.places.append((place, value))
                if not isinstance(value, LEAVES) and id(value) not in self._seen:
                    self._enter(place.path, value, depth + 1)

    def _enter(self, path: str, value: Any, depth: int) -> None:
        if not _can_be_opened(value):
            return
        if depth > DEPTH or len(self._seen) >= OBJECTS:
            bound = f"{DEPTH} steps" if depth > DEPTH else f"{OBJECTS} objects"
            if not self.skipped or not self.skipped[-1].startswith("what"):
                self.skipped.append(f"what comes after {bound}, as {path}")
            return
        self._seen.add(id(value))
        self._alive.append(value)
        self._queue.append((path, value, depth))

    def _inside(self, prefix: str, owner: Any) -> Iterable[Place]:
        dot = f"{prefix}." if prefix else ""
        if isinstance(owner, _CONTAINERS):
            return self._items(prefix, dot, owner)
        if isinstance(owner, types.FunctionType):
            return _of_function(dot, owner)
        if isinstance(owner, types.MethodType):
            return [Place(dot + name, owner, name) for name in ("__self__", "__func__")]
        if isinstance(owner, types.BuiltinMethodType):
            return [Place(f"{dot}__self__", owner, "__self__")]
        if isinstance(owner, functools.partial):
            return [Place(dot + name, owner, name) for name in ("func", "args", "keywords")]
        return _of_class(owner) if isinstance(owner, type) else _of_object(dot, owner)

    def _items(self, prefix: str, dot: str, owner: Any) -> Iterator[Place]:
        keys: Iterable[Any] = owner if isinstance(owner, dict) else range(len(owner))
        if len(owner) > SAMPLE and all(_is_plain(owner[key]) for key in islice(keys, SAMPLE)):
            return
        looked_at = list(islice(keys, ITEMS))
        if len(owner) > ITEMS:
            self.skipped.append(f"{prefix} beyond its first {ITEMS} of {len(owner)}")
        for index, key in enumerate(looked_at):
            # the text of another key may be an address
            yield Place(f"{dot}{key if type(key) in (str, int) else index}", owner, key)


def _of_object(dot: str, owner: Any) -> Iterator[Place]:
    # _iterator: the running workers of a loader with persistent_workers
    for name in getattr(owner, "__dict__", {}):
        if name != "_iterator" and isinstance(name, str):
            yield Place(dot + name, owner, name)
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{kind.__name__.lstrip('_')}{name}" if _is_private(name) else name
            if name not in ("__dict__", "__weakref__"):
                yield Place(dot + name, owner, mangled)
        if not is_library(kind):
            yield from _of_class(kind)


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _of_class(owner: type) -> Iterator[Place]:
    """Its attributes, and what its methods use."""
    for name, value in list(vars(owner).items()):
        value = _unwrapped(value)
        path = f"{owner.__module__}:{owner.__qualname__}.{name}"
        if isinstance(value, types.FunctionType):
            yield from _of_function(f"{path}.", value)
        elif not _is_private(name) and not name.startswith("__"):
            yield Place(path, owner, name)


def _unwrapped(value: Any) -> Any:
    """The function behind a property, a classmethod or a staticmethod."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value


def _of_function(dot: str, function: types.FunctionType) -> Iterator[Place]:
    """Its closure, defaults, attributes, and the globals that its code names."""
    if is_library(function):
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield Place(f"{dot}{name}", cell, name)
    for name in ("__defaults__", "__kwdefaults__", "__dict__"):
        if getattr(function, name):
            yield Place(f"{dot}{name}", function, name)
    names = set(_names(code))
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in _LIBRARIES:
                for attribute in sorted(names & vars(value).keys()):
                    yield Place(f"{value.__name__}:{attribute}", value, attribute)
        else:
            yield Place(f"{function.__module__}:{name}", function.__globals__, name)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a lambda or a function inside of it
            yield from _names(constant)


def is_library(thing: Any) -> bool:
    """Whether a class or function belongs to Python, torch, NumPy, Accelerate or accumplug."""
    return (getattr(thing, "__module__", None) or "builtins").partition(".")[0] in _LIBRARIES


def _can_be_opened(value: Any) -> bool:
    if isinstance(value, (*_CONTAINERS, types.MethodType, functools.partial)):
        return len(value) > 0 if isinstance(value, _CONTAINERS) else True
    if isinstance(value, (type, types.FunctionType)):
        return not is_library(value)
    if isinstance(value, types.BuiltinMethodType):
        return not isinstance(value.__self__, (types.ModuleType, type(None)))
    if isinstance(value, types.ModuleType):
        return False
    if f"{type(value).__module__}.".startswith(_CLOSED):
        return False
    return hasattr(value, "__dict__") or any("__slots__" in vars(k) for k in type(value).__mro__)


def _is_plain(value: Any, depth: int = 3) -> bool:
    """Whether `value` is data, in which no generator is looked for: numbers, tensors, text."""
    if isinstance(value, LEAVES) or type(value).__module__ == "numpy":
        return True
    if depth and isinstance(value, _CONTAINERS):
        values = value.values() if isinstance(value, dict) else value
        return all(_is_plain(item, depth - 1) for item in islice(values, 8))
    return False
