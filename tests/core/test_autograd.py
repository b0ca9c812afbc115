"""The short way into autograd's engine does what `torch.autograd.backward` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accumplug.core import autograd
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


def refusing(roots: tuple[Tensor, ...]) -> None:
    """An engine that takes other arguments."""


def idle(*args: Any, **options: Any) -> None:
    """An engine that does something else."""


@pytest.mark.parametrize("engine", [None, refusing, idle], ids=["gone", "refuses", "idle"])
def test_another_engine_than_the_one_that_is_known_is_not_used(
    monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    """The public function runs instead; asked once, at the first backward."""
    monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", engine)
    autograd._engine.cache_clear()
    try:
        model, roots, starts = graph()
        run_backward(roots, starts)
        assert autograd._engine() is None
    finally:
        autograd._engine.cache_clear()
    expected, roots, starts = graph()
    torch.autograd.backward(roots, starts)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_the_engine_of_this_torch_is_used() -> None:
    """Else a micro-batch costs a fifth more; if this fails, read torch/autograd/graph.py."""
    assert autograd._engine() is torch.autograd.graph._engine_run_backward
