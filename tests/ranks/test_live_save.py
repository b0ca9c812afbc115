"""A save that is still being written when the step comes, on several ranks: it has the weights and
moments of its moment on each of them, and the run goes on as one that doesn't save."""

from __future__ import annotations

import shutil
import sys
import threading
import time
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
from accumplug.storage.layout import list_checkpoints

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

    def checkpointer(self, directory: Path, keep: int = 2) -> Checkpointer:
        return Checkpointer(directory, self.accum, model=self.model, keep=keep)

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


def give_up_first(rank: int, directory: Path) -> list[str]:
    """What is warned of where rank 0 gives a save up while rank 1 is still writing."""
    run, disk = Run(True), SlowDisk(2)
    with run.checkpointer(directory) as checkpoint, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.train(STEPS)
        checkpoint.save()
        run.train(STEPS)
        with disk.installed():
            handle = checkpoint.save(wait=False)
            assert disk.stopped.wait(10)
            dist.barrier()  # both have begun
            if rank == 0:
                for parameter in run.model.parameters():
                    parameter.data.to_local().mul_(2)
                disk.go_on()
                while not handle.done():
                    time.sleep(0.01)
            dist.barrier()
            disk.go_on()
            while not handle.done():
                time.sleep(0.01)
        run.train(1)
        saved = run.state()
        checkpoint.save()
    resumed = Run(True, seed=9)
    with resumed.checkpointer(directory) as checkpoint:
        checkpoint.resume()
    assert difference(resumed.state(), saved) is None
    return [str(warning.message) for warning in told]


def test_a_rank_that_is_still_writing_a_save_that_rank_0_gives_up_goes_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    """And never links its part of an older update for it."""
    first, second = ranks.run(2, give_up_first, tmp_path)
    assert any("was written to while it was being saved" in text for text in first)
    assert any("rank 0 has given this save up, and says why" in text for text in second)


def overwrite_and_wait(rank: int, directory: Path, writes: int) -> Any:
    """Where a resumed run differs, if rank `writes` writes into its shard during a `save()`."""
    run, disk = Run(True), SlowDisk(2)
    with run.checkpointer(directory, keep=9) as checkpoint, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.train(STEPS + 1)

        def write() -> None:
            assert disk.stopped.wait(10)
            if rank == writes:
                for parameter in run.model.parameters():
                    parameter.data.to_local().mul_(2)
            disk.go_on()

        thread = threading.Thread(target=write)
        thread.start()
        with disk.installed():
            path = checkpoint.save()
        thread.join()
        assert path.is_dir()
        saved = run.state()
        run.train(STEPS)
        checkpoint.save()
        run.train(1)
        checkpoint.save(wait=False)
    resumed = Run(True, seed=9)
    dist.barrier()
    for other in list_checkpoints(directory):
        if other != path and rank == 0:
            shutil.rmtree(other)
    dist.barrier()
    with resumed.checkpointer(directory) as checkpoint:
        checkpoint.resume()
    return difference(resumed.state(), saved)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("writes", [0, 1])
def test_ranks_that_wait_for_a_save_make_it_anew_together_if_one_of_them_gives_it_up(
    ranks: Ranks, world: int, writes: int, tmp_path: Path
) -> None:
    assert ranks.run(world, overwrite_and_wait, tmp_path, writes) == [None] * world
