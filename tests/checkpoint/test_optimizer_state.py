"""An optimizer's state comes back with each value and dtype, and is that of the save's moment."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import difference

from accumplug import Accumulator, Checkpointer


class Preconditioned(torch.optim.Optimizer):
    """Keeps what SOAP and Shampoo keep: fp32 matrices in lists, for weights in bf16."""

    def __init__(self, parameters: Any, lr: Any = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                grad, state = p.grad.float(), self.state[p]
                if not state:
                    state["factors"] = [torch.zeros(n, n) for n in p.shape]
                    state["nested"] = {"pair": (torch.zeros(()), [torch.zeros(2).double()])}
                    state["name"], state["step"] = "left", 0
                    state["mask"] = torch.zeros(p.shape, dtype=torch.bool)
                    state["codes"] = torch.zeros(p.shape, dtype=torch.uint8)
                state["step"] += 1
                state["factors"][0] += grad @ grad.T / 3
                state["factors"][1] += grad.T @ grad / 3
                state["nested"]["pair"][0].add_(grad.norm() / 3)
                state["nested"]["pair"][1][0].add_(1 / 3)
                state["mask"] |= grad > 0
                state["codes"] += 3
                scale = state["factors"][0].trace().sqrt() + state["nested"]["pair"][0]
                p -= (group["lr"] * grad / (1 + scale)).to(p.dtype)


class Custom(Preconditioned):
    """Loads in its own way, so that torch's conversion happens."""

    def load_state_dict(self, state_dict: Any) -> None:
        for state in state_dict["state"].values():
            state["name"] = ["left"]  # torch would make "<generator ...>" of a string
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["name"] = "left"


def build(kind: Any, seed: int) -> tuple[nn.Module, Any, Accumulator]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2, bias=False).to(torch.bfloat16)
    optimizer = kind(model.parameters())
    return model, optimizer, Accumulator(2, optimizer=optimizer)


def train(model: nn.Module, accum: Accumulator, count: int) -> None:
    for _ in range(count):
        generator = torch.Generator().manual_seed(accum.micro_batches)
        x = torch.randn(4, 3, generator=generator).to(torch.bfloat16)
        with accum(model):
            accum.backward(model(x).float().square().mean())


@pytest.mark.parametrize("kind", [Preconditioned, Custom])
def test_any_nesting_comes_back_with_dtype_and_value(kind: Any, tmp_path: Path) -> None:
    """torch's load_state_dict converts what is in lists to the weights' dtype."""
    model, optimizer, accum = build(kind, 0)
    with Checkpointer(tmp_path, accum, model=model) as checkpoint:
        train(model, accum, 5)
        checkpoint.save()
    other, again, resumed = build(kind, 1)
    with Checkpointer(tmp_path, resumed, model=other) as checkpoint:
        checkpoint.resume()
        expected, found = optimizer.state_dict()["state"], again.state_dict()["state"]
        assert difference(expected, found) is None
        assert dtypes(expected) == dtypes(found)
        train(other, resumed, 3)
    train(model, accum, 3)
    assert difference(optimizer.state_dict(), again.state_dict()) is None
    assert torch.equal(*(m.weight for m in (model, other)))  # type: ignore[arg-type]


def dtypes(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.dtype
    if isinstance(state, dict):
        return {key: dtypes(value) for key, value in state.items()}
    return [dtypes(value) for value in state] if isinstance(state, (list, tuple)) else type(state)


def test_a_resume_in_the_same_process_shares_no_memory_with_the_file(tmp_path: Path) -> None:
    """The file may be removed or overwritten; and what was there before is written over."""
    model, optimizer, accum = build(Preconditioned, 0)
    with Checkpointer(tmp_path, accum, model=model) as checkpoint:
        train(model, accum, 4)
        checkpoint.save()
        saved = {k: v.clone() for k, v in enumerate(optimizer.state[model.weight]["factors"])}
        train(model, accum, 4)
        before = optimizer.state[model.weight]["factors"][0]
        checkpoint.resume()
    factors = optimizer.state[model.weight]["factors"]
    assert difference(saved, dict(enumerate(factors))) is None
    assert factors[0].data_ptr() == before.data_ptr()


def test_a_learning_rate_that_is_a_tensor_is_saved_as_it_was_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread writes it after the loop has changed it; so are a scheduler's and an object's."""
    model, lr = nn.Linear(2, 1), torch.tensor(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    accum = Accumulator(2, optimizer=optimizer)
    other = {"average": torch.ones(2), "words": [torch.ones(1)]}

    class Average:
        def state_dict(self) -> Any:
            return other

        def load_state_dict(self, state: Any) -> None:
            other.update(state)

    go, fsync = threading.Event(), os.fsync

    def slow(file: int) -> None:
        assert go.wait(20)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    checkpoint = Checkpointer(tmp_path, accum, model=model, every=1, average=Average())
    with accum(model):
        accum.backward(model(torch.ones(1, 2)).sum())
    lr.fill_(0.125)
    other["average"].zero_()
    other["words"][0].zero_()
    go.set()
    checkpoint.close()

    fresh, held = nn.Linear(2, 1), torch.tensor(1.0)
    optimizer = torch.optim.SGD(fresh.parameters(), held)
    resumed = Accumulator(2, optimizer=optimizer)
    with Checkpointer(tmp_path, resumed, model=fresh, average=Average()) as checkpoint:
        checkpoint.resume()
    assert held.item() == 0.5
    assert optimizer.param_groups[0]["lr"] is held
    assert (other["average"].tolist(), other["words"][0].tolist()) == ([1, 1], [1])
