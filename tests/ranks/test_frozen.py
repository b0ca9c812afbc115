"""Frozen weights are linked from update to update by each rank that has written them."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from accumplug import Accumulator, Checkpointer
from accumplug.storage.layout import faults, list_checkpoints, open_checkpoint

from .harness import Ranks

TOTAL = 6  # micro-batches of a window on all ranks


class Samples(Dataset[Any]):
    """24 micro-batches of two."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Tensor:
        return torch.arange(6) * 0.1 + (i % 7) / 7


class Adapted(nn.Module):
    """Two frozen layers, one with a single row, and what is trained beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.norm = nn.Linear(6, 1)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)
        for layer in (self.base, self.norm):
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """One number a sample."""
        result: Tensor = self.norm((self.base(x) + self.up(self.down(x))).tanh())
        return result


def adapt(
    rank: int, kind: str, directory: Path, resume: bool = False, until: int = 99, **options: Any
) -> dict[str, Tensor]:
    """Train on this rank, with a save after each micro-batch; the weights."""
    warnings.filterwarnings("ignore", message="deferring the reduction")
    torch.manual_seed(1 + resume)
    model: nn.Module = Adapted()
    if kind == "sharded":
        for module in (model.base, model.down, model):
            fully_shard(module)
    else:
        model = DistributedDataParallel(model)
    held = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(held, 0.05, momentum=0.9)
    accum = Accumulator(TOTAL // dist.get_world_size(), optimizer=optimizer)
    loader = DataLoader(Samples(), 2, sampler=DistributedSampler(Samples(), shuffle=False))
    options |= {"model": model, "loader": loader, "every": 1, "keep": 99}
    with Checkpointer(directory, accum, **options) as checkpoint:
        if resume:
            assert checkpoint.resume() is not None
        for x in accum.batches(loader):
            with accum(model):
                accum.backward(model(x.double()).square().mean())
            if accum.micro_batches == until:
                break
    state = getattr(model, "module", model).state_dict()
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_frozen_weights_are_one_file_for_all_checkpoints(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    """On each rank that writes them, across updates and a resume; all others are whole too."""
    quiet = ranks.run(2, adapt, kind, tmp_path / "quiet")
    ranks.run(2, adapt, kind, tmp_path / "run", until=7)
    rest = ranks.run(2, adapt, kind, tmp_path / "run", resume=True)
    for ours, theirs in zip(quiet, rest, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    found = list_checkpoints(tmp_path / "run")
    assert len(found) == 12
    assert all(list(faults(open_checkpoint(path))) == [] for path in found)
    names = {f.name for f in found[0].glob("frozen*.safetensors")}
    own = {f"frozen-{rank}.safetensors" for rank in (0, 1)}
    assert names == (own if kind == "sharded" else {"frozen.safetensors"})
    for name in names:
        assert all((path / name).samefile(found[0] / name) for path in found)
        assert all(open_checkpoint(path).manifest.files[name].linked for path in found[1:])


@pytest.mark.parametrize(
    ("kind", "world"), [("ddp", 1), ("ddp", 3), ("sharded", 1), ("sharded", 3)]
)
def test_another_number_of_ranks_has_the_frozen_weights_of_the_checkpoint(
    ranks: Ranks, kind: str, world: int, tmp_path: Path
) -> None:
    """Not those that its processes have drawn; then each rank writes its own anew."""
    quiet = ranks.run(2, adapt, kind, tmp_path / "all")[0]
    saved = next(
        path
        for path in list_checkpoints(tmp_path / "all")
        if open_checkpoint(path).manifest.position["micro_batch"] == 6
    )
    shutil.copytree(saved, tmp_path / "other" / saved.name)
    for found in ranks.run(world, adapt, kind, tmp_path / "other", resume=True):
        for name, weight in quiet.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-12)
    assert all(
        list(faults(open_checkpoint(path))) == [] for path in list_checkpoints(tmp_path / "other")
    )


def adapt_on_base(rank: int, kind: str, directory: Path, other: int, **options: Any) -> str:
    """Resume a checkpoint without frozen weights, rank `other` on other ones; what is said."""
    seed = torch.manual_seed

    def same(_: int) -> Any:
        return seed(1 + (rank == other))

    torch.manual_seed = same  # type: ignore[assignment]
    try:
        adapt(rank, kind, directory, resume=True, frozen="skip")
    except ValueError as error:
        return str(error)
    finally:
        torch.manual_seed = seed
    return ""


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_all_ranks_refuse_frozen_weights_that_are_others_on_one(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    """Where they are left out; with the same ones the resume is exact."""
    quiet = ranks.run(2, adapt, kind, tmp_path / "quiet")
    ranks.run(2, adapt, kind, tmp_path / "run", until=7, frozen="skip")
    found = list_checkpoints(tmp_path / "run")
    assert all(not list(path.glob("frozen*")) for path in found)
    assert found
    if kind == "sharded":
        said = ranks.run(2, adapt_on_base, kind, tmp_path / "run", 1)
        assert "base.weight is " in said[1]
        assert "see another rank" in said[0]
    assert ranks.run(2, adapt_on_base, kind, tmp_path / "run", -1) == ["", ""]
    whole = list_checkpoints(tmp_path / "run")
    assert len(whole) == 12
    shutil.copytree(whole[-1], tmp_path / "last" / whole[-1].name)
    rest = ranks.run(2, adapt_finished, kind, tmp_path / "last")
    for ours, theirs in zip(quiet, rest, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def adapt_finished(rank: int, kind: str, directory: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint at the end of the data."""
    seed = torch.manual_seed
    torch.manual_seed = lambda _: seed(1)  # type: ignore[assignment]
    try:
        return adapt(rank, kind, directory, resume=True, frozen="skip", until=0)
    finally:
        torch.manual_seed = seed
