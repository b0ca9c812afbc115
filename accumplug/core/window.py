"""The arithmetic of one window: counting, weights, and the factor of each loss. No torch.

A weight is a Python number, or a 0-dim tensor that nobody reads on the host: all that is
asked of it here is ``+ * /``.

The gradient wanted is that of ``sum(w * l) / sum(w)`` over the micro-batches of all ranks.
As the sum of the weights is known only at the end, a micro-batch is back-propagated with
the factor ``w / (steps * reference)``, and what has been summed up is multiplied by
``ranks * steps * reference / sum(w)`` when the window closes, before the ranks are averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from accumplug.errors import OptionTypeError

if TYPE_CHECKING:
    from torch import Tensor

Weight: TypeAlias = Union[float, "Tensor"]  # not a string: `Weight | None` is evaluated
"""A float, which the host knows, or a 0-dim tensor, which nobody reads on the host."""


@dataclass
class Window:
    """The state of the open window, apart from the running sum in ``.grad``."""

    steps: int
    """Micro-batches planned on this rank; 1 if their number is open."""
    index: int = 0
    """Micro-batches that count so far on this rank."""
    weight: Weight = 0.0
    """Sum of their weights on this rank."""
    compensation: float = 0.0
    """What floating point has lost of that sum (Neumaier 1974)."""
    reference: Weight | None = None
    """The weight that stands for one: the first of the window that is not zero."""
    factor: Weight = 1.0
    """What the running sum was multiplied by in the closing micro-batch."""
    torn: str | None = None
    """Why the running sum can't be trusted, or None."""
    is_open: bool = False
    """The number of micro-batches is open (steps=None): the window ends when the loop says so."""

    @property
    def total(self) -> Weight:
        """Sum of the weights on this rank, correctly rounded for Python numbers."""
        return self.weight + self.compensation if isinstance(self.weight, float) else self.weight

    def add_weight(self, weight: Weight) -> None:
        """Add `weight` to the sum, so that N equal floats sum to N times that float."""
        if not (isinstance(weight, float) and isinstance(self.weight, float)):
            self.weight = self.total + weight
            self.compensation = 0.0
            return
        new = self.weight + weight
        if self.weight >= weight:
            self.compensation += (self.weight - new) + weight
        else:
            self.compensation += (weight - new) + self.weight
        self.weight = new

    def refer(self, weight: Weight) -> float:
        """Make `weight` the reference if there is none; return a factor for the running sum.

        A later weight of more than twice the reference would make the back-propagated loss
        much larger than the mean loss. The reference then grows by a power of two, and the
        running sum has to shrink by it, which changes no bit of its mantissa. The factor is
        1.0 where nothing is to be done.
        """
        if self.reference is None:
            self.reference = weight if not isinstance(weight, float) or weight > 0 else None
            return 1.0
        if not (isinstance(weight, float) and isinstance(self.reference, float)):
            return 1.0
        if weight <= 2 * self.reference:
            return 1.0
        power = 2.0 ** math.ceil(math.log2(weight / self.reference) - 1)
        self.reference *= power
        return 1.0 / power

    def settle(self, total: Weight, ranks: int) -> Weight:
        """The total weight of all `ranks` is known: return the factor for the running sum.

        From here on `divisor` is final, too. For a full window of equal weights the factor
        is exactly 1.0. `total` must not be the number 0.
        """
        if self.reference is None:
            return 1.0
        factor = ranks * (self.steps * self.reference) / total
        if isinstance(factor, float) and abs(factor - 1.0) <= 4e-16:
            factor = 1.0  # equal weights such as 0.1 on 5 ranks: the sum's last bit
        self.factor = factor
        return factor

    def divisor(self, weight: Weight, reduction: str = "mean") -> Weight:
        """What the loss of a micro-batch of `weight` is divided by; `steps` if all are equal.

        A sum is divided by no weight of its own. Never call it with the number 0: such a
        micro-batch adds nothing.
        """
        assert self.reference is not None
        divisor = self.steps * (self.reference / (weight if reduction == "mean" else 1.0))
        unscaled = isinstance(self.factor, float) and self.factor == 1.0
        return divisor if unscaled else divisor / self.factor


def check_steps(steps: object) -> int:
    """Return `steps`, or raise ValueError (OptionTypeError for what is no int)."""
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        wrong = ValueError if isinstance(steps, Integral) else OptionTypeError
        raise wrong(
            f"steps is the number of micro-batches in a window, an int of at least 1; got {steps!r}"
        )
    return int(steps)


def check_weight(weight: Any) -> Weight:  # whatever was given; no torch here to ask
    """Return `weight`, a number as float, or raise ValueError or OptionTypeError."""
    if type(weight) is int and weight >= 0:
        return float(weight)
    if isinstance(weight, Real):
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(
                f"weight is the number of items that the loss is a mean over, finite and at "
                f"least 0; got {weight!r}"
            )
        return float(weight)
    if getattr(weight, "ndim", None) != 0 or not hasattr(weight, "detach"):
        shape = f" of shape {tuple(weight.shape)}" if hasattr(weight, "shape") else ""
        raise OptionTypeError(
            f"weight is a number or a 0-dim tensor; got {type(weight).__name__}{shape}. "
            f"Count the items first: weight=mask.sum()"
        )
    tensor: Tensor = weight.detach()
    return tensor.float() if tensor.device.type == "mps" else tensor.double()
