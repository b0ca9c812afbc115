"""fully_shard with CPUOffloadPolicy: shards and their gradients are in host memory, and forward and
backward run on the device."""

from __future__ import annotations

import warnings

import pytest
import torch
from ranks.harness import RankError, Ranks
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from accumplug import Accumulator
from simulated_cuda.training import WIDTH, gradient, network

SIZES = ((3, 1, 2, 4) * 2, (2, 5, 1, 3) * 2)
STEPS, CLIP = 4, 0.01


def rows(rank: int) -> list[Tensor]:
    """The micro-batches of a rank, in host memory."""
    generator = torch.Generator().manual_seed(rank)
    options = {"generator": generator, "dtype": torch.float64}
    return [torch.randn(n, WIDTH, **options) for n in SIZES[rank]]


def train(rank: int, sync: str, weights: str, how: str) -> list[Tensor]:
    """The gradient of each window, whole and in host memory; the learning rate is 0."""
    torch.cuda.set_device(rank)
    model = network(torch.float64).to(f"cuda:{rank}")
    for layer in (model[0], model[2], model):
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    warnings.filterwarnings("ignore", "deferring the reduction", UserWarning)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0) if how == "scaler" else None
    clip = CLIP if how == "clip" else None
    accum = Accumulator(STEPS, optimizer=optimizer, sync=sync, max_grad_norm=clip, scaler=scaler)
    found: list[Tensor] = []

    def keep() -> None:
        assert all(p.grad.device.type == "cpu" for p in model.parameters())
        found.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))

    accum.on_update(keep)
    for x in rows(rank):
        weight = torch.tensor(len(x), device=f"cuda:{rank}") if weights == "device" else len(x)
        with accum(model, weight=weight):
            accum.backward(model(x.to(f"cuda:{rank}")).square().mean())
    assert accum.updates == 2
    assert accum.last.loss > 0
    assert accum.last.weight == sum(map(sum, (s[STEPS:] for s in SIZES)))
    return found


@pytest.mark.parametrize("how", ["plain", "clip", "scaler"])
@pytest.mark.parametrize("weights", ["numbers", "device"])
@pytest.mark.parametrize("sync", ["last", "every"])
def test_offloaded_shards_have_the_gradient_of_one_big_batch(
    gpus: Ranks, sync: str, weights: str, how: str
) -> None:
    """The group reduces on devices and in host memory, as torch asks for."""
    ranks = gpus.run(2, train, sync, weights, how, backend="simulated_mixed")
    for window in range(2):
        part = slice(window * STEPS, (window + 1) * STEPS)
        model = network(torch.float64)
        model(
            torch.cat([x for rank in (0, 1) for x in rows(rank)[part]])
        ).square().mean().backward()
        want = gradient(model)
        if how == "clip":
            want *= CLIP / (want.norm() + 1e-6)
        for found in ranks:
            assert float((found[window] - want).norm() / want.norm()) < 1e-12


def test_a_group_that_reduces_on_devices_only_is_named_as_too_little(gpus: Ranks) -> None:
    """The norm of gradients in host memory is summed there, by torch itself."""
    with pytest.raises(RankError, match="No backend type associated with device type cpu"):
        gpus.run(2, train, "last", "numbers", "plain", backend="simulated_nccl")
