"""The random numbers of a process: the states of its generators, taken, kept and set again."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import torch

State = dict[str, Any]
"""What the generators of one process, and perhaps some more, were at one moment."""


def capture() -> State:
    """The states of Python's, NumPy's (if it is imported), torch's and the devices' generators.

    It is taken before each item that is fetched, so it makes copies and no conversions.
    """
    states: State = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if (module := _device_module()) is not None:
        states["devices"] = _of_devices(module)
        states["device"] = module.current_device() if states["devices"] else 0
    return states


def restore(states: State) -> None:
    """Set the generators to what `capture` gave; those it has no state of stay."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    module = _device_module()
    if module is not None and states.get("devices"):
        for index, state in _placed(states, module.current_device()).items():
            if index < module.device_count():
                module.set_rng_state(state, index)


def _placed(states: State, here: int) -> dict[int, torch.Tensor]:
    """The states of the devices by index: that of the process's own goes to its own one `here`."""
    placed: dict[int, torch.Tensor] = dict(enumerate(states["devices"]))
    there = states.get("device", here)
    if there != here and there in placed:
        own, other = placed.pop(there), placed.pop(here, None)
        placed[here] = own
        if other is not None:
            placed[there] = other
    return placed


@functools.cache
def _device_module() -> Any:
    return torch.get_device_module() if torch.accelerator.is_available() else None


def _of_devices(module: Any) -> list[torch.Tensor]:
    if not getattr(module, "is_initialized", lambda: True)():
        return []  # asking would initialise the device, which a fork can't survive
    if hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]
