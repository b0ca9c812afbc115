"""A run on several ranks that is saved and gone on from, as each rank executes it."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from accumplug import Accumulator, Checkpointer
from accumplug.checkpoint import coordination
from accumplug.checkpoint.coordination import LOOK, SaveCounts
from accumplug.storage.layout import list_checkpoints

STEPS = 3


@dataclass(frozen=True)
class Setup:
    """How a run is built; the same on each side of a stop."""

    dtype: torch.dtype = torch.float32
    unused: bool = False
    """Ranks use a second head at different times (find_unused_parameters)."""
    sizes: tuple[int, ...] | None = None
    """Micro-batches of each rank; else a DistributedSampler deals them out evenly."""
    weigh: bool = False
    gathers: bool = False
    """The loop has a collective of its own in each micro-batch."""
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 2


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return i / 23 + 0.1 * torch.randn(4) + random.random(), torch.tensor([i / 23])


class Uneven:
    """As many micro-batches as each rank has."""

    def __init__(self, rank: int, sizes: tuple[int, ...]) -> None:
        self.rank, self.size = rank, sizes[rank]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(self.size):
            generator = torch.Generator().manual_seed(100 * self.rank + i)
            yield torch.randn(3, 4, generator=generator), torch.randn(3, 1)


class Net(nn.Module):
    """Dropout, buffers that differ between ranks, and gradients in several of DDP's buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.ReLU())
        self.wide = nn.Linear(64, 64)
        self.head, self.other = nn.Linear(64, 1), nn.Linear(64, 1)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        hidden = self.wide(self.inner(x)).relu()
        result: Tensor = self.head(hidden)
        return result + self.other(hidden) if both else result


class Run:
    """One rank's part of a run."""

    def __init__(self, rank: int, setup: Setup, seed: int) -> None:
        warnings.filterwarnings("ignore", message="BatchNorm sees micro-batches")
        self.rank, self.setup = rank, setup
        torch.manual_seed(seed)
        self.net = Net().to(setup.dtype)
        self.model = DistributedDataParallel(
            self.net, find_unused_parameters=setup.unused, bucket_cap_mb=0.02
        )
        torch.manual_seed(1000 * seed + rank)
        random.seed(1000 * seed + rank)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.accum = Accumulator(
            STEPS,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            max_grad_norm=1.0,
            **setup.options,
        )
        self.sampler = None
        self.loader: Any
        if setup.sizes is not None:
            self.loader = Uneven(rank, setup.sizes)
        else:
            self.sampler = DistributedSampler(Noisy(), seed=seed)
            self.loader = DataLoader(Noisy(), 2, sampler=self.sampler)
        self.seen: list[Any] = []

    def train(
        self,
        checkpoint: Checkpointer | None,
        signal_at: tuple[int, int] | None = None,
        pause: float = 0.0,
    ) -> None:
        """Go on to the end. `signal_at`: a rank, and its micro-batch in which it gets a signal."""
        weigh = {"weigh": lambda item: float(len(item[0]))} if self.setup.weigh else {}
        for epoch in range(self.accum.epoch, self.setup.epochs):
            if self.sampler is not None:
                self.sampler.set_epoch(epoch)
            for x, y in self.accum.batches(self.loader, **weigh):
                time.sleep(pause)
                if signal_at == (self.rank, len(self.seen) + 1):
                    os.kill(os.getpid(), signal.SIGUSR1)
                self.block(x.to(self.setup.dtype), y.to(self.setup.dtype))
                if self.setup.gathers:
                    dist.all_reduce(torch.ones(1))
            if checkpoint is not None and checkpoint.interrupted:
                break

    def block(self, x: Tensor, y: Tensor) -> None:
        both = not self.setup.unused or self.accum.micro_batches % 4 == self.rank
        with self.accum(self.model, weight=float(len(x))):
            loss = nn.functional.mse_loss(self.model(x, both), y)
            self.accum.backward(loss)
        self.seen.append((x.clone(), loss.item()))

    def state(self) -> dict[str, Any]:
        accum = self.accum
        return {
            "model": {name: value.clone() for name, value in self.net.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "counters": [accum.windows, accum.updates, accum.micro_batches, accum.epoch],
            "random": [torch.get_rng_state(), random.getstate()],
        }


@dataclass
class Told:
    """What a rank tells of its part."""

    state: dict[str, Any]
    seen: list[Any]
    interrupted: bool
    paths: list[Path]
    passed: tuple[str, ...]


def part(
    rank: int,
    setup: Setup,
    directory: Path | None,
    *,
    seed: int = 1,
    options: dict[str, Any] | None = None,
    resume: bool = False,
    saves: int = 0,
    **training: Any,
) -> Told:
    """Run on this rank; from the newest checkpoint on if `resume`; `saves` times by hand after."""
    run = Run(rank, setup, seed)
    if directory is None:
        run.train(None)
        return Told(run.state(), run.seen, False, [], ())
    with Checkpointer(
        directory, run.accum, model=run.model, loader=run.loader, **(options or {})
    ) as checkpoint:
        passed: tuple[str, ...] = ()
        if resume:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="passed over")
                position = checkpoint.resume()
            assert position is not None
            passed = position.passed
        run.train(checkpoint, **training)
        paths = [checkpoint.save() for _ in range(saves)]
        return Told(run.state(), run.seen, checkpoint.interrupted, paths, passed)


def found_when_interrupted(rank: int, directory: Path) -> list[str]:
    """The checkpoints that a rank finds when a signal to rank 1 has ended its pass. Rank 0, which
    makes them whole, has a slow disk."""
    run, fsync = Run(rank, Setup(), 1), os.fsync
    slow = mock.patch.object(os, "fsync", lambda file: (time.sleep(0.3 * (rank == 0)), fsync(file)))
    options = {"model": run.model, "loader": run.loader, "signals": (signal.SIGUSR1,)}
    with slow, Checkpointer(directory, run.accum, **options) as checkpoint:
        run.train(checkpoint, signal_at=(1, 2))
        return [path.name for path in list_checkpoints(directory)]


def interrupted_in_the_last_meeting(rank: int, directory: Path) -> tuple[bool, int]:
    """A signal to rank 1 when the ranks have met for the last time, with a window that both carry
    out of the pass: whether a rank is interrupted, and how many micro-batches it carries."""
    run = Run(rank, Setup(sizes=(1, 5), options={"tail": "carry"}, epochs=1), 1)

    def hook() -> None:
        if (data_pass := run.accum.parts.state.data_pass) is not None and data_pass.alive == 0:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.3 * (rank == 0))  # till it is asked for

    run.accum.on_block_end(hook)
    options = {"model": run.model, "loader": run.loader, "signals": (signal.SIGUSR1,)}
    with Checkpointer(directory, run.accum, every=1, **options) as checkpoint:
        run.train(checkpoint)
        return checkpoint.interrupted, run.accum.pending


def signalled_while_it_waits(rank: int, directory: Path) -> Told:
    """Rank 1 gets a signal when it waits, with its only micro-batch, for the saves of rank 0, which
    ends its first micro-batch once it is asked to stop."""
    run, waits = Run(rank, Setup(sizes=(3, 1)), 1), SaveCounts.catch_up
    options: dict[str, Any] = {"every": 1, "keep": 99, "signals": (signal.SIGUSR1,)}
    checkpoint = Checkpointer(directory, run.accum, model=run.model, loader=run.loader, **options)
    calls: list[int] = []
    store = checkpoint._store
    assert store is not None

    def asked_first(*_: Any) -> None:
        store.set("first", "runs")
        while not store.has("ask/0"):
            time.sleep(0.01)
        time.sleep(2 * LOOK)  # so that it looks when the block ends

    def signalled(counts: SaveCounts, *arguments: Any) -> bool:
        calls.append(1)  # the first one is at the start of the pass
        if len(calls) == 2:
            while not store.has("first"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGUSR1)
        return waits(counts, *arguments)

    patient = mock.patch.object(coordination, "PATIENCE", 20.0)
    catching_up = mock.patch.object(SaveCounts, "catch_up", signalled if rank else waits)
    with checkpoint, patient, catching_up:
        if rank == 0:
            run.net.register_forward_hook(asked_first)  # behind DDP's broadcast of buffers
        run.train(checkpoint)
        return Told(run.state(), run.seen, checkpoint.interrupted, [], ())
