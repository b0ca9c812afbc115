"""The short way into autograd's engine does what `torch.autograd.backward` does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from accumplug.core.autograd import run_backward


class Tagged(Tensor):
    """A subclass, whose own `__torch_function__` has to be asked."""


def graph() -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """A model, two losses of it, and what their backward starts with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    out = model(torch.randn(5, 3))
    return model, [out.square().mean(), out[:1, :1].exp()], [torch.tensor(0.3), torch.ones(1, 1)]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("way", ["plain", "retain_graph", "create_graph", "subclass"])
def test_gradients_are_those_of_torch(way: str) -> None:
    """Bit for bit, added to what is there."""
    grads = []
    for function in (run_backward, torch.autograd.backward):
        model, roots, starts = graph()
        if way == "subclass":
            roots = [root.as_subclass(Tagged) for root in roots]
        options = (way == "retain_graph", way == "create_graph")
        function(roots, starts, *options)
        if way == "retain_graph":
            function(roots, starts)
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert all(g.requires_grad == (way == "create_graph") for g in grads[0])


def test_a_graph_is_freed_unless_it_is_retained() -> None:
    """Torch's own error for a second backward."""
    _, roots, starts = graph()
    run_backward(roots, starts)
    with pytest.raises(RuntimeError, match="second time"):
        run_backward(roots, starts)
