"""Where state and small tensors are: with the model, on one device or on two."""

from __future__ import annotations

import pytest
import torch
from ranks.harness import Ranks
from torch import Tensor, nn

from accumplug import Accumulator
from simulated_cuda.training import gradient


class Pipeline(nn.Module):
    """Its first layer is on cuda:0, its second on cuda:1."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(4, 3).to(first)
        self.second = nn.Linear(3, 1).to(second)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.to(self.first.weight.device))
        return self.second(hidden.to(self.second.weight.device))


OPTIONS = {
    "plain": {},
    "clip": {"max_grad_norm": 1e9},
    "skip_micro_batch": {"nonfinite": "skip_micro_batch"},
    "fp32 sums": {"accumulate_dtype": torch.float32},
    "scaler": {"scaler": True},
}


def pipeline(rank: int, place: str | None, options: dict[str, object]) -> list[float]:
    """Errors of two windows of weighted micro-batches, relative to one big batch."""
    model, reference = Pipeline("cuda:0", "cuda:1"), Pipeline("cpu", "cpu")
    if options.get("scaler"):
        options = {"scaler": torch.amp.GradScaler("cuda", init_scale=4.0)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accum = Accumulator(3, optimizer=optimizer, **options)
    found: list[Tensor] = []
    accum.on_update(lambda: found.append(gradient(model.first)))
    errors, total, weights = [], torch.zeros(()), 0
    for index in range(6):
        x, n = torch.randn(1 + index % 4, 4), 1 + index % 4
        weight = n if place is None else torch.tensor(n, device=place)
        with accum(model, weight=weight):
            accum.backward(model(x).square().mean())
        total, weights = total + n * reference(x).square().mean(), weights + n
        if index % 3 == 2:
            (total / weights).backward()
            want = gradient(reference.first)
            errors.append(float((found[-1].cpu() - want).norm() / want.norm()))
            reference.zero_grad()
            total, weights = torch.zeros(()), 0
    assert accum.updates == 2
    assert accum.last.weight == sum(1 + i % 4 for i in range(3, 6))
    return errors


@pytest.mark.parametrize("place", [None, "cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_model_may_be_on_two_devices_and_its_weights_on_either(
    gpus: Ranks, options: str, place: str | None
) -> None:
    """The gradient is that of one big batch."""
    [errors] = gpus.run(1, pipeline, place, OPTIONS[options], backend=None)
    assert max(errors) < 1e-12


def two_optimizers(rank: int, place: str) -> tuple[int, float]:
    """Each optimizer has the parameters of one device, one of them without a gradient at first."""
    model = Pipeline("cuda:0", "cuda:1")
    optimizers = [torch.optim.AdamW(part.parameters()) for part in (model.first, model.second)]
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    accum = Accumulator(2, optimizer=optimizers, scaler=scaler, max_grad_norm=1.0)
    for _ in range(4):
        with accum(model, weight=torch.tensor(3, device=place)):
            accum.backward(model(torch.ones(2, 4)).square().mean())
    return accum.updates, accum.last.scale


@pytest.mark.parametrize("place", ["cuda:0", "cuda:1"])
def test_optimizers_may_be_on_several_devices(gpus: Ranks, place: str) -> None:
    """With one scaler."""
    assert gpus.run(1, two_optimizers, place, backend=None) == [(2, 4.0)]
