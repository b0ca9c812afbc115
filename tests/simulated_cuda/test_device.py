"""The simulated device itself: what it has in common with CUDA, and what it counts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ranks.harness import RankError, Ranks

from simulated_cuda import device, group


def one_backward(rank: int) -> tuple[str, str, bool, str]:
    """A step of a small model on the second device."""
    model = nn.Linear(3, 2).to("cuda:1")
    threads = []
    model.weight.register_hook(lambda _: threads.append(threading.current_thread().name))
    model(torch.ones(4, 3, device="cuda:1")).sum().backward()
    assert model.weight.grad is not None
    host = nn.Linear(3, 2)
    host.load_state_dict(model.state_dict())
    host(torch.ones(4, 3)).sum().backward()
    assert host.weight.grad is not None
    same = torch.equal(model.weight.grad.cpu(), host.weight.grad)
    return str(model.weight.device), str(model.weight.grad.device), same, threads[0]


def test_a_backward_runs_on_its_device_in_a_thread_of_its_own(gpus: Ranks) -> None:
    """With the gradient that the CPU finds."""
    [(weight, grad, same, thread)] = gpus.run(1, one_backward, backend=None)
    assert (weight, grad, same) == ("cuda:1", "cuda:1", True)
    assert thread != "MainThread"


def mixed(rank: int, one: str, other: str) -> None:
    """Add tensors of two devices."""
    torch.ones(2, device=one) + torch.ones(2, device=other)


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_devices_do_not_mix(gpus: Ranks, other: str) -> None:
    """As torch says it on CUDA."""
    with pytest.raises(RankError, match="Expected all tensors to be on the same device"):
        gpus.run(1, mixed, "cuda:0", other, backend=None)


CALLS = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "bool": lambda t: bool(t[0] > 0),
    "cpu": lambda t: t.cpu(),
    "a new tensor": lambda t: torch.tensor([1.0], device=t.device),
    "to the device": lambda t: torch.ones(2).to(t.device),
    "nonzero": lambda t: t.nonzero(),
    "a mask": lambda t: t[t > 0],
    "a masked write": lambda t: t.index_put_((t > 0,), torch.zeros_like(t)),
    "equal": lambda t: torch.equal(t, t),
    "synchronize": lambda t: torch.cuda.synchronize(),
    "an event": lambda t: torch.cuda.Event().synchronize(),
    "pageable": lambda t: torch.empty(2).copy_(t, non_blocking=True),
}
QUIET = {
    "arithmetic": lambda t: (t * 2 + 1).sum() / 3,
    "full": lambda t: torch.full((), 3.0, device=t.device),
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "pinned": lambda t: torch.empty(2, pin_memory=True).copy_(t, non_blocking=True),
    "to the device": lambda t: torch.ones(2).to(t.device, non_blocking=True),
    "another device": lambda t: t.to("cuda:1"),
    "norms": lambda t: torch.nn.utils.get_total_norm([t, t]),
}


def count(rank: int, name: str, quiet: bool) -> list[tuple[str, str]]:
    """The waits in one call."""
    tensor = torch.ones(2, device="cuda:0")
    call: Any = (QUIET if quiet else CALLS)[name]
    with device.waits() as seen:
        call(tensor)
    return [(w.thread, str(w)) for w in seen]


@pytest.mark.parametrize("name", CALLS)
def test_each_wait_is_counted_with_its_line(gpus: Ranks, name: str) -> None:
    """What `torch.cuda.set_sync_debug_mode` warns of, and synchronize."""
    [seen] = gpus.run(1, count, name, False, backend=None)
    assert [thread for thread, _ in seen] == ["MainThread"], seen
    assert "test_device.py" in seen[0][1]


@pytest.mark.parametrize("name", QUIET)
def test_what_is_queued_is_no_wait(gpus: Ranks, name: str) -> None:
    """Kernels, and copies that are not blocking."""
    assert gpus.run(1, count, name, True, backend=None) == [[]]


def random_numbers(rank: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Dropout masks of a device, and the CPU's numbers beside them."""
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    ones = torch.ones(8, device="cuda:0")
    first = nn.functional.dropout(ones).tolist()
    host = torch.rand(3).tolist()
    torch.cuda.set_rng_state(state)
    again = nn.functional.dropout(ones).tolist()
    torch.manual_seed(3)
    return first, again, host, torch.rand(3).tolist()


def test_each_device_has_its_own_random_numbers(gpus: Ranks) -> None:
    """They do not change those of the CPU, and their state can be set."""
    [(first, again, host, alone)] = gpus.run(1, random_numbers, backend=None)
    assert first == again
    assert host == alone


def errors_on_wait(rank: int) -> None:
    """The debug mode of torch.cuda."""
    ones = torch.ones(2, device="cuda:0")
    torch.cuda.set_sync_debug_mode("error")
    try:
        ones.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_wait_can_be_an_error(gpus: Ranks) -> None:
    """As with `torch.cuda.set_sync_debug_mode("error")`."""
    with pytest.raises(RankError, match="called a synchronizing CUDA operation"):
        gpus.run(1, errors_on_wait, backend=None)


def sum_on(rank: int, place: str) -> tuple[float, list[group.Collective]]:
    """All-reduce the rank's number."""
    group.calls.clear()
    value = torch.full((), rank + 1.0, device=place.format(rank=rank))
    dist.all_reduce(value)
    return value.item(), list(group.calls)


def test_a_group_sums_over_the_devices_of_its_ranks(gpus: Ranks) -> None:
    """And lists its calls."""
    answers = gpus.run(2, sum_on, "cuda:{rank}", backend="simulated_nccl")
    assert [value for value, _ in answers] == [3.0, 3.0]
    assert answers[1][1] == [group.Collective("allreduce", "cuda:1", 1)]


@pytest.mark.parametrize(
    ("place", "words"),
    [("cpu", "No backend type associated with device type cpu"), ("cuda:0", "Duplicate GPU")],
)
def test_a_group_takes_tensors_of_the_ranks_own_device_only(
    gpus: Ranks, place: str, words: str
) -> None:
    """As NCCL does."""
    with pytest.raises(RankError, match=words):
        gpus.run(2, sum_on, place, backend="simulated_nccl")


def test_a_mixed_group_sums_in_host_memory_too(gpus: Ranks) -> None:
    """As "cpu:gloo,cuda:nccl" does."""
    answers = gpus.run(2, sum_on, "cpu", backend="simulated_mixed")
    assert [value for value, _ in answers] == [3.0, 3.0]


def ddp_backward(rank: int) -> list[float]:
    """Each rank has its own data."""
    model = nn.Linear(2, 1, bias=False).to(f"cuda:{rank}")
    nn.init.zeros_(model.weight)
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp(torch.full((1, 2), rank + 1.0, device=f"cuda:{rank}")).sum().backward()
    assert model.weight.grad is not None
    return [float(x) for x in model.weight.grad.flatten().tolist()]


def test_ddp_reduces_through_it(gpus: Ranks) -> None:
    """The mean of 1 and 2."""
    assert gpus.run(2, ddp_backward, backend="simulated_nccl") == [[1.5, 1.5], [1.5, 1.5]]


def scaled(rank: int) -> list[float]:
    """A bf16 tensor times 1.005: a number, and a tensor on the device in two ways."""
    values = torch.full((2,), 200.0, device="cuda:0", dtype=torch.bfloat16)
    factor = torch.tensor(1.005, device="cuda:0")
    together = [values.clone()]
    torch._foreach_mul_(together, factor)
    return [t[0].item() for t in (values * 1.005, values * factor, *together)]


def test_a_factor_on_the_device_is_rounded_to_the_dtype_of_the_tensor(gpus: Ranks) -> None:
    """1.005 is 1.0078125 in bf16."""
    assert gpus.run(1, scaled, backend=None) == [[201.0, 202.0, 202.0]]
