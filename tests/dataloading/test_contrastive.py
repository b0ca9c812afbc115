"""A contrastive loss through micro-batches is that of the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accumplug import Accumulator

ROWS = 12


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Towers(nn.Module):
    """Two sides of a pair, embedded by one call; dropout in between."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (
            nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))
            for _ in range(2)
        )

    def forward(self, a: Any, b: Any) -> tuple[Any, Any]:
        return F.normalize(self.one(a), dim=1), F.normalize(self.other(b), dim=1)


def clip_loss(one: Any, other: Any) -> Any:
    """Both directions, with all other rows as negatives."""
    scores, right = one @ other.T / 0.2, torch.arange(len(one))
    return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


def pairs(rows: int = ROWS, seed: int = 1) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, 5, generator=generator)
    return a, a.roll(1, 1) + 0.1 * torch.randn(rows, 5, generator=generator)


def relative(model: nn.Module, start: nn.Module, expected: list[Any]) -> float:
    """How far what SGD of rate 1 has added to `model` is from minus `expected`."""
    both = zip(model.parameters(), start.parameters(), expected, strict=True)
    found = [((b - a).detach() - g, g) for a, b, g in both]
    off, size = (torch.cat([pair[i].flatten() for pair in found]).norm() for i in (0, 1))
    return float(off / size)


def gradients(model: nn.Module, batch: Any) -> tuple[Any, list[Any]]:
    loss = clip_loss(*model(*batch))
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 12, 20])
def test_any_size_has_the_gradient_of_the_whole_batch(size: int) -> None:
    """And its loss, also in the log."""
    model = Towers()
    start = copy.deepcopy(model)
    loss, expected = gradients(start, pairs())
    accum = Accumulator(None, optimizer=sgd(model))
    found = accum.contrastive(model, batch=pairs(), size=size, loss=clip_loss)
    assert accum.updates == 1
    assert relative(model, start, expected) <= 1e-12
    assert float(found) == pytest.approx(float(loss), rel=1e-13)
    assert accum.last.loss == pytest.approx(float(loss), rel=1e-13)
    assert accum.last.weight == ROWS


@pytest.mark.parametrize("where", ["in the model", "outside"])
def test_a_temperature_that_the_loss_uses_is_learnt(where: str) -> None:
    """As CLIP's, whether or not it belongs to the model."""
    model, temperature = Towers(), nn.Parameter(torch.tensor(-1.5))
    if where == "in the model":
        model.temperature = temperature
    start, cold = copy.deepcopy(model), temperature.detach().clone().requires_grad_()

    def loss(one: Any, other: Any, heat: Any) -> Any:
        scores, right = one @ other.T / heat.exp(), torch.arange(len(one))
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2

    expected = torch.autograd.grad(loss(*start(*pairs()), cold), cold)[0]
    optimizer = torch.optim.SGD(list({*model.parameters(), temperature}), lr=1.0)
    accum = Accumulator(None, optimizer=optimizer)
    accum.contrastive(
        model, batch=pairs(), size=5, loss=lambda one, other: loss(one, other, temperature)
    )
    assert (cold - temperature).item() == pytest.approx(float(expected), rel=1e-12)


def test_a_window_may_be_several_batches() -> None:
    """Each has its own negatives; they count by their rows, and the last one is a tail."""
    model = Towers()
    start = copy.deepcopy(model)
    batches = [pairs(12, 1), pairs(8, 2)]
    parts = [gradients(start, batch)[1] for batch in batches]
    expected = [(12 * a + 8 * b) / 20 for a, b in zip(*parts, strict=True)]
    accum = Accumulator(9, optimizer=sgd(model))
    for batch in accum.batches(batches):
        accum.contrastive(model, batch=batch, size=4, loss=clip_loss)
    assert accum.updates == 1
    assert relative(model, start, expected) <= 1e-12


def test_both_forwards_draw_the_same_dropout() -> None:
    """The expected gradient is that of the parts with the masks that they draw in turn."""
    model = Towers(dropout=0.5)
    start = copy.deepcopy(model)
    torch.manual_seed(3)
    found = [start(*(side[i : i + 4] for side in pairs())) for i in range(0, ROWS, 4)]
    after = torch.get_rng_state()
    loss = clip_loss(*(torch.cat(side) for side in zip(*found, strict=True)))
    expected = list(torch.autograd.grad(loss, list(start.parameters())))
    torch.manual_seed(3)
    accum = Accumulator(None, optimizer=sgd(model))
    accum.contrastive(model, batch=pairs(), size=4, loss=clip_loss)
    assert relative(model, start, expected) <= 1e-12
    assert torch.equal(torch.get_rng_state(), after)


def test_autocast_does_not_lose_the_graph() -> None:
    """torch 2.8 to 2.10 keep the casts of the forward without a graph, and use them again."""
    torch.set_default_dtype(torch.float32)
    model = Towers()
    start = copy.deepcopy(model)
    batch = tuple(side.float() for side in pairs())
    with torch.autocast("cpu", torch.bfloat16):
        loss = clip_loss(*start(*batch))
    expected = list(torch.autograd.grad(loss, list(start.parameters())))
    accum = Accumulator(None, optimizer=sgd(model))
    with torch.autocast("cpu", torch.bfloat16):
        accum.contrastive(model, batch=batch, size=4, loss=clip_loss)
    assert relative(model, start, expected) <= 0.03  # bf16 has 8 bits


def test_a_scaler_does_not_change_the_update() -> None:
    """fp16 in the forward, a scale of 1024."""
    torch.set_default_dtype(torch.float32)
    model = Towers()
    start = copy.deepcopy(model)
    batch = tuple(side.float() for side in pairs())
    expected = gradients(start, batch)[1]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accum = Accumulator(None, optimizer=sgd(model), scaler=scaler)
    with torch.autocast("cpu", torch.float16):
        accum.contrastive(model, batch=batch, size=4, loss=clip_loss)
    assert accum.updates == 1
    assert relative(model, start, expected) <= 0.01


def test_a_function_may_embed() -> None:
    """One model for both sides, or several models."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    start = copy.deepcopy(model)
    a, b = pairs()
    loss = clip_loss(start(a), start(b))
    expected = list(torch.autograd.grad(loss, list(start.parameters())))
    accum = Accumulator(None, optimizer=sgd(model))
    embed = lambda part: (model(part[0]), model(part[1]))  # noqa: E731
    accum.contrastive(model, batch=(a, b), size=5, loss=clip_loss, embed=embed)
    assert relative(model, start, expected) <= 1e-12


def test_a_mapping_gives_its_values_by_name() -> None:
    """As a tokenizer's output does."""
    model = Towers()
    a, b = pairs()
    accum = Accumulator(None, optimizer=sgd(model))
    accum.contrastive(model, batch={"a": a, "b": b}, size=5, loss=clip_loss)
    assert accum.updates == 1


def test_what_is_no_loss_or_no_embedding_is_refused() -> None:
    """Before anything is added."""
    model = Towers()
    accum = Accumulator(None, optimizer=sgd(model))
    with pytest.raises(ValueError, match="one element, a mean over rows; got 12"):
        accum.contrastive(model, batch=pairs(), size=4, loss=lambda a, b: (a * b).sum(1))
    with pytest.raises(ValueError, match="a tensor of rows, or several; got str"):
        accum.contrastive(
            model, batch=pairs(), size=4, loss=clip_loss, embed=lambda part: ["no tensor"]
        )
    assert accum.pending == 0
