"""Checkpoints of fully_shard models inside of a window: each rank writes its own part."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from accumplug import Accumulator, Checkpointer
from accumplug.checkpoint.format import list_checkpoints

from .harness import Ranks

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from training import adamw, difference, momentum

STEPS = 3
EACH = {"every": 1, "keep": 99}
OPTIMIZERS = {"adamw": adamw, "momentum": momentum}


class Noisy(Dataset[Any]):
    """Samples with noise from the global generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return i / 20 + 0.1 * torch.randn(4), torch.tensor([i / 20])


class Net(nn.Module):
    """Dropout, a buffer, weights that three ranks can't divide evenly, and one of a single row."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(8, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """One number a sample."""
        self.calls += 1
        result: Tensor = self.head(self.norm(self.second(self.drop(self.first(x).relu()))).tanh())
        return result


@dataclass(frozen=True)
class Setup:
    """How a run is built; the same on each side of a stop."""

    optimizer: str = "adamw"
    half: bool = False
    """Compute in bf16 and add up in fp32."""
    scaled: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 2


@dataclass
class Told:
    """What a rank tells of its part of a run."""

    seen: list[Any]
    state: dict[str, Any]


class Run:
    """One rank's part of a run."""

    def __init__(self, rank: int, setup: Setup, seed: int) -> None:
        warnings.filterwarnings("ignore", message="deferring the reduction")
        self.setup = setup
        torch.manual_seed(seed)
        self.model = Net()
        policy = MixedPrecisionPolicy()
        if setup.half:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in (self.model.first, self.model.second):
            fully_shard(layer, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        torch.manual_seed(1000 * seed + rank)
        self.optimizer = OPTIMIZERS[setup.optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if setup.scaled else None
        self.accum = Accumulator(
            STEPS,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            max_grad_norm=1.0,
            **setup.options,
        )
        self.sampler: Any = DistributedSampler(Noisy(), seed=seed)
        self.loader = DataLoader(Noisy(), 2, sampler=self.sampler)
        self.seen: list[Any] = []

    def train(self, most: int | None = None) -> None:
        """Go on to the end, or until so many micro-batches have run here."""
        for epoch in range(self.accum.epoch, self.setup.epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.accum.batches(self.loader):
                with self.accum(self.model, weight=float(len(x) + self.accum.pending)):
                    loss = nn.functional.mse_loss(self.model(x).double(), y)
                    self.accum.backward(loss)
                self.seen.append((x.clone(), loss.item()))
                if len(self.seen) == most:
                    return

    def state(self) -> dict[str, Any]:
        """Everything that another process has to arrive at; shards as each rank has them."""
        accum, moments = self.accum, self.optimizer.state_dict()
        return {
            "model": {name: local(value) for name, value in self.model.state_dict().items()},
            "moments": {
                index: {name: local(value) for name, value in each.items()}
                for index, each in moments["state"].items()
            },
            "groups": moments["param_groups"],
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "counters": [accum.windows, accum.updates, accum.micro_batches, accum.epoch],
            "random": torch.get_rng_state(),
        }


def local(value: Any) -> Any:
    """A copy of this rank's part."""
    part = value.to_local() if hasattr(value, "to_local") else value
    return part.clone() if isinstance(part, Tensor) else part


def part(
    rank: int,
    setup: Setup,
    directory: Path | None,
    *,
    seed: int = 1,
    resume: bool = False,
    **options: Any,
) -> Told:
    """Run on this rank; from the newest checkpoint on if `resume`."""
    run = Run(rank, setup, seed)
    if directory is None:
        run.train()
        return Told(run.seen, run.state())
    with Checkpointer(
        directory, run.accum, model=run.model, loader=run.loader, **options
    ) as checkpoint:
        if resume:
            assert checkpoint.resume() is not None
        run.train()
    return Told(run.seen, run.state())


def go_on(ranks: Ranks, world: int, setup: Setup, checkpoint: Path, tmp_path: Path) -> list[Told]:
    """New ranks go on from `checkpoint`, as if it were the newest."""
    directory = tmp_path / f"after {checkpoint.name}"
    shutil.copytree(checkpoint, directory / checkpoint.name, copy_function=os.link)
    told: list[Told] = ranks.run(world, part, setup, directory, seed=55, resume=True)
    return told


def assert_same(quiet: list[Told], rest: list[Told], name: str) -> None:
    """The rest of a run is that of the quiet one, on each rank, to the last bit."""
    for rank, (one, other) in enumerate(zip(quiet, rest, strict=True)):
        count = len(one.seen) - len(other.seen)
        assert difference(one.seen[count:], other.seen, f"{name}, rank {rank}, seen") is None
        assert difference(one.state, other.state, f"{name}, rank {rank}, end") is None


SETUPS = {
    "last": Setup(),
    "every": Setup(options={"sync": "every"}),
    "last, momentum": Setup("momentum"),
    "every, momentum": Setup("momentum", options={"sync": "every"}),
    "last, half": Setup(half=True),
    "every, half": Setup(half=True, options={"sync": "every"}),
    "last, scaled": Setup(scaled=True),
}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
def test_each_micro_batch_of_a_sharded_run_is_a_place_to_go_on_from(
    ranks: Ranks, world: int, setup: Setup, tmp_path: Path
) -> None:
    """Shards of weights, moments and sums, the unsharded sums that each rank has while the
    reduction is deferred; and the run that saves is the one that doesn't."""
    quiet = ranks.run(world, part, setup, None)
    saving = ranks.run(world, part, setup, tmp_path / "all", **EACH)
    assert_same(quiet, saving, "saving")
    saved = list_checkpoints(tmp_path / "all")
    assert len(saved) == len(quiet[0].seen) == {1: 20, 2: 10, 3: 8}[world]
    for checkpoint in saved if setup in (SETUPS["last"], SETUPS["every"]) else saved[1::4]:
        assert_same(quiet, go_on(ranks, world, setup, checkpoint, tmp_path), checkpoint.name)
