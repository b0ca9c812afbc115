"""The references of these tests: plain torch, written out, with nothing of accumplug in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def network(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """A small network, the same for the same seed."""
    generator = torch.get_rng_state()
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    torch.set_rng_state(generator)
    return made


def weights_of_ones(items: int = 1) -> nn.Linear:
    """A linear map without bias whose gradient is the mean of its inputs, times one."""
    layer = nn.Linear(items, 1, bias=False).double()
    nn.init.ones_(layer.weight)
    return layer


def data(sizes: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 1) -> list[Any]:
    """Micro-batches of so many rows; targets far from what the network says."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 4, generator=generator, dtype=torch.float64).to(dtype),
            (torch.randn(n, 2, generator=generator, dtype=torch.float64) + 3).to(dtype),
        )
        for n in sizes
    ]


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the rows of a micro-batch."""
    return F.mse_loss(model(batch[0]), batch[1])


def big_batch(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The gradient of the mean over all rows of `batches` in one batch."""
    pairs = list(batches)
    whole = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    return list(torch.autograd.grad(mean_loss(model, whole), list(model.parameters())))


def weighted(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], weights: Sequence[float]
) -> list[Tensor]:
    """The gradient of sum(w * l) / sum(w), from one graph."""
    losses = [mean_loss(model, batch) for batch in batches]
    total = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    return list(torch.autograd.grad(total, list(model.parameters())))


def gradients(model: nn.Module) -> list[Tensor]:
    """A copy of what stands in `.grad`."""
    return [p.grad.clone() for p in model.parameters()]


def relative(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference by the norm of what was expected."""
    with torch.no_grad():
        apart = torch.stack([(a - b).norm() for a, b in zip(got, expected, strict=True)]).norm()
        return float(apart / torch.stack([b.norm() for b in expected]).norm())


def textbook_loop(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    steps: int,
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    max_grad_norm: float | None = None,
) -> None:
    """Full windows as torch's tutorials write them: `(loss / steps).backward()`."""
    for number, batch in enumerate(batches, 1):
        loss = mean_loss(model, batch) / steps
        (loss if scaler is None else scaler.scale(loss)).backward()
        if number % steps:
            continue
        if scaler is not None and max_grad_norm is not None:
            scaler.unscale_(optimizer)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters have the same bits."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
