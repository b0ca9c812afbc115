"""What the ranks train, and what plain torch in one process makes of the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Item = tuple[Tensor, Tensor]
Gradients = list[Tensor | None]


def net() -> nn.Module:
    """A small model, the same on each rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class Forked(nn.Module):
    """Linear heads, of which each forward uses those it is told; the last is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.heads = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("a", "b", "unused")})

    def forward(self, x: Tensor, names: str = "ab") -> Tensor:
        """Sum of the heads `names`, letter by letter."""
        return torch.stack([self.heads[name](x) for name in names]).sum(0)


def forked() -> nn.Module:
    """A model whose parameters are not used in each micro-batch, the same on each rank."""
    return Forked()


class Count(nn.Module):
    """Passes on its input and counts the calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        self.calls += 1
        return x


def counting(norm: bool = False) -> nn.Module:
    """A model with buffers, the same on each rank."""
    torch.manual_seed(3)
    middle = nn.BatchNorm1d(4) if norm else nn.Tanh()
    return nn.Sequential(Count(), nn.Linear(3, 4), middle, nn.Linear(4, 2))


def items(rank: int, sizes: Iterable[int], pass_: int = 0) -> list[Item]:
    """Micro-batches of `sizes` samples, others on each rank and in each pass."""
    found = []
    for index, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(1000 * rank + 100 * pass_ + index)
        x = torch.randn(size, 3, generator=generator)
        found.append((x, torch.randn(size, 2, generator=generator)))
    return found


def loss(model: nn.Module, item: Item) -> Tensor:
    """Mean over the samples of `item`."""
    return nn.functional.mse_loss(model(item[0]), item[1])


def windows_of(data: Sequence[Sequence[Item]], steps: int) -> list[list[Item]]:
    """What is in each window if rank r has the micro-batches `data[r]`, and a tail is flushed."""
    count = max(-(-len(own) // steps) for own in data)
    return [
        [item for own in data for item in own[w * steps : (w + 1) * steps]] for w in range(count)
    ]


def big_batches(
    windows: Iterable[Sequence[Item]],
    model: nn.Module | None = None,
    loss: Callable[[nn.Module, Item], Tensor] = loss,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    clip: float | None = None,
) -> tuple[list[Gradients], list[Tensor]]:
    """Train in one process on one big batch for each window, in plain torch.

    Returns the gradients of each update, and the parameters after the last.
    """
    model = net() if model is None else model
    stepper = (optimizer or sgd)(model.parameters())
    gradients = []
    for window in windows:
        whole = torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])
        stepper.zero_grad()
        loss(model, whole).backward()
        gradients.append(grads(model))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
    return gradients, [p.detach() for p in model.parameters()]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that hides no wrong scale."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def grads(model: nn.Module) -> Gradients:
    """Copies of the gradients as they are."""
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def parameters(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters as they are."""
    return [p.detach().clone() for p in model.parameters()]


def error(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Norm of the difference over the norm of what is expected; inf if None stands elsewhere."""
    if [a is None for a in actual] != [e is None for e in expected]:
        return float("inf")
    pairs = [(a, e) for a, e in zip(actual, expected, strict=True) if a is not None]
    difference = torch.cat([(a - e).flatten() for a, e in pairs])  # type: ignore[operator]
    return float(difference.norm() / torch.cat([e.flatten() for _, e in pairs]).norm())  # type: ignore[union-attr]


def errors(actual: Sequence[Gradients], expected: Sequence[Gradients]) -> float:
    """The largest `error` over all windows; inf if there are more or fewer of them."""
    if len(actual) != len(expected):
        return float("inf")
    return max(error(a, e) for a, e in zip(actual, expected, strict=True))


def equal(results: Sequence[Sequence[Tensor | None]]) -> bool:
    """Whether all ranks have the same bits."""
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for result in results
        for a, b in zip(result, results[0], strict=True)
    )


class Reductions:
    """Counts what runs between ranks: buckets that `ddp` reduces, and other all-reduces.

    The buckets by a communication hook; a model this small has one.
    """

    def __init__(self, ddp: DistributedDataParallel | None = None) -> None:
        self.buckets = 0
        self.others: list[int] = []
        """How many numbers each of the other all-reduces had."""
        if ddp is not None:
            ddp.register_comm_hook(None, self._hook)
        self._all_reduce = dist.all_reduce

    def __enter__(self) -> Reductions:
        dist.all_reduce = self._count
        return self

    def __exit__(self, *_: Any) -> None:
        dist.all_reduce = self._all_reduce

    def _count(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.others.append(tensor.numel())
        return self._all_reduce(tensor, *args, **kwargs)

    def _hook(self, _, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
        self.buckets += 1
        tensor = bucket.buffer().div_(dist.get_world_size())
        work = dist.distributed_c10d._get_default_group().allreduce([tensor])
        return work.get_future().then(lambda done: done.value()[0])
