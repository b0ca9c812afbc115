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

from accumplug import Accumulator
from accumplug.integrations.accelerate_state import refuse_lossy_saves

RUN = """
import sys, torch
from accelerate import Accelerator
from accumplug import Accumulator

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
