"""A loop on simulated devices, that tells its gradients, its waits and its collectives."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from ranks.reference import Reductions
from torch import Tensor, nn

from accumplug import Accumulator, NoiseScale
from simulated_cuda import device, group

WIDTH = 8


@dataclass(frozen=True)
class Case:
    """How the loop is written."""

    weights: str = "none"
    """none, numbers, cpu (tensors in host memory), device (tensors on the model's device)."""
    steps: int = 4
    batches: bool = False
    """Whether the items come from `accum.batches`."""
    weigh: bool = False
    """Whether `batches` looks ahead for the weights."""
    sizes: tuple[tuple[int, ...], ...] = ((3, 1, 2, 4) * 3, (2, 5, 1, 3) * 3)
    """Rows of each micro-batch, by rank."""
    loop_steps: bool = False
    scaler: bool = False
    noise: bool = False
    set_device: bool = True
    dtype: torch.dtype = torch.float64
    empty: tuple[int, ...] = ()
    """Ranks whose weights are all 0 in the second window."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the Accumulator."""


@dataclass
class Report:
    """What happened on one rank."""

    errors: list[float] = field(default_factory=list)
    """Of the gradient of each update, relative to one big batch."""
    inner: list[list[device.Wait]] = field(default_factory=list)
    """Waits in each micro-batch that does not close."""
    closes: list[list[device.Wait]] = field(default_factory=list)
    """In each that does."""
    start: list[device.Wait] = field(default_factory=list)
    """Before the first."""
    collectives: list[group.Collective] = field(default_factory=list)
    small: list[int] = field(default_factory=list)
    """Elements of each small all-reduce after the first window, wherever it is made."""
    updates: int = 0
    skipped: int = 0
    weight: float = 0.0
    """Of the last window."""

    def most(self, steps: int) -> tuple[int, int]:
        """The most waits of a micro-batch that does not close, and of one that does.

        Not in the first window of `steps`: there DistributedDataParallel rebuilds its buckets.
        """
        inner, closes = self.inner[steps - 1 :], self.closes[1:]
        return max(map(len, inner), default=0), max(map(len, closes), default=0)


def network(dtype: torch.dtype) -> nn.Module:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    layers = nn.Linear(WIDTH, WIDTH).double(), nn.GELU(), nn.Linear(WIDTH, 1).double()
    for parameter in (p for layer in layers for p in layer.parameters()):
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return nn.Sequential(*layers).to(dtype)


def data(case: Case, rank: int) -> list[Tensor]:
    """The micro-batches of a rank, in host memory."""
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(n, WIDTH, generator=generator, dtype=torch.float64).to(case.dtype)
        for n in case.sizes[rank]
    ]


def weight_of(case: Case, rank: int, index: int) -> int:
    """Items of a micro-batch."""
    if rank in case.empty and index // case.steps == 1:
        return 0
    return 1 if case.weights == "none" else case.sizes[rank][index]


def gradient(model: nn.Module) -> Tensor:
    """In fp64, in one piece."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([g.detach().double().flatten() for g in grads])


def references(case: Case, ranks: int) -> list[Tensor]:
    """The gradient of each window by one backward on the CPU."""
    found = []
    for start in range(0, max(map(len, case.sizes[:ranks])), case.steps):
        model = network(case.dtype).double()
        total, weights = torch.zeros(()), 0
        for rank in range(ranks):
            for index, x in enumerate(data(case, rank)):
                if start <= index < start + case.steps:
                    weight = weight_of(case, rank, index)
                    total = total + weight * model(x.double()).square().mean()
                    weights += weight
        if weights:
            (total / weights).backward()
            found.append(gradient(model))
    return found


def train(rank: int, case: Case) -> Report:
    """Run the loop on this rank's device; the learning rate is 0."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    place = torch.device("cuda", rank)
    torch.cuda.set_device(rank if case.set_device else 0)
    model = network(case.dtype).to(place)
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0) if case.scaler else None
    options = dict(case.options) if case.loop_steps else {"optimizer": optimizer, **case.options}
    accum = Accumulator(case.steps, scaler=scaler, **options)
    if case.noise:
        accum.noise_scale = NoiseScale()
    report, gradients = Report(), []
    if not case.loop_steps:
        accum.on_update(lambda: gradients.append(gradient(model)))
    warnings.filterwarnings("ignore", "without optimizer=")  # their data end together
    inputs = [x.to(place) for x in data(case, rank)]
    weights = [_weight(case, rank, index, place) for index in range(len(inputs))]
    group.calls.clear()
    reductions = Reductions()
    items: Iterator[Tensor] = iter(inputs)
    if case.weigh:
        known = iter(weights)
        items = accum.batches(inputs, weigh=lambda _: next(known))
    elif case.batches:
        items = accum.batches(inputs)
    with _own_waits() as report.start:
        x = next(items, None)
    index = 0
    while x is not None:
        with _own_waits() as seen, reductions if index >= case.steps else contextlib.nullcontext():
            with accum(wrapped, **({} if case.weigh else {"weight": weights[index]})) as micro:
                loss = wrapped(x).square().mean()
                accum.backward(loss)
                if case.loop_steps and micro.closes:
                    scale = 1.0 if scaler is None else 256.0
                    gradients.append(gradient(model) / scale)
                    _step(optimizer, scaler)
            closes = micro.closes
            x = next(items, None)
        (report.closes if closes else report.inner).append(seen)
        index += 1
    report.collectives, report.small = list(group.calls), reductions.others
    report.updates, report.skipped, report.weight = accum.updates, accum.skipped, accum.last.weight
    report.errors = [
        float((got.cpu() - want).norm() / want.norm())
        for got, want in zip(gradients, references(case, ranks), strict=True)
    ]
    return report


def _step(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """As a loop without accum does it."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def _weight(case: Case, rank: int, index: int, place: torch.device) -> float | Tensor:
    weight = weight_of(case, rank, index)
    if case.weights == "cpu":
        return torch.tensor(weight)
    return torch.tensor(weight, device=place) if case.weights == "device" else weight


@contextlib.contextmanager
def _own_waits() -> Iterator[list[device.Wait]]:
    """The waits that the loop has not called for itself."""
    with device.waits() as seen:
        own: list[device.Wait] = []
        yield own
    own += [wait for wait in seen if not wait.by_loop]
