"""Copies what a save in flight still needs before an optimizer changes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accumplug.parallel.fsdp import local
from accumplug.storage.live import LiveTensors


class StepGuard:
    """A hook before the steps of all optimizers of the process, while a save is in flight.

    torch runs it for whoever calls `step`: accum, a loop, Accelerate, a GradScaler that doesn't
    skip. It ignores optimizers whose parameters are not in the save.
    """

    def __init__(self) -> None:
        self._remove: Callable[[], None] = lambda: None

    def watch(self, live: LiveTensors) -> None:
        """Release these tensors before they are stepped on; forget those before."""
        self.leave()
        seen = weakref.ref(live)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            if (tensors := seen()) is not None and _steps_on(optimizer, tensors):
                tensors.release()

        self._remove = register_optimizer_step_pre_hook(before_step).remove

    def leave(self) -> None:
        """Remove the hook."""
        self._remove()
        self._remove = lambda: None


def _steps_on(optimizer: Optimizer, live: LiveTensors) -> bool:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return any(live.holds(local(p).data_ptr()) for p in parameters)
