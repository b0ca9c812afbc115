"""The gradients of one batch, whole and in micro-batches, on a model that is then restored."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from accumplug.accumulator import Accumulator
from accumplug.analysis.sync_counter import Loss, call_loss
from accumplug.dataloading import rng
from accumplug.dataloading.batch_tree import Batch, cut

__all__ = ["Case", "Comparison", "Difference", "Gradients", "Loop", "Split", "compare"]

Gradients: TypeAlias = dict[str, Tensor | None]
Loop: TypeAlias = Callable[[nn.Module, Sequence[Batch]], object]
Split: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """The difference between two gradients.

    Attributes:
        max_abs: the largest absolute difference of one element.
        relative: norm of the difference / norm of the reference.
    """

    max_abs: float
    relative: float


@dataclass(frozen=True)
class Comparison:
    """The difference between two gradients, overall and for each parameter."""

    overall: Difference
    parameters: Mapping[str, Difference]


def compare(reference: Gradients, other: Gradients) -> Comparison:
    """Compare in double precision; a missing gradient counts as zeros, NaN as infinitely far."""
    found, square, reference_square = {}, 0.0, 0.0
    for name, one in reference.items():
        a, b = dense(one), dense(other.get(name))
        gap = a - b
        largest = float(gap.abs().max()) if gap.numel() else 0.0
        squares = float(gap.square().sum()), float(a.square().sum())
        square, reference_square = square + squares[0], reference_square + squares[1]
        found[name] = Difference(_finite(largest), _ratio(*squares))
    overall = max((d.max_abs for d in found.values()), default=0.0)
    return Comparison(Difference(overall, _ratio(square, reference_square)), found)


def relative_difference(reference: Gradients, other: Gradients) -> float:
    """Return norm of the difference / norm of the reference."""
    return compare(reference, other).overall.relative


def dense(gradient: Tensor | None) -> Tensor:
    """Return a gradient in double precision; a missing one as a zero."""
    if gradient is None:
        return torch.zeros((), dtype=torch.float64)
    # MPS has no float64; the comparison runs on the CPU there.
    gradient = gradient.cpu() if gradient.device.type == "mps" else gradient
    return (gradient.to_dense() if gradient.is_sparse else gradient).double()


def dot(one: Gradients, other: Gradients) -> float:
    """Return the inner product of two gradients."""
    return sum(float((dense(one[name]) * dense(other[name])).sum()) for name in one)


def fit(gradient: Gradients, parts: Sequence[Gradients]) -> tuple[float, list[float]]:
    """Fit a gradient by a weighted sum of others: the relative residual, and the weights."""
    gram = torch.tensor([[dot(a, b) for b in parts] for a in parts], dtype=torch.float64)
    right = torch.tensor([dot(part, gradient) for part in parts], dtype=torch.float64)
    weights = (torch.linalg.pinv(gram, hermitian=True) @ right).tolist()
    fitted: Gradients = {}
    for name in gradient:
        pairs = zip(weights, parts, strict=True)
        fitted[name] = sum((weight * dense(part[name]) for weight, part in pairs), dense(None))
    return relative_difference(gradient, fitted), weights


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _ratio(square: float, reference_square: float) -> float:
    if square == 0.0:
        return 0.0
    return _finite(math.sqrt(square / reference_square)) if reference_square else math.inf


@dataclass
class Case:
    """A model, a batch and its losses by name, ready to be run whole and in micro-batches.

    It is a context manager: on exit the model gets its gradients, buffers and modes back, and
    the random generators their states.
    """

    model: nn.Module
    batch: Batch
    losses: Mapping[str, Loss]
    items: Callable[[Batch], float]
    reduction: Literal["mean", "sum"]
    loop: Loop | None

    def __enter__(self) -> Case:
        self._modes = [(module, module.training) for module in self.model.modules()]
        self._gradients = [(p, p.grad) for p in self.model.parameters()]
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._random = rng.capture()
        self.model.zero_grad()
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()
        for module, mode in self._modes:
            module.training = mode
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def reset(self, random_state: bool = True, buffers: bool = True) -> None:
        """Restore the buffers and the random state of the start."""
        with torch.no_grad():
            for module, name, buffer, value in self._buffers if buffers else ():
                buffer.copy_(value)
                module._buffers[name] = buffer
        if random_state:
            rng.restore(self._random)

    def changed_buffers(self) -> list[str]:
        """Name the buffers that have changed since the start."""
        names = {module: name for name, module in self.model.named_modules()}
        return [
            f"{names[module]}.{name}".removeprefix(".")
            for module, name, _, value in self._buffers
            if not torch.equal(module._buffers[name], value)  # type: ignore[arg-type]
        ]

    def whole(
        self,
        batch: Batch = None,
        *,
        loss: str | None = None,
        same_random_state: bool = True,
        same_buffers: bool = True,
    ) -> Gradients:
        """Return the gradient of one plain backward over the batch.

        Args:
            batch: another batch than the case's.
            loss: only this one of the losses.
            same_random_state: draw the same random numbers as every other run.
            same_buffers: start from the original buffers, not from those of the last run.
        """
        self.reset(random_state=same_random_state, buffers=same_buffers)
        batch = self.batch if batch is None else batch
        value = self.loss(batch, loss)
        value = value / self.items(batch) if self.reduction == "sum" else value
        torch.autograd.backward(value)
        return self._collect()

    def accumulated(self, split: Split) -> Gradients:
        """Return the gradient of the batch accumulated over micro-batches of these sizes."""
        self.reset()
        pieces = cut(self.batch, split)
        if self.loop is not None:
            self._run_loop(self.loop, pieces)
            return self._collect()
        accum = Accumulator(len(pieces))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "BatchNorm sees micro-batches")  # given as a reason
            for piece in pieces:
                with accum(self.model, weight=self.items(piece)):
                    accum.backward(self.loss(piece), reduction=self.reduction)
        return self._collect()

    def _run_loop(self, loop: Loop, pieces: Sequence[Batch]) -> None:
        """Run the user's own loop, which must not change the weights."""
        before = [(n, p, p.detach().clone()) for n, p in self.model.named_parameters()]
        loop(self.model, pieces)
        changed = [name for name, p, value in before if not torch.equal(p, value)]
        with torch.no_grad():
            for _, parameter, value in before if changed else ():
                parameter.copy_(value)
        if changed:
            raise ValueError(
                f"the loop has changed {changed[0]}; leave the optimizer's step out, and the "
                "gradient in .grad"
            )

    def loss(self, batch: Batch, only: str | None = None) -> Tensor:
        """Compute the sum of the losses on the batch, or only one of them."""
        return call_loss(self.losses if only is None else self.losses[only], self.model, batch)

    def _collect(self) -> Gradients:
        """Move the gradients out of the model."""
        parameters = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        gradients = {name: p.grad for name, p in parameters}
        for _, parameter in parameters:
            parameter.grad = None
        return gradients
