"""The generators and counters that the order and the noise of a loader's data come from."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from accumplug.dataloading import rng
from accumplug.dataloading.reachable import LEAVES, Place, Reachable, is_library
from accumplug.dataloading.saved_position import MALFORMED

NUMBERS = ("epoch", "_epoch", "iteration", "seed", "initial_seed")
"""Attributes of samplers, datasets and prepared loaders that choose the order of a pass."""


class Generators:
    """Captures and restores all generators that a loader draws from.

    These are the process's own, those that are reachable from the loader (reachable.py), and those
    that the user has named (`given`), which need not be reachable.

    A sampler or dataset may also count its passes and draw its order from that. Under the names in
    `NUMBERS` such an integer is always saved, under any other if it has changed.
    """

    def __init__(self, given: Sequence[Any] = ()) -> None:
        for generator in given:
            if _kind(generator) is None:
                raise TypeError(
                    f"generators= takes torch.Generator, random.Random, numpy.random.Generator and "
                    f"RandomState; got a {type(generator).__name__}"
                )
        self._given = tuple(given)
        self._generators: dict[str, Place] = {}
        self._numbers: dict[str, Place] = {}
        self._counters: dict[str, Place] = {}
        self._initial: dict[str, int] = {}
        self.missing: set[str] = set()
        """Paths of generators whose states could not be restored, as nothing is there."""
        self.skipped: list[str] = []
        """Where the last `look` did not look, in words."""

    def look(self, loader: Any) -> None:
        """Find the generators and counters of `loader`. It takes some milliseconds."""
        found = Reachable(loader)
        self.skipped = found.skipped
        self._generators, self._numbers, self._counters = {}, {}, {}
        for place, value in found.places:
            if type(value) is int and not isinstance(place.owner, dict | list | tuple):
                if place.key in NUMBERS:
                    self._numbers.setdefault(place.path, place)
                elif _may_count(place.owner):
                    self._counters.setdefault(place.path, place)
                    self._initial.setdefault(place.path, value)
            elif not isinstance(value, LEAVES) and _kind(value) is not None:
                self._generators.setdefault(place.path, place)

    @property
    def names(self) -> list[str]:
        """The paths of the generators that were found or given."""
        return [*self._generators, *(f"generators[{i}]" for i in range(len(self._given)))]

    def capture(self) -> rng.State:
        """The states of all of them now."""
        states = rng.capture()
        found = {path: place.value for path, place in self._generators.items()}
        if found:
            states["loader"] = {p: _get(g) for p, g in found.items() if _kind(g) is not None}
        if self._given:
            states["given"] = [_get(generator) for generator in self._given]
        counters = {path: place.value for path, place in self._counters.items()}
        changed = {p: n for p, n in counters.items() if type(n) is int and n != self._initial[p]}
        if changed:
            states["counters"] = changed
        return states

    def restore(self, states: rng.State) -> None:
        """Set all of them to what `capture` gave."""
        rng.restore(states)
        for path, state in states.get("loader", {}).items():
            place = self._generators.get(path)
            if place is None or _kind(generator := place.value) is None:
                self.missing.add(path)
            else:
                _set(generator, state)
        given = states.get("given", [])
        for generator, state in zip(self._given, given, strict=bool(given)):
            _set(generator, state)
        counted = states.get("counters", {})
        for path, place in self._counters.items():
            number = counted.get(path, self._initial[path])
            if place.value != number:
                place.set(number)

    def check(self, states: rng.State) -> None:
        """Raise TypeError for what `restore` could not restore; nothing is changed.

        ValueError: other generators have been named.
        """
        given = states.get("given", [])
        if len(given) != len(self._given) and given:
            raise ValueError(
                f"generators= has {len(self._given)} generators here and had {len(given)} in the "
                f"run that saved; give the same ones in the same order"
            )
        now = self.capture()
        try:
            if any(type(n) is not int for n in states.get("counters", {}).values()):
                raise TypeError("a counter is no integer")
            self.restore(states)
        except (*MALFORMED, ValueError) as error:
            raise TypeError(f"the state of a random generator: {error}") from error
        finally:
            self.restore(now)
            self.missing.clear()

    def numbers(self) -> dict[str, int]:
        """Epoch numbers and seeds by path."""
        return {p: n for p, place in self._numbers.items() if type(n := place.value) is int}

    def set_numbers(self, numbers: dict[str, int]) -> None:
        """Set what `numbers` gave, where it is still there."""
        for path, number in numbers.items():
            if (place := self._numbers.get(path)) is not None and place.value != number:
                place.set(number)


def _may_count(owner: Any) -> bool:
    """Whether an integer in `owner` may count passes: it is a sampler, a dataset or a loader."""
    kind = type(owner)
    if is_library(kind) or isinstance(owner, type):
        return False
    return hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")


def _kind(value: Any) -> str | None:
    """Which sort of generator `value` is, or None."""
    if isinstance(value, torch.Generator):
        return "torch"
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
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
