"""accelerator.save_state and load_state inside of a window carry its gradients and counters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import fsdp_utils
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from accumplug import Accumulator, NoiseScale
from accumplug.integrations.accelerate_state import refuse_lossy_saves

RUN = """
import sys, torch
from accelerate import Accelerator
from accumplug import Accumulator, NoiseScale

folder, start, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
accum = Accumulator(4, accelerator=accelerator)
data = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in range(1, 11)]
if start:
    accelerator.load_state(folder)
    assert accum.pending == start % 4, accum.pending
for x in data[start:stop]:
    with accum(model, weight=len(x)):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
if stop < len(data):
    accelerator.save_state(folder)
else:
    torch.save([list(model.parameters()), accum.updates, accum.last.loss], folder + "/end.pt")
"""


def run(folder: Path, start: int, stop: int) -> None:
    """A part of the training in a process of its own."""
    folder.mkdir(exist_ok=True)
    subprocess.run(
        [sys.executable, "-c", RUN, str(folder), str(start), str(stop)], check=True, timeout=120
    )


@pytest.mark.parametrize("at", [2, 5])
def test_a_loop_goes_on_in_the_middle_of_a_window(tmp_path: Path, at: int) -> None:
    """Bit for bit what the run that was not stopped ends with."""
    run(tmp_path / "whole", 0, 10)
    run(tmp_path / "parts", 0, at)
    run(tmp_path / "parts", at, 10)
    ours, theirs = (torch.load(tmp_path / n / "end.pt") for n in ("parts", "whole"))
    for got, expected in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(got, expected)
    assert ours[1:] == theirs[1:]


def test_a_checkpoint_without_a_window_still_loads(tmp_path: Path) -> None:
    """One that was written without accumplug leaves no window, and no stale gradient."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.save_state(str(tmp_path))
    accum = Accumulator(4, accelerator=accelerator)
    with accum(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.load_state(str(tmp_path))
    assert accum.pending == 0
    assert model.weight.grad is None


def test_a_save_that_loses_the_optimizer_of_a_sharded_model_is_refused(monkeypatch):
    """As by Accelerate 1.12 and before; known by what its function asks torch for."""

    def asks_torch():
        return get_optimizer_state_dict

    def asks_the_optimizer(optimizer):
        return optimizer.state_dict()

    monkeypatch.setattr(fsdp_utils, "save_fsdp_optimizer", asks_torch)
    refuse_lossy_saves()
    monkeypatch.setattr(fsdp_utils, "save_fsdp_optimizer", asks_the_optimizer)
    with pytest.raises(RuntimeError, match="loses the optimizer's state .* Accelerate 1.13"):
        refuse_lossy_saves()


def two(folder: Path, resume: bool, hooks: int = 0, made: str = "both") -> list[torch.Tensor]:
    """Two Accumulators over two models of one Accelerator; saved in the middle of both windows.

    `hooks`: how many hooks the loop itself has registered before; `made`: the Accumulators that
    are there when the state is loaded.
    """
    torch.manual_seed(5 if resume else 0)
    accelerator = Accelerator(cpu=True)
    nets = [torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets]
    nets, optimizers = accelerator.prepare(*nets), accelerator.prepare(*optimizers)
    for _ in range(hooks):
        accelerator.register_save_state_pre_hook(lambda models, weights, directory: None)
    accums = []
    for index in range(2):
        if resume and index == {"both": 2, "one": 1, "none": 0}[made]:
            accelerator.load_state(folder)
        accums.append(Accumulator(3 + index, accelerator=accelerator))
    if resume and made == "both":
        accelerator.load_state(folder)
    data = [torch.full((2, 2), float(n)) for n in range(1, 13)]
    for index, x in enumerate(data):
        if index < 5 and resume:
            continue
        if index == 5 and not resume:
            accelerator.save_state(folder)
        for which, (accum, net) in enumerate(zip(accums, nets, strict=True)):
            inputs = x if which == 0 else nets[0](x).detach()
            with accum(net):
                accelerator.backward(net(inputs).square().mean())
                optimizers[which].step()
                optimizers[which].zero_grad()
    return [p.detach().clone() for net in nets for p in net.parameters()]


def test_two_accumulators_go_on_each_in_its_own_window(tmp_path: Path) -> None:
    """Also where the loop has registered hooks of its own since."""
    whole = two(tmp_path, resume=False)
    assert all(map(torch.equal, two(tmp_path, resume=True), whole))
    assert all(map(torch.equal, two(tmp_path, resume=True, hooks=2), whole))


@pytest.mark.parametrize("made", ["none", "one"])
def test_a_window_whose_accumulator_is_made_after_load_state_is_refused(
    tmp_path: Path, made: str
) -> None:
    """Never dropped without a word."""
    two(tmp_path, resume=False)
    message = {"none": "after 1 micro-batches.* before accel", "one": "accumplug-1.* before load"}
    with pytest.raises(RuntimeError, match=message[made]):
        two(tmp_path, resume=True, made=made)


def test_an_accumulator_may_be_made_after_load_state_where_no_window_was_open(
    tmp_path: Path,
) -> None:
    """And after the first block of one that had been there."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accum = Accumulator(2, accelerator=accelerator)
    accelerator.save_state(tmp_path / "between")
    with accum(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.save_state(tmp_path / "inside")
    accelerator.load_state(tmp_path / "between")
    Accumulator(2, accelerator=accelerator)
    accelerator.load_state(tmp_path / "inside")
    with accum(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    assert (accum.windows, accelerator.step) == (1, 0)
    Accumulator(2, accelerator=accelerator)


def test_a_save_over_that_of_more_accumulators_leaves_none_of_their_windows(
    tmp_path: Path,
) -> None:
    """A directory that is used again."""
    two(tmp_path, resume=False)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))
    accum = Accumulator(2, accelerator=accelerator)
    for old in tmp_path.glob("[!a]*"):  # what Accelerate itself would refuse
        old.unlink()
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert accum.pending == 0


def test_a_window_over_a_model_that_was_not_prepared_is_not_saved(tmp_path: Path) -> None:
    """load_state would know nothing of it."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))
    accum, model = Accumulator(2, accelerator=accelerator), torch.nn.Linear(2, 1)
    with accum(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(RuntimeError, match=r"weight of Linear is in no model that .*prepare"):
        accelerator.save_state(tmp_path)


def test_the_noise_scale_of_an_open_window_is_taken_along(tmp_path: Path) -> None:
    """The norm of its first micro-batch."""
    found = []
    for resume in (False, True):
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        accum = Accumulator(2, accelerator=accelerator)
        accum.noise_scale = NoiseScale()
        if resume:
            accelerator.load_state(tmp_path)
        for x in (torch.ones(1, 2), torch.eye(2))[accum.pending :]:
            with accum(model):
                accelerator.backward(model(x).square().sum())
                optimizer.step()
                optimizer.zero_grad()
            if accum.pending and not resume:
                accelerator.save_state(tmp_path)
        found.append(accum.noise_scale.state_dict())
    assert found[0] == found[1]
    assert found[0] != NoiseScale().state_dict()
