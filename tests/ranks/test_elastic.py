"""A run that is saved on some ranks and gone on from by another number of them."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from accumplug import Accumulator, Checkpointer
from accumplug.checkpoint.format import list_checkpoints, open_checkpoint

from .harness import Ranks
from .reference import Gradients, errors, grads

SAMPLES = 26  # micro-batches of 2, windows of 6 of them: two full ones and a tail, on 1 to 3 ranks
TOTAL = 6


@dataclass(frozen=True)
class Setup:
    """How a run is built; the same on any number of ranks."""

    steps: int | None = None
    size: int = 2
    samples: int = SAMPLES
    workers: int = 0
    weighted: bool = True
    """By tokens; else each micro-batch counts alike."""
    weigh: bool = False
    epochs: int = 2
    sampler: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


class Tokens(Dataset[Any]):
    """Sample i with its number, its features, its target and how many tokens it has."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
        self.y = torch.randn(samples, 2, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor, float]:
        return i, self.x[i], self.y[i], 1.0 + i % 5


class Net(nn.Module):
    """A head that only some samples use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        result: Tensor = self.heads[0](hidden)
        rare = numbers % 7 == 0
        if rare.any():
            result = result + rare[:, None] * self.heads[1](hidden)
        return result


def loss_of(model: nn.Module, batch: Any, weighted: bool) -> tuple[Tensor, float]:
    """The mean over the tokens of a micro-batch and how many; or that over its samples and 1."""
    numbers, x, y, tokens = batch
    losses = (model(x, numbers) - y).square().sum(1)
    if not weighted:
        return losses.mean(), 1.0
    return (losses * tokens).sum() / tokens.sum(), tokens.sum().item()


@dataclass
class Told:
    """What a rank tells, by pass: the samples of each micro-batch, the gradient of each update."""

    seen: list[list[list[int]]]
    gradients: list[list[Gradients]]
    micro_batches: int = 0
    epoch: int = 0


def loader_of(rank: int, world: int, setup: Setup) -> tuple[Any, Any]:
    data, sampler = Tokens(setup.samples), None
    if world > 1:
        sampler = DistributedSampler(data, world, rank, seed=3, **setup.sampler)
    return DataLoader(
        data, setup.size, shuffle=sampler is None, sampler=sampler, num_workers=setup.workers
    ), sampler


def part(
    rank: int,
    world: int,
    setup: Setup,
    directory: Path | None,
    resume: bool = False,
    until: int | None = None,
    **options: Any,
) -> Told:
    """Run on this rank, from the newest checkpoint on if `resume`, for `until` micro-batches."""
    torch.manual_seed(55 if resume else 1)
    loader, sampler = loader_of(rank, world, setup)
    net = Net()
    model: nn.Module = net
    if world > 1:
        model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    accum = Accumulator(setup.steps or TOTAL // world, optimizer=optimizer, **setup.options)
    told = Told([[] for _ in range(setup.epochs)], [[] for _ in range(setup.epochs)])
    accum.on_update(lambda: told.gradients[accum.epoch].append(grads(net)))
    weigh = {"weigh": lambda batch: batch[3].sum().item()} if setup.weigh else {}
    with Checkpointer(directory, accum, model=model, loader=loader, **options) as checkpoint:
        if resume:
            assert checkpoint.resume() is not None
        for epoch in range(accum.epoch, setup.epochs):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for batch in accum.batches(loader, **weigh):
                with accum(model):
                    loss, weight = loss_of(model, batch, setup.weighted)
                    accum.backward(loss, weight=weight)
                told.seen[epoch].append(batch[0].tolist())
                if sum(map(len, told.seen)) == until:
                    return told
    told.micro_batches, told.epoch = accum.micro_batches, accum.epoch
    return told


def rests(rank: int, world: int, setup: Setup, directories: list[Path]) -> list[Told]:
    """Go on from what is in each of `directories`, to the end."""
    return [part(rank, world, setup, directory, resume=True) for directory in directories]


def only(checkpoint: Path, tmp_path: Path, name: str = "after") -> Path:
    """A directory in which `checkpoint` is the newest."""
    directory = tmp_path / f"{name} {checkpoint.name}"
    shutil.copytree(checkpoint, directory / checkpoint.name, copy_function=os.link)
    return directory


def samples(told: list[Told], epoch: int, until: int | None = None) -> Counter[int]:
    """How often each sample was seen by all ranks together."""
    return Counter(i for one in told for batch in one.seen[epoch][:until] for i in batch)


def in_plain_torch(quiet: list[Told], setup: Setup, steps: int) -> list[list[Gradients]]:
    """The gradients of each pass, from one big batch for each window of what `quiet` has seen."""
    net, data = Net(), Tokens(setup.samples)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    found: list[list[Gradients]] = []
    for epoch in range(setup.epochs):
        found.append([])
        for start in range(0, len(quiet[0].seen[epoch]), steps):
            window = [b for one in quiet for b in one.seen[epoch][start : start + steps]]
            optimizer.zero_grad()
            big = [default_collate([data[i] for batch in window for i in batch])]
            if not setup.weighted:
                big = [default_collate([data[i] for i in batch]) for batch in window]
            terms = [loss_of(net, batch, setup.weighted) for batch in big]
            total = sum(weight for _, weight in terms)
            sum(loss * weight / total for loss, weight in terms).backward()
            found[-1].append(grads(net))
            optimizer.step()
    return found


def far(actual: Iterable[Gradients], expected: Iterable[Gradients]) -> float:
    """The largest error of any update; 0 if there is none on both sides."""
    actual, expected = list(actual), list(expected)
    return errors(actual, expected) if actual or expected else 0.0


def position(checkpoint: Path) -> dict[str, int]:
    return open_checkpoint(checkpoint).manifest.position


def check(
    ranks: Ranks, world: int, other: int, setup: Setup, tmp_path: Path, pick: slice = slice(None)
) -> None:
    """Go on from each checkpoint of a run on `world` ranks, and compare with the run itself."""
    quiet: list[Told] = ranks.run(
        world, part, world, setup, tmp_path / "all", every=1, keep=99, timeout=60
    )
    expected = in_plain_torch(quiet, setup, setup.steps or TOTAL // world)
    assert far(chain(*quiet[0].gradients), chain(*expected)) <= 1e-12
    saved = list_checkpoints(tmp_path / "all")[pick]
    places = [only(checkpoint, tmp_path) for checkpoint in saved]
    told = ranks.run(other, rests, other, setup, places, timeout=60)
    for index, checkpoint in enumerate(saved):
        rest = [one[index] for one in told]
        at = position(checkpoint)
        epoch = at["epoch"]
        before = at["update"] - sum(map(len, expected[:epoch]))
        for one in rest:
            error = far(one.gradients[epoch], expected[epoch][before:])
            assert error <= 1e-12, checkpoint.name
        seen = samples(quiet, epoch, at["position"]) + samples(rest, epoch)
        assert seen == samples(quiet, epoch), checkpoint.name
        for later in range(epoch + 1, setup.epochs):
            assert samples(rest, later).keys() == samples(quiet, later).keys()
        counted = sum(one.micro_batches for one in rest) - sum(len(b) for r in rest for b in r.seen)
        assert counted == world * at["micro_batch"]


@pytest.mark.parametrize("other", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_update_is_that_of_the_run_that_went_on(
    ranks: Ranks, world: int, other: int, tmp_path: Path
) -> None:
    """From each micro-batch on: plain loaders and DistributedSamplers, tails, parameters that are
    used now and then, tokens as weights, AdamW."""
    check(ranks, world, other, Setup(), tmp_path)
