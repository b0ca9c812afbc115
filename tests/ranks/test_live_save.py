"""A save that is still being written when the step comes, on several ranks: it has the weights and
moments of its moment on each of them, and the run goes on as one that doesn't save."""

from __future__ import annotations

import sys
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator, Checkpointer

from .harness import Ranks

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from slow_disk import SlowDisk
from training import difference

STEPS = 3


class Run:
    """A model that is replicated or sharded, with accum's step."""

    def __init__(self, sharded: bool, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))
        warnings.filterwarnings("ignore", message="deferring the reduction")
        self.model: nn.Module
        if sharded:
            self.model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        else:
            self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.accum = Accumulator(STEPS, optimizer=self.optimizer)

    def checkpointer(self, directory: Path) -> Checkpointer:
        return Checkpointer(directory, self.accum, model=self.model)

    def train(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            with self.accum(self.model):
                self.accum.backward(self.model(torch.randn(2, 4)).square().mean())

    def state(self) -> Any:
        state = [self.model.state_dict(), self.optimizer.state_dict()["state"]]
        return deepcopy(plain([*state, self.accum.updates, self.accum.pending]))


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to_local() if isinstance(value, DTensor) else value
    if isinstance(value, dict):
        return {
            key.removeprefix("module.") if isinstance(key, str) else key: plain(item)
            for key, item in value.items()
        }
    return [plain(item) for item in value] if isinstance(value, list) else value


def save_while_it_steps(rank: int, directory: Path, sharded: bool, pieces: int) -> list[Any]:
    """Where the resumed run differs from what was saved, and the run from one that doesn't save."""
    torch.set_default_dtype(torch.float32)
    run, alone = Run(sharded), Run(sharded)
    for each in (run, alone):
        torch.manual_seed(rank)
        each.train(STEPS + 1)
    disk = SlowDisk(pieces)
    with run.checkpointer(directory) as checkpoint, disk.installed():
        saved = run.state()
        handle = checkpoint.save(wait=False)
        if sharded or rank == 0:
            assert disk.stopped.wait(10)
        for each in (run, alone):
            torch.manual_seed(10 + rank)
            each.train(STEPS)
        copied = checkpoint._snapshot._live.copied
        disk.go_on()
        handle.result()
        differs = difference(run.state(), alone.state())
    resumed = Run(sharded, seed=9)
    with resumed.checkpointer(directory) as checkpoint, SlowDisk(999).installed():
        checkpoint.resume()
    return [difference(resumed.state(), saved), differs, copied > 0]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "fully_shard"])
@pytest.mark.parametrize("pieces", [0, 6, 12])
def test_a_step_during_the_write_changes_nothing_of_what_the_ranks_save(
    ranks: Ranks, world: int, sharded: bool, pieces: int, tmp_path: Path
) -> None:
    results = ranks.run(world, save_while_it_steps, tmp_path, sharded, pieces)
    assert results == [[None, None, sharded or rank == 0] for rank in range(world)]


def overwrite(rank: int, directory: Path, writes: int) -> list[str]:
    """What is warned of where rank `writes` writes into its shard while it is being saved."""
    run, disk = Run(True), SlowDisk(2)
    seen: list[str] = []
    with run.checkpointer(directory) as checkpoint:
        run.train(STEPS)
        with disk.installed():
            handle = checkpoint.save(wait=False)
            assert disk.stopped.wait(10)
            if rank == writes:
                for parameter in run.model.parameters():
                    parameter.data.to_local().mul_(2)
            disk.go_on()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    handle.result()
                except RuntimeError as error:
                    seen.append(str(error))
                run.train(STEPS)
            seen += [str(warning.message) for warning in told]
        dist.barrier()
        checkpoint.save()
    return seen


@pytest.mark.parametrize("writes", [0, 1])
def test_a_rank_that_writes_into_its_shard_gives_the_save_up_and_no_run(
    ranks: Ranks, writes: int, tmp_path: Path
) -> None:
    """The next save has copies, and becomes a checkpoint."""
    results = ranks.run(2, overwrite, tmp_path, writes)
    for rank in {0, writes}:
        raised, *warned = results[rank]
        assert "was written to while it was being saved" in raised
        assert any("from now on weights are copied" in text for text in warned)
    assert len(list(tmp_path.glob("update-*"))) == 1
