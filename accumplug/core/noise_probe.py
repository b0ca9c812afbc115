"""The two norms of a window that the noise scale is estimated from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # of state_dicts, which are JSON and tensors

from torch import Tensor

from accumplug.core.gradients import GradientBuffer
from accumplug.core.optimizer_step import total_norm
from accumplug.core.result import read_together
from accumplug.core.window import Weight, Window
from accumplug.noise.scale import NoiseScale


class NoiseProbe:
    """Measures for a `NoiseScale`: the first micro-batch's gradient, then the finished one."""

    def __init__(self, noise: NoiseScale, gradients: GradientBuffer) -> None:
        self.noise = noise
        self._gradients = gradients
        self._small: Tensor | None = None
        self._weight: Weight = 0.0
        self._large: Tensor | None = None

    def observe_first(self, window: Window, weight: Weight) -> None:
        """After the first backward of a window that goes on: the sum is that gradient alone."""
        if not isinstance(window.weight, float) or window.weight > 0:  # else it was left out
            self._small = self._norm() * window.divisor(weight)
            self._weight = weight

    def observe_last(self, scale: Tensor | None) -> None:
        """Take the norm of the finished gradient, where accum does not step."""
        if self._small is not None:
            self._large = self._norm() / (1.0 if scale is None else scale)

    def values(self, scale: Tensor | None) -> list[Weight]:
        """The values to sum over the ranks: squared norm, 1 / weight, 1 where there are both."""
        if self._small is None:
            return [0.0, 0.0, 0.0]
        one: Weight = 1.0 if scale is None else scale
        return [(self._small / one) ** 2, 1.0 / self._weight, 1.0]

    def record(self, norm: Weight | None, total: Weight, values: Sequence[Weight]) -> None:
        """Record a window that became an update of gradient norm `norm`.

        Waits for the device once, for what the step has not read.
        """
        large = norm if self._large is None else self._large
        if large is None:
            return
        known, weight, small, inverse, ranks = read_together([large, total, *values])
        if ranks:
            self.noise.update(small / ranks, known**2, ranks / inverse, weight)

    def reset(self) -> None:
        """Forget the open window."""
        self._small = self._large = None

    def state_dict(self) -> dict[str, Any]:
        """The noise scale so far, and the measurements of the open window."""
        return {"scale": self.noise.state_dict(), "norm": self._small, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.noise.load_state_dict(state["scale"])
        device, norm, weight = self._gradients.device, state["norm"], state["weight"]
        self._small = None if norm is None else norm.to(device)
        self._weight = weight.to(device) if isinstance(weight, Tensor) else weight

    def _norm(self) -> Tensor:
        """The norm of what will be stepped on: accum's optimizers may have a part of the models."""
        gradients = self._gradients
        if (stepped := gradients.stepped_parameters) and not gradients.fsdp_roots(gradients.models):
            return total_norm(stepped)
        return gradients.norm()
