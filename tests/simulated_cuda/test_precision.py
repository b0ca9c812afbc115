"""What reaches the optimizer bit for bit, whatever knows the weights: the host or the device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from ranks.harness import Ranks
from torch import Tensor, nn

from accumplug import Accumulator
from simulated_cuda.training import gradient, network

GROUPS = {"1 rank": (1, None), "NCCL": (2, "simulated_nccl"), "mixed": (2, "simulated_mixed")}


STEPS, TAIL = 16, 7


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Those of a tail."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(TAIL)
    ]


def tail(rank: int, on_device: bool, dtype: torch.dtype) -> Tensor:
    """The gradient of 7 micro-batches of a window of 16 in `dtype`."""
    model = network(dtype).to("cuda:0")
    accum = Accumulator(STEPS, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    found: list[Tensor] = []
    accum.on_update(lambda: found.append(gradient(model)))
    for x in inputs(dtype):
        weight = torch.tensor(3, device="cuda:0") if on_device else 3
        with accum(model, weight=weight):
            accum.backward(model(x.to("cuda:0")).square().mean())
    accum.flush()
    return found[0].cpu()


@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "device"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_factor_of_a_tail_is_not_rounded_to_the_dtype_of_the_sum(
    gpus: Ranks, dtype: torch.dtype, on_device: bool
) -> None:
    """The textbook sum times 16 / 7, rounded once."""
    [ours] = gpus.run(1, tail, on_device, dtype, backend=None)
    model = network(dtype)
    for x in inputs(dtype):
        (model(x).square().mean() / STEPS).backward()
    wanted = gradient(model).float() * (STEPS / TAIL)
    assert torch.equal(ours.to(dtype), wanted.to(dtype))


def full_windows(rank: int, weight: object, loop: bool) -> tuple[list[Tensor], int]:
    """The weights after two windows of equal micro-batches, and the sums that were multiplied."""
    torch.cuda.set_device(rank)
    place = f"cuda:{rank}"
    model = network(torch.float32).to(place)
    ranks = torch.distributed.is_initialized()
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    inputs = [torch.randn(2, 8, dtype=torch.float32).to(place) for _ in range(6)]
    accum = None if loop else Accumulator(3, optimizer=optimizer)
    if weight == "device":
        weight = torch.tensor(3.0, device=place)
    with mock.patch("torch._foreach_mul_", wraps=torch._foreach_mul_) as multiplied:
        for index, x in enumerate(inputs):
            if accum is not None:
                with accum(wrapped, weight=weight):
                    accum.backward(wrapped(x).square().mean())
                continue
            closes = index % 3 == 2
            wrapped.require_backward_grad_sync = closes
            (wrapped(x).square().mean() / 3).backward()
            if closes:
                optimizer.step()
                optimizer.zero_grad()
        calls = multiplied.call_count
    return [p.detach().cpu() for p in model.parameters()], calls


@pytest.mark.parametrize("weight", [1, 3, 0.1])
@pytest.mark.parametrize("name", GROUPS)
def test_equal_weights_have_the_textbook_loops_bits_and_multiply_nothing(
    gpus: Ranks, name: str, weight: float
) -> None:
    """No kernel goes over the gradients to multiply them by one."""
    world, backend = GROUPS[name]
    ours = gpus.run(world, full_windows, weight, False, backend=backend)
    plain = gpus.run(world, full_windows, weight, True, backend=backend)
    for (one, calls), (other, _) in zip(ours, plain, strict=True):
        assert all(map(torch.equal, one, other))
        assert calls == 0


@pytest.mark.parametrize("name", GROUPS)
def test_equal_weights_on_the_device_have_the_textbook_loops_bits(gpus: Ranks, name: str) -> None:
    """The factor is exactly one."""
    world, backend = GROUPS[name]
    ours = gpus.run(world, full_windows, "device", False, backend=backend)
    plain = gpus.run(world, full_windows, 1, True, backend=backend)
    for (one, _), (other, _) in zip(ours, plain, strict=True):
        assert all(map(torch.equal, one, other))
