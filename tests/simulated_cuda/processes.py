"""Processes with simulated devices, for tests to run functions in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks.harness import Ranks

from simulated_cuda import worker


class Gpus(Ranks):
    """Ranks that have simulated devices; a function says itself what it does on them."""

    def __init__(self, places: Path, library: str) -> None:
        super().__init__(places, functools.partial(worker.serve, library=library))


class DeviceRanks(Gpus):
    """For the tests of tests/ranks: all that a rank makes is on its own device."""

    def run(self, world: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """As `Ranks.run`, over a group that reduces on devices and in host memory."""
        options.setdefault("backend", "simulated_mixed")
        return super().run(world, worker.on_own_device, function, *args, **options)
