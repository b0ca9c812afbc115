"""From the batch that is wanted to the numbers of a run: steps, learning rate, micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ScaledLearningRate", "largest_micro_batch", "plan", "scale_learning_rate"]


def plan(effective_batch: int, micro_batch: int, world_size: int = 1) -> int:
    """Give the steps, micro-batches per window and rank, that make up `effective_batch` items.

    ```python
    plan(512, 8, world_size=4)  # 16: 8 items x 16 micro-batches x 4 ranks
    ```

    Args:
        effective_batch: items per update over all ranks.
        micro_batch: items per forward pass on one rank.
        world_size: data-parallel ranks.

    Raises:
        ValueError: a number is below 1, or `micro_batch * world_size` does not divide
            `effective_batch`. The message lists the nearest sizes that do.
    """
    for name, value in (
        ("effective_batch", effective_batch),
        ("micro_batch", micro_batch),
        ("world_size", world_size),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    per_pass = micro_batch * world_size
    if effective_batch % per_pass:
        raise ValueError(_does_not_divide(effective_batch, micro_batch, world_size))
    return effective_batch // per_pass


def _does_not_divide(effective_batch: int, micro_batch: int, world_size: int) -> str:
    """Say what was asked, and which effective batches and micro-batches would do."""
    per_pass = micro_batch * world_size
    ranks = "" if world_size == 1 else f" x {world_size} ranks = {per_pass}"
    below = effective_batch // per_pass
    batches = [f"{n * per_pass} (steps {n})" for n in (below, below + 1) if n]
    per_rank, rest = divmod(effective_batch, world_size)
    if rest:
        micros = f"no micro-batch fits, as {world_size} ranks do not divide {effective_batch}"
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
    """Give every whole number that divides `number`, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


@dataclass(frozen=True)
class ScaledLearningRate:
    """Where a learning rate tuned at one effective batch may start at another.

    Both are starting points to tune from, not laws.

    Attributes:
        factor: new effective batch / tuned effective batch.
        linear: `lr * factor`, for SGD with momentum and a warm-up (Goyal et al. 2017,
            arXiv 1706.02677; Krizhevsky 2014, arXiv 1404.5997, used it in practice).
        square_root: `lr * sqrt(factor)`, for Adam and RMSprop (Malladi et al. 2022,
            arXiv 2205.10287), who move the betas and eps too; for SGD it keeps the variance
            of an update (Krizhevsky 2014).
    """

    factor: float
    linear: float
    square_root: float

    def adam_beta(self, beta: float) -> float:
        """Move one of Adam's betas: `1 - factor * (1 - beta)` (Malladi et al. 2022).

        It holds what the average remembers, counted in items. Below 0 there is nothing left
        to average: the rule does not reach so far, and the answer is 0.
        """
        return max(0.0, 1.0 - self.factor * (1.0 - beta))


def scale_learning_rate(lr: float, *, tuned_batch: int, effective_batch: int) -> ScaledLearningRate:
    """Scale `lr`, which was tuned at `tuned_batch` items per update, to `effective_batch`.

    Raises:
        ValueError: one of the numbers is not above 0.
    """
    if not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be a number above 0, got {lr!r}")
    if tuned_batch < 1 or effective_batch < 1:
        raise ValueError(f"batches must be at least 1, got {tuned_batch} and {effective_batch}")
    factor = effective_batch / tuned_batch
    return ScaledLearningRate(factor, lr * factor, lr * math.sqrt(factor))


def largest_micro_batch(
    fits: Callable[[int], bool],
    effective_batch: int,
    world_size: int = 1,
    *,
    agree: Callable[[int], int] = int,
) -> int:
    """Find the largest micro-batch that fits and keeps `effective_batch` whole.

    Only sizes that divide the rank's share are tried, from 1 upwards, each about twice the
    one before, until one does not fit; then the sizes between.

    Args:
        fits: runs one micro-batch of that many items and says whether memory sufficed.
        agree: gives the smallest of all ranks' answers; called once, by every rank.

    Raises:
        ValueError: `world_size` does not divide `effective_batch`, or not even 1 item fits.
    """
    per_rank, rest = divmod(effective_batch, world_size)
    if rest or per_rank < 1:
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
