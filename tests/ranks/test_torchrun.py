"""Whole runs as a user starts them: torchrun on loopback, with processes that end by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .reference import big_batches, error, items, windows_of

PLAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from accumplug import Accumulator
from ranks.reference import items, loss, net, sgd

torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
assert dist.get_world_size() == 2
model = DistributedDataParallel(net())
accum = Accumulator(2, optimizer=sgd(model.parameters()))
for item in accum.batches(items(dist.get_rank(), [3, 8, 1, 5, 2][: 5 - 3 * dist.get_rank()])):
    with accum(model, weight=len(item[0])):
        accum.backward(loss(model, item))
torch.save([p.detach() for p in model.parameters()], f"{dist.get_rank()}.pt")
del model
dist.destroy_process_group()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from accumplug import Accumulator
from ranks.reference import items, loss, net, sgd

torch.set_default_dtype(torch.float64)
accelerator = Accelerator()
rank = accelerator.process_index
assert accelerator.num_processes == 2
bare = net()
model, optimizer = accelerator.prepare(bare, sgd(bare.parameters()))
accum = Accumulator(2, accelerator=accelerator)
for item in accum.batches(items(rank, [3, 8, 1, 5, 2][: 5 - 3 * rank])):
    with accum(model, weight=len(item[0])):
        accelerator.backward(loss(model, item))
        optimizer.step()
        optimizer.zero_grad()
torch.save([p.detach() for p in model.parameters()], f"{rank}.pt")
del model
accelerator.end_training()
"""


@pytest.mark.parametrize("script", [PLAIN, ACCELERATE], ids=["plain", "Accelerate"])
def test_a_run_of_uneven_data_ends(script: str, tmp_path: Path) -> None:
    """Five and two micro-batches; both ranks have the weights of one process, and exit."""
    tmp_path.joinpath("run.py").write_text(script)
    tests = str(Path(__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    subprocess.run(
        [*launcher, "--standalone", "run.py"],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=120,
        capture_output=True,
    )
    data = [items(0, [3, 8, 1, 5, 2]), items(1, [3, 8])]
    _, weights = big_batches(windows_of(data, 2))
    for rank in range(2):
        assert error(torch.load(tmp_path / f"{rank}.pt", weights_only=True), weights) <= 1e-13
