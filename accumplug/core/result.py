"""What a closed window tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumplug.core.window import Weight


@dataclass(frozen=True)
class WindowResult:
    """The last closed window, as `accum.last` gives it.

    Attributes:
        index: how many windows were closed before this one.
        micro_batches: micro-batches in it on this rank.
        weight: sum of the weights of all its micro-batches on all ranks.
        loss: weighted mean of their losses over all ranks; nan if the weight is 0.
        grad_norm: 2-norm of the finished gradient before clipping, without the scaler's scale;
            None where the loop steps without a clip.
        stepped: whether it became an update.
        scale: the GradScaler's scale during the window; 1.0 without a scaler.
        seconds: wall time from its first micro-batch to its close.
    """

    index: int
    micro_batches: int
    weight: float
    loss: float
    grad_norm: float | None
    stepped: bool
    scale: float
    seconds: float


@dataclass
class ClosedWindow:
    """The same with values that may still be on their way on a device."""

    index: int
    micro_batches: int
    weight: Any
    loss_sum: Any
    grad_norm: Any
    stepped: bool
    scale: Any
    seconds: float

    def read(self) -> WindowResult:
        """Wait for the values."""
        weight, loss = float(self.weight), float(self.loss_sum)
        return WindowResult(
            index=self.index,
            micro_batches=self.micro_batches,
            weight=weight,
            loss=loss / weight if weight else float("nan"),
            grad_norm=None if self.grad_norm is None else float(self.grad_norm),
            stepped=self.stepped,
            scale=float(self.scale),
            seconds=self.seconds,
        )


class LossSum:
    """The weighted sum of a window's losses on this rank, in fp64 where the device has it."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def add(self, loss: Tensor, weight: Weight, reduction: str) -> None:
        """Add one micro-batch, without waiting for the device."""
        value = loss.detach() if loss.ndim == 0 else loss.detach().reshape(())
        if self.value is None:
            self.value = zero(value.device)
        if reduction == "sum":
            self.value += value
        elif isinstance(weight, float):
            self.value.add_(value, alpha=weight)
        else:
            self.value += value * weight


def zero(device: torch.device) -> Tensor:
    """A 0-dim zero to sum up in."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros((), dtype=wide, device=device)
