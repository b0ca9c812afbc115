"""What the ranks tell each other, on each kind of group and whatever a rank's weights are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ranks.harness import Ranks
from torch import nn

from accumplug import Accumulator
from simulated_cuda.training import Case, gradient, network, train

NCCL = ["simulated_nccl", "simulated_mixed"]
WEIGHTS = ["none", "numbers", "cpu", "device"]
UNEVEN = Case(batches=True, sizes=((3, 1, 2, 4) * 3, (2, 5)))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("backend", NCCL)
@pytest.mark.parametrize("sync", ["last", "every"])
def test_a_rank_whose_data_end_takes_part_until_the_others_end(
    gpus: Ranks, backend: str, weights: str, sync: str
) -> None:
    """Three updates, each with the gradient of one big batch."""
    case = dataclasses.replace(UNEVEN, weights=weights, options={"sync": sync})
    for report in gpus.run(2, train, case, backend=backend):
        assert report.updates == 3
        assert max(report.errors) < 1e-12


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("backend", NCCL)
def test_a_rank_without_weight_in_a_window_adds_nothing(
    gpus: Ranks, backend: str, weights: str
) -> None:
    """The other rank's window is the whole one."""
    case = Case(weights=weights, empty=(1,))
    for report in gpus.run(2, train, case, backend=backend):
        assert report.updates == 3
        assert max(report.errors) < 1e-12


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("backend", NCCL)
def test_a_window_without_weight_on_any_rank_is_no_update(
    gpus: Ranks, backend: str, weights: str
) -> None:
    """Two updates and one window that was skipped."""
    case = Case(weights=weights, empty=(0, 1))
    for report in gpus.run(2, train, case, backend=backend):
        assert (report.updates, report.skipped) == (2, 1)
        assert max(report.errors) < 1e-12


@pytest.mark.parametrize("backend", NCCL)
def test_each_rank_may_give_its_weights_as_it_likes(gpus: Ranks, backend: str) -> None:
    """Numbers on one rank, device tensors on the other; the total is the same on both."""
    reports = gpus.run(2, mixed_weights, backend=backend)
    assert reports[0] == reports[1]
    assert reports[0] == pytest.approx((2.0 * 4 + 3.0 * 4, 1.0), rel=1e-12)


def mixed_weights(rank: int) -> tuple[float, float]:
    """Total weight, and the gradient of a model whose loss is its parameter."""
    torch.cuda.set_device(rank)
    model = nn.Linear(1, 1, bias=False).to(f"cuda:{rank}")
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accum = Accumulator(4, optimizer=optimizer)
    seen: list[torch.Tensor] = []
    accum.on_update(lambda: seen.append(gradient(model)))
    for _ in range(4):
        weight = torch.tensor(3.0, device="cuda:1") if rank else 2.0
        with accum(ddp, weight=weight):
            accum.backward(ddp(torch.ones(1, 1, device=f"cuda:{rank}")).sum())
    return accum.last.weight, seen[0].item()


def skip_or_flush(rank: int, how: str) -> tuple[int, list[float]]:
    """Rank 1 skips all micro-batches of the second window, or has none when both flush."""
    torch.cuda.set_device(rank)
    model = network(torch.float64).to(f"cuda:{rank}")
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accum = Accumulator(4, optimizer=optimizer)
    seen: list[torch.Tensor] = []
    accum.on_update(lambda: seen.append(gradient(model)))
    for _ in range(4):
        with accum(ddp):
            accum.backward(ddp(torch.zeros(3, 8, device=f"cuda:{rank}")).square().mean())
    for _ in range(4 if how == "skip" else 2):
        if rank == 1 and how == "flush":
            continue
        with accum(ddp) as micro:
            if rank == 1:
                micro.skip()
            else:
                accum.backward(ddp(torch.ones(3, 8, device="cuda:0")).square().mean())
    if how == "flush":
        accum.flush()
    return accum.updates, seen[1].tolist()


@pytest.mark.parametrize("how", ["skip", "flush"])
@pytest.mark.parametrize("backend", NCCL)
def test_a_rank_may_have_nothing_in_a_window(gpus: Ranks, backend: str, how: str) -> None:
    """It takes part in the update of the other one."""
    (updates, one), (_, other) = gpus.run(2, skip_or_flush, how, backend=backend)
    model = network(torch.float64)
    model(torch.ones(3, 8, dtype=torch.float64)).square().mean().backward()
    assert updates == 2
    assert one == other == pytest.approx(gradient(model).tolist(), rel=1e-12)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("backend", NCCL)
def test_sums_are_made_on_the_models_device(gpus: Ranks, backend: str, weights: str) -> None:
    """Not on the current one, which is cuda:0 on all ranks without torch.cuda.set_device."""
    case = Case(weights=weights, set_device=False, batches=True)
    for rank, report in enumerate(gpus.run(2, train, case, backend=backend)):
        assert max(report.errors) < 1e-12
        assert {c.device for c in report.collectives} <= {f"cuda:{rank}", "cpu"}


LOOPS = {
    "plain": Case(),
    "batches": Case(batches=True),
    "every": Case(options={"sync": "every"}),
    "skip_micro_batch": Case(options={"nonfinite": "skip_micro_batch"}),
    "noise scale": Case(noise=True),
    "loop steps": Case(loop_steps=True),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("backend", NCCL)
def test_a_window_has_two_small_collectives(gpus: Ranks, backend: str, loop: str) -> None:
    """One in host memory and one on the device, whatever knows the weights."""
    for weights in WEIGHTS:
        case = dataclasses.replace(LOOPS[loop], weights=weights)
        for report in gpus.run(2, train, case, backend=backend):
            assert len(report.small) == 2 * 2, weights
            assert max(report.errors) < 1e-12


@pytest.mark.parametrize("weights", ["numbers", "cpu", "device"])
def test_a_look_ahead_needs_a_third_for_weights_on_the_device(gpus: Ranks, weights: str) -> None:
    """They are summed when the window opens, its losses when it closes; 6 numbers are agreed on
    in host memory, the last time that there is no other window."""
    case = Case(weights=weights, weigh=True)
    for report in gpus.run(2, train, case, backend="simulated_nccl"):
        assert report.small == [1, 6, *([1] if weights == "device" else []), 1, 6]
        assert max(report.errors) < 1e-12
