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
    return states


def restore(states: State) -> None:
    """Set the generators to what `capture` (or `unpack`) gave; those it has no state of stay."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    module = _device_module()
    if module is not None and "devices" in states:
        for index, state in enumerate(states["devices"][: module.device_count()]):
            module.set_rng_state(state, index)


@functools.cache
def _device_module() -> Any:
    return torch.get_device_module() if torch.accelerator.is_available() else None


def _of_devices(module: Any) -> list[torch.Tensor]:
    if not getattr(module, "is_initialized", lambda: True)():
        return []  # asking would initialise the device, which a fork can't survive
    if hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]


def pack(states: State) -> State:
    """`states` as numbers and tensors only."""
    return {name: _packed(state) for name, state in states.items()}


def unpack(states: State) -> State:
    """What was given to `pack`."""
    return {name: _unpacked(state) for name, state in states.items()}


def _packed(state: Any) -> Any:
    """A state with its long runs of words (625 of Python, 624 of NumPy) as tensors."""
    if isinstance(state, (tuple, list)):
        if len(state) > 16 and all(type(word) is int for word in state):
            return {"words": torch.tensor(state, dtype=torch.int64)}
        return type(state)(_packed(item) for item in state)
    if isinstance(state, dict):
        return {key: _packed(item) for key, item in state.items()}
    if type(state).__module__ == "numpy" and getattr(state, "ndim", 0) == 1:
        signed = state.view("int64") if state.dtype == "uint64" else state.astype("int64")
        return {
            "array": torch.tensor(signed.tolist(), dtype=torch.int64),
            "dtype": f"{state.dtype}",
        }
    return state


def _unpacked(state: Any) -> Any:
    if isinstance(state, dict):
        if state.keys() == {"words"}:
            return tuple(state["words"].tolist())
        if state.keys() == {"array", "dtype"}:
            import numpy

            # as a view: words of 64 bits are kept as signed ones
            return numpy.array(state["array"].tolist(), "int64").astype(state["dtype"])
        return {key: _unpacked(item) for key, item in state.items()}
    if isinstance(state, (tuple, list)):
        return type(state)(_unpacked(item) for item in state)
    return state
