"""The gradient noise scale: how large a batch still pays, from two norms per window.

Formulas: McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch
Training" (arXiv 1812.06162), appendix A.1. It is an estimate of `trace(Sigma) / |G|^2`, and
equals the critical batch size only as far as their model of a loss holds; on one device,
small batches with Adam's beta2 kept constant in tokens often need no accumulation at all
(Marek et al. 2025, arXiv 2507.07101). Plain arithmetic on floats, without torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["ONE_DEVICE", "NoiseEstimate", "NoiseScale"]

ONE_DEVICE = (
    "On one device a larger batch often does not pay: small ones, with Adam's beta2 kept constant "
    "in tokens, need no accumulation (Marek et al. 2025)."
)


@dataclass(frozen=True)
class NoiseEstimate:
    """The estimate of the noise scale at one moment.

    Attributes:
        value: the noise scale, in the unit of the weights (items, tokens); None while the
            estimate of `|G|^2` is not above 0.
        low: the lower end of the 95 % interval.
        high: its upper end; infinite while `|G|^2` can't be distinguished from 0.
        gradient_sq: the estimate of `|G|^2`, the squared norm of the true gradient.
        trace: the estimate of trace(Sigma), the summed variance of one item's gradient.
        windows: the number of windows it is computed from.
    """

    value: float | None
    low: float
    high: float
    gradient_sq: float
    trace: float
    windows: int

    def compare(self, effective_batch: float) -> Literal["below", "near", "above", "unclear"]:
        """Say whether a batch is "below", "near" or "above" the noise scale, or "unclear".

        "below" and "above" mean by a factor of 2 or more, and outside the interval; "near" means
        neither, with an interval no wider than a factor of 4.
        """
        if effective_batch < self.low and (self.value is None or 2 * effective_batch <= self.value):
            return "below"
        if self.value is None:
            return "unclear"
        if effective_batch > self.high and effective_batch >= 2 * self.value:
            return "above"
        return "near" if self.high <= 4 * self.low else "unclear"

    def sentence(self, effective_batch: float, unit: str = "items") -> str:
        """Describe in one sentence the meaning of the estimate for this effective batch."""
        unbounded = not math.isfinite(self.high)
        if self.value is None or (unbounded and self.low == 0):
            above = f" (above {_short(self.low)} {unit})" if self.low > 0 else ""
            return (
                f"Gradient noise scale: not known after {self.windows} windows{above}; it needs "
                "more windows, or larger ones."
            )
        low, high = _short(self.low), _short(self.high)
        interval = f"95 %: above {low}" if unbounded else f"95 % between {low} and {high}"
        known = f"{_short(self.value)} {unit} ({interval})"
        meaning = {
            "below": "below it: a larger batch still saves updates",
            "near": "near it: a larger batch saves few updates more",
            "above": "above it: most of a larger batch would be wasted",
            "unclear": "not clearly below or above it yet",
        }[self.compare(effective_batch)]
        return (
            f"Gradient noise scale: {known}, an estimate; "
            f"a batch of {effective_batch:g} {unit} is {meaning}."
        )


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


@dataclass
class _Running:
    """Exponentially weighted means, variances and covariance of trace and |G|^2."""

    windows: int = 0
    trace: float = 0.0
    gradient_sq: float = 0.0
    var_trace: float = 0.0
    var_gradient_sq: float = 0.0
    covariance: float = 0.0
    sum_of_squared_weights: float = 0.0
    big_weight: float = 0.0


class NoiseScale:
    """The smoothed gradient noise scale of a run: the batch above which more items gain little.

    >>> accum.noise_scale = NoiseScale()  # each window updates it
    >>> print(accum.noise_scale.estimate.sentence(effective_batch=accum.last.weight))

    It is `trace(Sigma) / |G|^2` in the unit of the weights, from the unbiased estimators of
    McCandlish et al. 2018 (arXiv 1812.06162, appendix A.1), for the window's first micro-batch
    and its sum::

        |G|^2         (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small)
        trace(Sigma)  (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big)

    Numerator and denominator are smoothed separately (their ratio is biased window by
    window). The interval is Fieller's for a ratio of two means, from the spread of the
    windows; it takes windows as independent draws, so it is too narrow while the noise
    scale drifts.

    It is an estimate, and changes nothing by itself. On one device a larger batch often does not
    pay even below it (Marek et al. 2025, arXiv 2507.07101).
    """

    def __init__(self, *, decay: float = 0.99) -> None:
        """Start without data; `decay` is the weight of the past at each window.

        Raises:
            TypeError: `decay` is not a number.
            ValueError: `decay` is not in [0, 1).
        """
        if isinstance(decay, bool) or not isinstance(decay, int | float):
            raise TypeError(f"decay must be a number, got {decay!r}")
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay!r}")
        self.decay = decay
        self._state = _Running()

    def update(
        self, small_sq_norm: float, big_sq_norm: float, small_weight: float, big_weight: float
    ) -> bool:
        """Add one window; return whether it could be used.

        A window is skipped if a number is not finite or its two weights are equal.

        Args:
            small_sq_norm: squared norm of the mean gradient over the small batch: the
                window's first micro-batch on this rank; over ranks, the mean of theirs.
            big_sq_norm: squared norm of the window's finished gradient, before clipping.
            small_weight: items in the small batch; over ranks, the harmonic mean.
            big_weight: items in the window, over all ranks.

        Raises:
            ValueError: a norm is negative, or a weight not above 0.
        """
        numbers = (small_sq_norm, big_sq_norm, small_weight, big_weight)
        if not all(map(math.isfinite, numbers)):
            return False
        if min(small_sq_norm, big_sq_norm) < 0 or min(small_weight, big_weight) <= 0:
            raise ValueError(f"norms must be >= 0 and weights > 0, got {numbers}")
        if big_weight <= small_weight:
            return False
        gradient_sq = (big_weight * big_sq_norm - small_weight * small_sq_norm) / (
            big_weight - small_weight
        )
        trace = (small_sq_norm - big_sq_norm) / (1 / small_weight - 1 / big_weight)
        self._add(trace, gradient_sq)
        self._state.big_weight = big_weight
        return True

    def _add(self, trace: float, gradient_sq: float) -> None:
        """Update the means (West 1979); with this alpha they are bias-corrected averages."""
        s = self._state
        s.windows += 1
        alpha = (1 - self.decay) / (1 - self.decay**s.windows)
        d_trace, d_gradient = trace - s.trace, gradient_sq - s.gradient_sq
        s.trace += alpha * d_trace
        s.gradient_sq += alpha * d_gradient
        keep = 1 - alpha
        s.var_trace = keep * (s.var_trace + alpha * d_trace**2)
        s.var_gradient_sq = keep * (s.var_gradient_sq + alpha * d_gradient**2)
        s.covariance = keep * (s.covariance + alpha * d_trace * d_gradient)
        s.sum_of_squared_weights = keep**2 * s.sum_of_squared_weights + alpha**2

    @property
    def big_weight(self) -> float:
        """Items in the last window that was used."""
        return self._state.big_weight

    @property
    def estimate(self) -> NoiseEstimate:
        """The present estimate: a `NoiseEstimate` with value, interval and sentence."""
        s = self._state
        low, high = _fieller(s)
        value = max(0.0, s.trace) / s.gradient_sq if s.gradient_sq > 0 else None
        return NoiseEstimate(value, low, high, s.gradient_sq, s.trace, s.windows)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as JSON scalars."""
        return {"decay": self.decay, **asdict(self._state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()`."""
        state = dict(state)
        self.decay = float(state.pop("decay"))
        self._state = _Running(**state)


def _fieller(s: _Running) -> tuple[float, float]:
    """Return the 95 % interval of trace / |G|^2 (Fieller 1954), cut off at 0."""
    share = s.sum_of_squared_weights
    if s.windows < 2 or share >= 1:
        return 0.0, math.inf
    t = _student_t(1 / share - 1)
    scale = t * t * share / (1 - share)  # unbiased variance, then that of the mean
    a = s.gradient_sq**2 - scale * s.var_gradient_sq
    b = s.trace * s.gradient_sq - scale * s.covariance
    c = s.trace**2 - scale * s.var_trace
    root = math.sqrt(max(0.0, b * b - a * c))
    if s.gradient_sq > 0 and a > 0:
        return max(0.0, (b - root) / a), max(0.0, (b + root) / a)
    if s.trace <= 0 or c <= 0 or a == 0:
        return 0.0, math.inf
    return max(0.0, (b - root) / a), math.inf


def _student_t(freedom: float) -> float:
    """Return Student's t for 95 %, by the first terms of its series (within 4 % from 3 on)."""
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
