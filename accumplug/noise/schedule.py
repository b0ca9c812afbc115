"""A schedule for `steps` that follows the gradient noise scale, for those who pass it."""

from __future__ import annotations

from accumplug.noise.scale import NoiseScale

__all__ = ["NoiseSchedule"]


class NoiseSchedule:
    """A `steps` schedule that follows the gradient noise scale.

    >>> schedule = NoiseSchedule(noise, start=4, most=64)
    >>> accum = Accumulator(steps=schedule, optimizer=optimizer)
    >>> accum.noise_scale = noise

    It doubles the steps when the whole interval is above twice the window's weight, halves them
    when it is below half of it, and then waits for `patience` updates. Growing the batch during a
    run is appendix D of McCandlish et al. 2018 (arXiv 1812.06162); the learning rate is not
    changed. A `Checkpointer` saves it if it is passed: `schedule=schedule`.
    """

    def __init__(
        self, noise: NoiseScale, *, start: int, least: int = 2, most: int, patience: int = 50
    ) -> None:
        """Follow `noise`, starting with `start` steps, between `least` and `most`.

        Args:
            noise: the `NoiseScale` of the run, which is also `accum.noise_scale`.
            start: steps of the first windows.
            least: smallest number of steps. A window of 1 gives no estimate, so at 1 it stays.
            most: largest number of steps.
            patience: updates between two changes.

        Raises:
            TypeError: `noise` is not a NoiseScale, or a number is not an int.
            ValueError: not 1 <= least <= start <= most, or patience < 1.
        """
        if not isinstance(noise, NoiseScale):
            raise TypeError(f"noise must be a NoiseScale, got {noise!r}")
        if any(
            isinstance(n, bool) or not isinstance(n, int) for n in (start, least, most, patience)
        ):
            raise TypeError(
                "start, least, most and patience must be of type int, got "
                f"{start!r}, {least!r}, {most!r}, {patience!r}"
            )
        if not 1 <= least <= start <= most or patience < 1:
            raise ValueError(
                "need 1 <= least <= start <= most and patience >= 1, got "
                f"least={least}, start={start}, most={most}, patience={patience}"
            )
        self.noise, self.least, self.most, self.patience = noise, least, most, patience
        self._steps, self._changed = start, 0

    def __call__(self, update_count: int) -> int:
        """Return the steps of the window that follows `update_count` updates."""
        if update_count - self._changed >= self.patience and self.noise.estimate.windows:
            now, weight = self.noise.estimate, self.noise.big_weight
            if now.low > 2 * weight and 2 * self._steps <= self.most:
                self._steps, self._changed = 2 * self._steps, update_count
            elif now.high < weight / 2 and self._steps // 2 >= self.least:
                self._steps, self._changed = self._steps // 2, update_count
        return self._steps

    def state_dict(self) -> dict[str, int]:
        """Return the steps and the update of their last change; the noise scale is saved apart."""
        return {"steps": self._steps, "changed": self._changed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a `state_dict()`."""
        self._steps, self._changed = int(state["steps"]), int(state["changed"])
