"""Gradients added in place under DDP: it sees what was used, and reduces what was added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator
from accumplug.inplace import InplaceGradients

from .harness import Ranks


class Heads(nn.Module):
    """A trunk and two heads, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x).tanh())


def window(
    rank: int, served: bool, view: bool, heads: tuple[int, ...]
) -> tuple[list[Tensor], list[str]]:
    """The gradients after a window with a micro-batch for each of `heads`, the last one synced."""
    model = Heads()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=view)
    serve = InplaceGradients(ddp, smallest=0)
    for parameter in ddp.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.manual_seed(rank)
    for index, head in enumerate(heads):
        x = torch.randn(3, 6)
        if index == len(heads) - 1:
            ddp(x, head).sum().backward()
        elif served:
            with ddp.no_sync(), serve.micro_batch():
                ddp(x, head).sum().backward()
        else:
            with ddp.no_sync():
                ddp(x, head).sum().backward()
    return [p.grad for p in model.parameters()], sorted(serve.report().served)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("heads", [(0, 0, 0), (0, 1, 1, 0)])
def test_ddp_reduces_what_was_added_in_place(
    ranks: Ranks, heads: tuple[int, ...], view: bool
) -> None:
    """Also of a head that only micro-batches served in place have used; equal on all ranks."""
    expected = ranks.run(2, window, False, view, heads)
    got = ranks.run(2, window, True, view, heads)
    for (grads, served), (plain, _) in zip(got, expected, strict=True):
        assert served == sorted({"module.trunk", *(f"module.heads.{h}" for h in heads[:-1])})
        for grad, reference, other in zip(grads, plain, got[0][0], strict=True):
            torch.testing.assert_close(grad, reference, rtol=1e-13, atol=1e-13)
            assert torch.equal(grad, other)


SIZES = ((2, 1, 3, 2, 1), (1, 2, 2, 3), (3,))
"""Samples in each micro-batch of each rank: two windows of 3, of which the last one is a tail."""


def worst_window(rank: int, world: int, scale: float | None) -> tuple[float, Any, int]:
    """The largest relative error of a window's gradient, what was served, and the updates."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(800, 700), nn.Tanh(), nn.Linear(700, 2)).double()
    generator = torch.Generator().manual_seed(2)
    data = [
        [torch.randn(n, 800, generator=generator, dtype=torch.float64) for n in sizes]
        for sizes in SIZES[:world]
    ]
    expected = []
    for start in (0, 3):
        whole = torch.cat([x for own in data for x in own[start : start + 3]])
        loss = model(whole).square().sum(1).mean()
        expected.append(torch.autograd.grad(loss, list(model.parameters())))
    ddp = DistributedDataParallel(model)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.0)
    accum = Accumulator(3, optimizer=optimizer, scaler=scaler, inplace=True)
    errors: list[float] = []

    @accum.on_update
    def compare() -> None:
        for parameter, grad in zip(model.parameters(), expected[accum.updates - 1], strict=True):
            errors.append(float((parameter.grad - grad).norm() / grad.norm()))

    for x in accum.batches(data[rank]):
        with accum(ddp, weight=len(x)):
            accum.backward(ddp(x).square().sum(1).mean())
    return max(errors), accum.inplace_report().served, accum.updates


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_uneven_windows_with_a_tail_are_big_batches(
    ranks: Ranks, world: int, scale: float | None
) -> None:
    """From a window's first micro-batch on, with ranks that have less data, or a scaler."""
    for rank, found in enumerate(ranks.run(world, worst_window, world, scale)):
        error, served, updates = found
        assert error <= 1e-13
        assert updates == 2
        assert served == (("module.0",) if len(SIZES[rank]) > 1 else ())
