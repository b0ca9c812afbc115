"""Where torch lacks a private part, or it means something else, autograd adds up by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accumplug.inplace import InplaceGradients, calls, engine, gradients, products


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    gradients._unable.cache_clear()
    yield
    gradients._unable.cache_clear()


def gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, InplaceGradients]:
    """That of two micro-batches, and what served them."""
    serve = InplaceGradients(model, smallest=0)
    for _ in range(2):
        with serve.micro_batch():
            model(x).square().sum().backward()
    return model.weight.grad, serve


def test_this_torch_has_all_parts() -> None:
    """If this fails, a new version of torch has moved one: read accumplug/inplace/engine.py."""
    assert engine.MISSING == []
    assert gradients._unable() is None


def test_a_missing_part_is_named_and_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are autograd's."""
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    model(x).square().sum().backward()
    expected, model.weight.grad = model.weight.grad, None
    assert engine._find(torch._C, "_no_such_name") is None
    monkeypatch.setattr(engine, "will_execute", None)
    got, serve = gradient(model, x)
    engine.MISSING.clear()
    assert torch.equal(got, 2 * expected)
    assert serve.report().others == {
        "Linear": f"torch {torch.__version__} has no torch._C._no_such_name"
    }


@pytest.mark.parametrize("runs", [True, False])
def test_a_part_with_another_meaning_is_noticed(
    monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """One tiny product tells: its sum would not be autograd's."""
    monkeypatch.setattr(products, "will_execute", lambda node: runs)
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    model(x).square().sum().backward()
    expected, model.weight.grad = model.weight.grad, None
    got, serve = gradient(model, x)
    assert torch.equal(got, 2 * expected)
    assert "another gradient than autograd's" in serve.report().others["Linear"]


def test_an_attention_that_asks_in_another_way_is_left_alone() -> None:
    """Its body would hand itself over without end."""

    def attention(*args: Any, **options: Any) -> str:
        return "no question asked"

    assert calls._attention(attention) is NotImplemented
    assert "has_torch_function" in F.multi_head_attention_forward.__code__.co_names


def test_a_gradient_that_is_no_plain_tensor_is_traced() -> None:
    """Whatever the module is called that traces."""
    assert not engine.is_traced(torch.ones(1))
    assert engine.is_traced(nn.Parameter(torch.ones(1)))
