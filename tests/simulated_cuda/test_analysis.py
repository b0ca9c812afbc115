"""The check, the sweep and the trial of sizes, with models on the simulated devices."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch
from ranks.harness import Ranks
from torch import nn

from accumplug import equivalence_check, sweep_effective_batches, train_one_optimizer_step
from accumplug.analysis.memory_fit import rank_device
from accumplug.cli.parser import main

CRITERION = nn.CrossEntropyLoss()


def classifier(device: str) -> nn.Module:
    torch.manual_seed(0)
    first, last = nn.Linear(6, 8, dtype=torch.float32), nn.Linear(8, 3, dtype=torch.float32)
    return nn.Sequential(first, nn.Tanh(), last).to(device)


def batch(device: str, items: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(items, 6, generator=generator, dtype=torch.float32)
    targets = torch.randint(0, 3, (items,), generator=generator)
    targets[:5] = -100
    return inputs.to(device), targets.to(device)


def checked(rank: int, products: bool, device: str) -> tuple[bool, float, str, list[str]]:
    """The check of a model on a device, with TF32 in matrix products or without."""
    torch.backends.cuda.matmul.allow_tf32 = products
    try:
        result = equivalence_check(classifier(device), batch(device), CRITERION)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    return result.passed, result.bound, result.precision, str(result).splitlines()


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_the_check_on_cuda_follows_tf32_and_prints_the_settings(gpus: Ranks, device: str) -> None:
    """Labels of -100 are found there, too."""
    [(passed, bound, precision, lines)] = gpus.run(1, checked, False, device, backend=None)
    assert (passed, bound, precision) == (True, 1e-4, "float32")
    assert lines[3].startswith("settings: TF32 in matrix products off, in cuDNN convolutions ")
    assert any("mean over the 7 targets that are not -100" in line for line in lines)
    [(passed, bound, precision, lines)] = gpus.run(1, checked, True, device, backend=None)
    assert (passed, bound, precision) == (True, 4 * 2.0**-10, "TF32")
    assert lines[3].startswith("settings: TF32 in matrix products on")


def stepped(rank: int) -> tuple[float, list[float]]:
    """One window over two ranks; the loss and the weights after it."""
    device = f"cuda:{rank}"
    torch.cuda.set_device(rank)
    model = classifier(device)
    inputs, targets = batch("cpu")
    mine = [
        (inputs[i : i + 3].to(device), targets[i : i + 3].to(device))
        for i in range(6 * rank, 6 * rank + 6, 3)
    ]
    step = train_one_optimizer_step(
        model, torch.optim.SGD(model.parameters(), lr=0.5), mine, CRITERION
    )
    assert (step.syncs, step.stepped) == (1, True)
    return step.loss, torch.cat([p.detach().cpu().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("backend", ["simulated_mixed", "simulated_nccl"])
def test_one_step_over_two_devices_is_that_of_all_targets(gpus: Ranks, backend: str) -> None:
    """The first rank has one target, in its second micro-batch; the other one has six."""
    found = gpus.run(2, stepped, backend=backend)
    model, (inputs, targets) = classifier("cpu"), batch("cpu")
    loss = CRITERION(model(inputs), targets)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    for told, own in found:
        assert told == pytest.approx(float(loss.detach()), rel=1e-5)
        torch.testing.assert_close(torch.tensor(own, dtype=torch.float32), weights)


def swept(rank: int) -> list[tuple[int, float]]:
    device = f"cuda:{rank}"
    torch.cuda.set_device(rank)
    micro_batches = [batch(device, 6)] * 2
    curve = sweep_effective_batches(
        classifier(device),
        micro_batches,
        CRITERION,
        accum_steps=(1, 2),
        num_steps=3,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        output_dir=None,
    )
    return [(row.effective_batch, row.sync_calls) for row in curve.rows]


def test_a_sweep_over_two_devices_counts_its_reductions(gpus: Ranks) -> None:
    """Times come from events on the device."""
    assert gpus.run(2, swept, backend="simulated_nccl") == [[(12, 1.0), (24, 1.0)]] * 2


TARGET = """
import torch
from torch import nn


def parts():
    holds = (9, 5)[torch.cuda.current_device()]

    def loss(model, batch):
        if len(batch) > holds:
            raise torch.OutOfMemoryError("pretended")
        return model(batch).mean()

    return nn.Linear(3, 1).cuda(), torch.ones(2, 3).cuda(), loss
"""


def planned(rank: int, folder: str) -> tuple[int, str, str]:
    """`accumplug plan --fit` as a launcher starts it; and the device that the rank has then."""
    if not hasattr(stream := type(torch.accelerator.current_stream()), "is_capturing"):
        stream.is_capturing = lambda _: False  # AdamW asks; a stream of CUDA has it
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = main(["plan", "64", "--fit", f"{folder}/target.py:parts"])
        return code, said.getvalue(), str(rank_device())
    finally:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
        torch.cuda.set_device(0)


def test_plan_fit_tries_each_ranks_own_device(gpus: Ranks, tmp_path: Path) -> None:
    """cuda:0 holds 8 of the 32 items, cuda:1 holds 4: all take 4."""
    (tmp_path / "target.py").write_text(TARGET)
    found = gpus.run(2, planned, str(tmp_path), backend="gloo")
    answer = "steps 8: 4 items x 8 micro-batches x 2 ranks = 64 items\n"
    assert found == [(0, answer, "cuda:0"), (0, "", "cuda:1")]
