"""The weights of a window over all ranks: what stands for one, and what they sum up to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accumplug.core.gradients import GradientBuffer
from accumplug.core.window import Weight, Window
from accumplug.parallel.group import DataParallelGroup


@dataclass
class WindowPlan:
    """A window that was looked at before it ran (`weigh=`)."""

    weights: list[Weight]
    """Of this rank's micro-batches."""
    total: Weight
    """Sum over all ranks."""
    micro_batches: float
    """Of all ranks together."""
    items: int = 0
    """Of this rank's, how many are items of its loader."""
    left: int = 0
    """Of these, how many have not been handed out."""
    done: int = 0
    """Of this rank's, how many have run."""
    discarded: bool = False
    """The window was thrown away, and so are the items that are left of it."""

    def reference(self, ranks: int) -> Weight:
        """The reference that needs no rescaling later: the mean weight."""
        mean = self.total / (ranks * max(len(self.weights), 1))
        if not self.weights or not isinstance(mean, float):
            return mean
        if not all(isinstance(w, float) for w in self.weights):
            return mean
        first = self.weights[0]
        equal = self.weights.count(first) == len(self.weights)
        near = isinstance(first, float) and abs(mean - first) <= 4e-16 * mean
        return first if equal and near else mean


@dataclass(eq=False)
class Normalizer:
    """Rescales the running sum to the total weight of all ranks."""

    group: DataParallelGroup
    gradients: GradientBuffer
    every: bool
    """Each micro-batch is reduced over the ranks."""
    total: Weight = 0.0
    """Of the last window that was closed, over all ranks."""
    mean: Weight | None = None
    """Of one micro-batch in that window."""
    micro_batches: float = 0.0
    """Of all ranks in that window."""

    def refer(self, window: Window, weight: Weight, plan: WindowPlan | None) -> None:
        """Update the window's reference before a micro-batch of `weight` is added."""
        if plan is not None:
            window.reference = plan.reference(self.group.size)
        elif self.every and self.group.size > 1:
            if window.reference is None:
                # Partial sums are averaged over the ranks, so all of them need the same one.
                if self.mean is None:
                    device = self.gradients.device
                    total, _, (count,) = self.group.agree(weight, [], [1.0], device)
                    self.mean = _ratio(total, count)
                window.reference = self.mean
        elif isinstance(weight, float):
            if not isinstance(window.reference, float) or weight != window.reference:
                self.gradients.scale(window.refer(weight))
        else:
            self._refer_unread(window, weight)

    def rescale(self, window: Window, total: Weight, micro_batches: float) -> bool:
        """The `total` weight of all ranks is known: rescale the sum; say whether it is nothing."""
        self.total, self.mean = total, _ratio(total, micro_batches)
        self.micro_batches = micro_batches
        if isinstance(total, float):
            if total > 0:
                self.gradients.scale(window.settle(total, self.group.size))
            return total == 0
        factor = torch.as_tensor(window.settle(total, self.group.size)).to(total)
        # 7 times 0.1 is not 0.7 in a plain sum: no factor where the weights are equal
        near = torch.exp2(torch.log2(factor).round())  # the reference may be off by such a power
        exact = (factor / near - 1.0).abs() <= min(1e-15 * window.steps, 5e-14)
        factor = torch.where(exact, near, factor)
        window.factor = torch.where(total > 0, factor, 0.0)
        self.gradients.scale(window.factor)
        return False

    def _refer_unread(self, window: Window, weight: Tensor) -> None:
        """For a weight that the host does not know.

        The last window's mean weight tells the magnitude; in the first window the reference
        grows with each weight, which costs a pass over the running sum.
        """
        if window.reference is None:
            mean = 1.0 if self.mean is None else self.mean
            grown = weight if self.mean is None else weight * _power(self.mean / weight)
            window.reference = torch.where(weight > 0, grown, mean)
        elif self.mean is None:
            power = _power(weight / window.reference / 2)
            window.reference = window.reference * power
            self.gradients.scale(1.0 / power)


def _ratio(total: Weight, count: float) -> Weight:
    """Mean weight; 1 if there is none."""
    if isinstance(total, float):
        return total / count if total > 0 else 1.0
    return torch.where(total > 0, total / count, 1.0)


def _power(ratio: Tensor) -> Tensor:
    """The power of two, at least 1, next to `ratio`."""
    return torch.exp2(torch.log2(ratio).round().clamp(min=0.0))
