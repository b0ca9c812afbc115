"""Where the order of a loader comes from: the generators and the epoch numbers inside of it."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accumplug.dataloading import rng

NUMBERS = ("epoch", "_epoch", "iteration", "seed", "initial_seed")
"""Attributes of samplers, datasets and prepared loaders that choose the order of a pass."""
DEPTH = 6
OBJECTS = 2000
_CLOSED = (types.ModuleType, type, torch.Tensor, nn.Module, nn.Parameter, torch.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class Sources:
    """The generators and numbers that can be reached from a loader by attributes.

    A loader, its samplers and its dataset may each hold generators of their own (torch's,
    Python's, NumPy's). The same code builds the same loader in another process, so they are
    known by the attributes that lead to them, such as "sampler.generator".
    """

    def __init__(self, loader: Any) -> None:
        self.generators: dict[str, Any] = {}
        self._owners: dict[str, tuple[Any, str]] = {}
        for path, owner, name, value in _walk(loader):
            if _kind(value) is not None:
                self.generators.setdefault(path, value)
            elif name in NUMBERS and type(value) is int:
                self._owners[path] = owner, name

    def capture(self) -> rng.State:
        """The states of the process's generators and of these."""
        states = rng.capture()
        if self.generators:
            states["loader"] = {path: _get(g) for path, g in self.generators.items()}
        return states

    def restore(self, states: rng.State) -> None:
        """Set all of them to what `capture` gave."""
        rng.restore(states)
        for path, state in states.get("loader", {}).items():
            if path in self.generators:
                _set(self.generators[path], state)

    def numbers(self) -> dict[str, int]:
        """Epoch numbers and seeds by path."""
        return {path: getattr(owner, name) for path, (owner, name) in self._owners.items()}

    def set_numbers(self, numbers: dict[str, int]) -> None:
        """Set what `numbers` gave, where it is still there."""
        for path, number in numbers.items():
            if path in self._owners:
                owner, name = self._owners[path]
                if getattr(owner, name) != number:
                    setattr(owner, name, number)


def _walk(loader: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Path, owner, name and value of all attributes that can be reached, each object once."""
    seen = {id(loader)}
    queue: list[tuple[str, Any, int]] = [("", loader, 0)]
    while queue and len(seen) < OBJECTS:
        prefix, owner, depth = queue.pop(0)
        for name, value in _attributes(owner):
            path = prefix + name
            yield path, owner, name, value
            if depth < DEPTH and id(value) not in seen and _is_open(value):
                seen.add(id(value))
                queue.append((f"{path}.", value, depth + 1))


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    if isinstance(owner, (list, tuple)):
        return [(str(index), value) for index, value in enumerate(owner)]
    # _iterator: the running workers of a loader with persistent_workers
    return [(n, value) for n, value in getattr(owner, "__dict__", {}).items() if n != "_iterator"]


def _is_open(value: Any) -> bool:
    """Whether to look inside of `value`: samplers, datasets, loaders, short lists of them."""
    if isinstance(value, (list, tuple)):
        return len(value) <= 64 and any(hasattr(item, "__dict__") for item in value)
    if isinstance(value, (*_CLOSED, *_FUNCTIONS)) or _kind(value) is not None:
        return False
    return hasattr(value, "__dict__") and not type(value).__module__.startswith("accelerate.state")


def _kind(value: Any) -> str | None:
    """Which sort of generator `value` is, or None."""
    if isinstance(value, torch.Generator):
        return "torch"
    if isinstance(value, random.Random):
        return "python"
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.random.RandomState):
            return "numpy legacy"
        if isinstance(value, numpy.random.Generator):
            return "numpy"
    return None


def _get(generator: Any) -> Any:
    kind = _kind(generator)
    if kind == "torch":
        return generator.get_state()
    if kind == "python":
        return generator.getstate()
    return generator.get_state() if kind == "numpy legacy" else generator.bit_generator.state


def _set(generator: Any, state: Any) -> None:
    kind = _kind(generator)
    if kind == "torch":
        generator.set_state(state)
    elif kind == "python":
        generator.setstate(state)
    elif kind == "numpy legacy":
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
