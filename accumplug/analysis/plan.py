"""From a wanted effective batch to the numbers of a run: steps, learning rate, micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ScaledLearningRate", "largest_micro_batch", "plan", "scale_learning_rate"]


LARGEST = 10**12  # items; its divisors are found in a fraction of a second


def plan(effective_batch: int, micro_batch: int, world_size: int = 1) -> int:
    """Return the steps (micro-batches per window and rank) that make up `effective_batch` items.

    >>> plan(512, 8, world_size=4)  # 8 items x 16 micro-batches x 4 ranks
    16

    Args:
        effective_batch: items per update over all ranks.
        micro_batch: items per forward pass on one rank.
        world_size: data-parallel ranks.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is below 1, or `micro_batch * world_size` does not divide
            `effective_batch`. The message lists the nearest sizes that do.
    """
    _check_size("effective_batch", effective_batch)
    _check_size("micro_batch", micro_batch)
    _check_size("world_size", world_size)
    per_pass = micro_batch * world_size
    if effective_batch % per_pass:
        raise ValueError(_does_not_divide(effective_batch, micro_batch, world_size))
    return effective_batch // per_pass


def _check_size(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not 1 <= value <= LARGEST:
        raise ValueError(f"{name} must be at least 1 and at most {LARGEST:.0e}, got {value}")


def _does_not_divide(effective_batch: int, micro_batch: int, world_size: int) -> str:
    """Name the sizes that were asked for, and the nearest ones that are possible."""
    per_pass = micro_batch * world_size
    ranks = "" if world_size == 1 else f" x {world_size} ranks = {per_pass}"
    below = effective_batch // per_pass
    batches = [f"{n * per_pass} (steps {n})" for n in (below, below + 1) if n]
    per_rank, rest = divmod(effective_batch, world_size)
    if rest:
        micros = f"no micro-batch is possible: {world_size} ranks do not divide {effective_batch}"
    else:
        sizes = _divisors(per_rank)
        near = [max(s for s in sizes if s < micro_batch)]
        near += [s for s in sizes if s > micro_batch][:1]
        micros = "nearest micro-batches: " + " or ".join(
            f"{s} (steps {per_rank // s})" for s in near
        )
    return (
        f"an effective batch of {effective_batch} is not a multiple of micro-batch "
        f"{micro_batch}{ranks}; nearest effective batches: {' or '.join(batches)}; {micros}"
    )


def _divisors(number: int) -> list[int]:
    """Return every divisor of `number`, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


@dataclass(frozen=True)
class ScaledLearningRate:
    """A learning rate tuned at one effective batch, scaled to another.

    Both values are starting points for tuning, not laws.

    Attributes:
        factor: new effective batch / tuned effective batch.
        linear: `lr * factor`, for SGD with momentum and a warm-up (Goyal et al. 2017,
            arXiv 1706.02677; Krizhevsky 2014, arXiv 1404.5997, used it in practice).
        square_root: `lr * sqrt(factor)`, for Adam and RMSprop (Malladi et al. 2022,
            arXiv 2205.10287), who scale the betas and eps too; for SGD it keeps the variance
            of an update (Krizhevsky 2014).
    """

    factor: float
    linear: float
    square_root: float

    def adam_beta(self, beta: float) -> float:
        """Scale one of Adam's betas: `1 - factor * (1 - beta)` (Malladi et al. 2022).

        This keeps the memory of the moving average, counted in items. Where the result would be
        below 0 the rule does not apply, and the answer is 0.
        """
        return max(0.0, 1.0 - self.factor * (1.0 - beta))


def scale_learning_rate(lr: float, *, tuned_batch: int, effective_batch: int) -> ScaledLearningRate:
    """Scale `lr`, which was tuned at `tuned_batch` items per update, to `effective_batch`.

    Raises:
        ValueError: one of the numbers is not above 0.
    """
    if not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be a number above 0, got {lr!r}")
    _check_size("tuned_batch", tuned_batch)
    _check_size("effective_batch", effective_batch)
    factor = effective_batch / tuned_batch
    return ScaledLearningRate(factor, lr * factor, lr * math.sqrt(factor))


def largest_micro_batch(
    fits: Callable[[int], bool],
    effective_batch: int,
    world_size: int = 1,
    *,
    agree: Callable[[int], int] = int,
) -> int:
    """Find the largest micro-batch that fits and divides the rank's share of `effective_batch`.

    Only such sizes are tried, from 1 upwards, each about twice the one before, until one does not
    fit; then the sizes between.

    Args:
        fits: runs one micro-batch of that many items and returns whether it fits in memory.
        effective_batch: items per update over all ranks.
        world_size: data-parallel ranks.
        agree: returns the smallest of all ranks' answers; every rank calls it once.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is below 1, `world_size` does not divide `effective_batch`, or not
            even 1 item fits.
    """
    _check_size("effective_batch", effective_batch)
    _check_size("world_size", world_size)
    per_rank, rest = divmod(effective_batch, world_size)
    if rest:
        raise ValueError(
            f"{world_size} ranks do not divide an effective batch of {effective_batch}"
        )
    sizes = _divisors(per_rank)
    good, bad = -1, len(sizes)
    while bad - good > 1:
        wanted = 2 * sizes[good] if good >= 0 else 1
        if bad == len(sizes):
            trial = next((i for i in range(good + 1, bad) if sizes[i] >= wanted), bad - 1)
        else:
            trial = (good + bad) // 2
        if fits(sizes[trial]):
            good = trial
        else:
            bad = trial
    smallest = agree(sizes[good] if good >= 0 else 0)
    if smallest < 1:
        raise ValueError("not even a micro-batch of 1 item fits in memory")
    return smallest
