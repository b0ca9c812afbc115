"""What a closed window tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """A closed window whose values may still be in flight on a device."""

    index: int
    micro_batches: int
    weight: float | Tensor
    loss_sum: float | Tensor
    grad_norm: float | Tensor | None
    stepped: bool
    scale: float | Tensor
    seconds: float

    def read(self) -> WindowResult:
        """Wait for the values and return them."""
        norm = 0.0 if self.grad_norm is None else self.grad_norm
        values = [self.weight, self.loss_sum, norm, self.scale]
        weight, loss, known_norm, scale = read_together(values)
        loss = loss / weight if weight else float("nan")
        grad_norm = None if self.grad_norm is None else known_norm
        own = (self.stepped, scale, self.seconds)
        return WindowResult(self.index, self.micro_batches, weight, loss, grad_norm, *own)


class LossSum:
    """The weighted sum of a window's losses on this rank, in fp64 where the device has it."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def add(self, loss: Tensor, weight: Weight, reduction: str) -> None:
        """Add one micro-batch, without waiting for the device."""
        value = loss.detach() if loss.ndim == 0 else loss.detach().reshape(())
        if self.value is None:
            self.value = zero(value.device)
        elif self.value.device != value.device:  # resumed, or a loss of another part of the model
            self.value = self.value.to(value.device, non_blocking=True)
        if reduction == "sum":
            self.value += value
        elif isinstance(weight, float):
            self.value.add_(value, alpha=weight)
        else:
            self.value += value * weight.to(value.device, non_blocking=True)


def zero(device: torch.device) -> Tensor:
    """A 0-dim zero to accumulate in."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros((), dtype=wide, device=device)


def read_together(values: Sequence[float | Tensor]) -> list[float]:
    """Read 0-dim tensors in one wait for their device; numbers are as they were."""
    unread = [value for value in values if isinstance(value, Tensor)]
    if len(unread) > 1:
        device = next((v.device for v in unread if not v.is_cpu), unread[0].device)
        wide = torch.float32 if device.type == "mps" else torch.float64
        known = torch.stack([v.to(device, wide, non_blocking=True) for v in unread]).tolist()
    else:
        known = [float(value.item()) for value in unread]
    read = iter(known)
    return [next(read) if isinstance(value, Tensor) else float(value) for value in values]
