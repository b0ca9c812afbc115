"""One batch whole and in micro-batches: two gradients of one model, which comes back as it was."""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accumplug.analysis.batch_tree import cut
from accumplug.analysis.sync_counter import Loss, call_loss

__all__ = ["Case", "Comparison", "Difference", "Gradients", "compare"]

Gradients = dict[str, Tensor | None]
Loop = Callable[[nn.Module, Sequence[Any]], Any]


@dataclass(frozen=True)
class Difference:
    """How far one gradient is from another.

    Attributes:
        max_abs: the largest difference of one number.
        relative: norm of the difference / norm of the reference.
    """

    max_abs: float
    relative: float


@dataclass(frozen=True)
class Comparison:
    """The difference of two gradients, overall and for each parameter."""

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
        found[name] = Difference(finite(largest), _ratio(*squares))
    overall = max((d.max_abs for d in found.values()), default=0.0)
    return Comparison(Difference(overall, _ratio(square, reference_square)), found)


def dense(gradient: Tensor | None) -> Tensor:
    """Give a gradient in double precision; one that is missing is a zero."""
    if gradient is None:
        return torch.zeros((), dtype=torch.float64)
    # MPS has no float64; the comparison is made on the CPU there.
    gradient = gradient.cpu() if gradient.device.type == "mps" else gradient
    return (gradient.to_dense() if gradient.is_sparse else gradient).double()


def dot(one: Gradients, other: Gradients) -> float:
    """Give the inner product of two gradients."""
    return sum(float((dense(one[name]) * dense(other[name])).sum()) for name in one)


def fit(gradient: Gradients, parts: Sequence[Gradients]) -> tuple[float, list[float]]:
    """Write a gradient as a weighted sum of others: what is left over (relative), the weights."""
    gram = torch.tensor([[dot(a, b) for b in parts] for a in parts], dtype=torch.float64)
    right = torch.tensor([dot(part, gradient) for part in parts], dtype=torch.float64)
    weights = (torch.linalg.pinv(gram, hermitian=True) @ right).tolist()
    mix: Gradients = {}
    for name in gradient:
        pairs = zip(weights, parts, strict=True)
        mix[name] = sum((weight * dense(part[name]) for weight, part in pairs), dense(None))
    return compare(gradient, mix).overall.relative, weights


def finite(value: float) -> float:
    """Give the value, or infinity in place of NaN."""
    return value if math.isfinite(value) else math.inf


def _ratio(square: float, reference_square: float) -> float:
    if square == 0.0:
        return 0.0
    return finite(math.sqrt(square / reference_square)) if reference_square else math.inf


@dataclass
class Case:
    """What is checked: a model, a batch, the losses by name, and how micro-batches are added up.

    Use it as a context: at its end the model has its gradients, buffers and modes back, and the
    random generators their states.
    """

    model: nn.Module
    batch: Any
    losses: Mapping[str, Loss]
    items: Callable[[Any], float]
    reduction: str
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
        self._random = _random_state()
        self.model.zero_grad()
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()
        for module, mode in self._modes:
            module.training = mode
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def reset(self, random_state: bool = True, buffers: bool = True) -> None:
        """Put the buffers, and the random state, back to what they were at the start."""
        with torch.no_grad():
            for module, name, buffer, value in self._buffers if buffers else ():
                buffer.copy_(value)
                module._buffers[name] = buffer
        if random_state:
            _set_random_state(self._random)

    def moved_buffers(self) -> list[str]:
        """Name the buffers that are not what they were at the start."""
        names = {module: name for name, module in self.model.named_modules()}
        return [
            f"{names[module]}.{name}".removeprefix(".")
            for module, name, _, value in self._buffers
            if not torch.equal(module._buffers[name], value)  # type: ignore[arg-type]
        ]

    def whole(
        self,
        batch: Any = None,
        *,
        loss: str | None = None,
        same_numbers: bool = True,
        same_buffers: bool = True,
    ) -> Gradients:
        """Give the gradient of one plain backward over the batch.

        Args:
            batch: another batch than the case's.
            loss: only this one of the losses.
            same_numbers: draw the same random numbers as every other run.
            same_buffers: start from the same buffers, not from those that the last run left.
        """
        self.reset(random_state=same_numbers, buffers=same_buffers)
        batch = self.batch if batch is None else batch
        value = self.loss(batch, loss)
        value = value / self.items(batch) if self.reduction == "sum" else value
        torch.autograd.backward(value)
        return self._collect()

    def split(self, sizes: Sequence[int]) -> Gradients:
        """Give the gradient of the batch in micro-batches of these sizes, accumulated."""
        from accumplug.accumulator import Accumulator

        self.reset()
        pieces = cut(self.batch, sizes)
        if self.loop is not None:
            self._run_loop(self.loop, pieces)
            return self._collect()
        accum = Accumulator(len(pieces))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "BatchNorm sees micro-batches")  # said as a reason
            for piece in pieces:
                with accum(self.model, weight=self.items(piece)):
                    accum.backward(self.loss(piece), reduction=self.reduction)
        return self._collect()

    def _run_loop(self, loop: Loop, pieces: Sequence[Any]) -> None:
        """Run the user's own loop, which must leave the weights alone."""
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

    def loss(self, batch: Any, only: str | None = None) -> Tensor:
        """Give the sum of the losses on the batch, or only one of them."""
        return call_loss(self.losses if only is None else self.losses[only], self.model, batch)

    def _collect(self) -> Gradients:
        """Take the gradients out of the model."""
        parameters = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        gradients = {name: p.grad for name, p in parameters}
        for _, parameter in parameters:
            parameter.grad = None
        return gradients


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
