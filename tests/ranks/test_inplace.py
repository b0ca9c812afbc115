"""Gradients added in place under DDP: it sees what was used, and reduces what was added."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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
