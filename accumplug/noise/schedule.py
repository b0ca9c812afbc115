"""A schedule for `steps` that follows the gradient noise scale; off unless it is passed."""

from __future__ import annotations

from accumplug.noise.scale import NoiseScale

__all__ = ["NoiseSchedule"]


class NoiseSchedule:
    """A `steps` schedule that follows the noise scale; nothing uses it unless it is passed.

    >>> schedule = NoiseSchedule(noise, start=4, most=64)
    >>> accum = Accumulator(steps=schedule, optimizer=optimizer)
    >>> accum.noise_scale = noise

    It doubles the steps when the whole interval lies above twice the window's weight,
    halves them when it lies below half of it, and then rests for `patience` updates. Growing
    the batch along a run is appendix D of McCandlish et al. 2018 (arXiv 1812.06162); the learning
    rate is not touched. A `Checkpointer` saves it if it is given: `schedule=schedule`.
    """

    def __init__(
        self, noise: NoiseScale, *, start: int, least: int = 2, most: int, patience: int = 50
    ) -> None:
        """Follow `noise` from `start` steps on, within `least` and `most`.

        Args:
            noise: what `accum.noise_scale` is.
            start: steps of the first windows.
            least: fewest steps; below 2 there is nothing to compare, and it stays there.
            most: most steps.
            patience: updates between two changes.

        Raises:
            ValueError: not 1 <= least <= start <= most, or patience < 1.
        """
        if not 1 <= least <= start <= most or patience < 1:
            raise ValueError(
                "need 1 <= least <= start <= most and patience >= 1, got "
                f"least={least}, start={start}, most={most}, patience={patience}"
            )
        self.noise, self.least, self.most, self.patience = noise, least, most, patience
        self._steps, self._changed = start, 0

    def __call__(self, update_count: int) -> int:
        """Give the steps of the window that makes update number `update_count`."""
        if update_count - self._changed >= self.patience and self.noise.estimate.windows:
            now, weight = self.noise.estimate, self.noise.big_weight
            if now.low > 2 * weight and 2 * self._steps <= self.most:
                self._steps, self._changed = 2 * self._steps, update_count
            elif now.high < weight / 2 and self._steps // 2 >= self.least:
                self._steps, self._changed = self._steps // 2, update_count
        return self._steps

    def state_dict(self) -> dict[str, int]:
        """Give the steps and when they last changed; the noise scale saves itself."""
        return {"steps": self._steps, "changed": self._changed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a `state_dict()`."""
        self._steps, self._changed = int(state["steps"]), int(state["changed"])
