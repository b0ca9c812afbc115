"""The two norms of a window that the noise scale is estimated from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accumplug.noise import NoiseScale
from accumplug.running import RunningSum
from accumplug.window import Weight, Window, is_number


class NoiseProbe:
    """Measures for a `NoiseScale`: the first micro-batch's gradient, then the finished one."""

    def __init__(self, noise: NoiseScale, running: RunningSum) -> None:
        self.noise = noise
        self._sum = running
        self._small: Tensor | None = None
        self._weight: Weight = 0.0
        self._large: Tensor | None = None

    def first(self, window: Window, weight: Weight) -> None:
        """After the first backward of a window that goes on: the sum is that gradient alone."""
        if not is_number(weight) or weight > 0:
            self._small = self._sum.norm() * window.divisor(weight)
            self._weight = weight

    def finished(self) -> None:
        """The gradient is finished, and the loop, not accum, will take its norm."""
        if self._small is not None:
            self._large = self._sum.norm()

    def values(self, scale: Any) -> list[Any]:
        """What is to be summed over the ranks: squared norm, 1 / weight, ranks that have them."""
        if self._small is None:
            return [0.0, 0.0, 0.0]
        return [(self._small / (1.0 if scale is None else scale)) ** 2, 1.0 / self._weight, 1.0]

    def tell(self, norm: Any, total: Weight, values: Any) -> None:
        """The window became an update of gradient norm `norm`: take it in. Waits for the device."""
        large = norm if self._large is None else self._large
        small, inverse, ranks = (float(v) for v in values)
        if large is not None and ranks:
            self.noise.update(small / ranks, float(large) ** 2, ranks / inverse, float(total))

    def forget(self) -> None:
        """The window is over."""
        self._small = self._large = None
