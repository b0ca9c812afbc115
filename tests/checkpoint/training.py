"""A small run that draws random numbers wherever a run can, for the tests of this directory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from accumplug import Accumulator, NoiseScale
from accumplug.checkpoint.checkpointer import Checkpointer

SAMPLES = 23
SIZE = 3  # of a micro-batch: 8 in a pass, the last one smaller
STEPS = 3  # in a window: 3, 3, and a tail of 2


class Noisy(Dataset):
    """Sample i, with noise from every generator that a dataset can draw from."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.python = random.Random(4)
        self.numpy = np.random.default_rng(5)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + np.random.rand() + self.python.random() + self.numpy.random()
        x = i / SAMPLES + 0.1 * torch.randn(4) + 0.1 * torch.randn(4, generator=self.generator)
        return x + 0.1 * noise, torch.tensor([i / SAMPLES])


class Stream(IterableDataset):
    """The same samples without indices, in an order that is drawn when a pass starts."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in torch.randperm(SAMPLES).tolist():
            yield i / SAMPLES + 0.1 * torch.randn(4), torch.tensor([i / SAMPLES])


class Counting:
    """A loader of its own kind, that knows where it is."""

    def __init__(self) -> None:
        self.at = {"item": 0, "epoch": 0}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at["item"] < 8:
            generator = torch.Generator().manual_seed(self.at["epoch"] * 100 + self.at["item"])
            self.at["item"] += 1
            yield torch.randn(SIZE, 4, generator=generator), torch.randn(SIZE, 1)
        self.at = {"item": 0, "epoch": self.at["epoch"] + 1}

    def state_dict(self) -> dict[str, int]:
        return self.at

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = dict(state)


class Wrapped:
    """What a progress bar does."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


def sampler(**options: Any) -> RandomSampler:
    return RandomSampler(range(SAMPLES), **options)


LOADERS: dict[str, Callable[[int], Any]] = {
    "shuffled": lambda seed: DataLoader(Noisy(), SIZE, shuffle=True),
    "own generator": lambda seed: DataLoader(
        Noisy(), SIZE, shuffle=True, generator=torch.Generator().manual_seed(seed)
    ),
    "two workers": lambda seed: DataLoader(Noisy(), SIZE, shuffle=True, num_workers=2),
    "with replacement": lambda seed: DataLoader(
        Noisy(), SIZE, sampler=sampler(replacement=True, num_samples=SAMPLES)
    ),
    "iterable": lambda seed: DataLoader(Stream(), SIZE),
    "list": lambda seed: [
        (torch.full((SIZE, 4), i / 8.0), torch.full((SIZE, 1), i / 8.0)) for i in range(8)
    ],
    "with a state": lambda seed: Counting(),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1)
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


@dataclass
class Setup:
    """How a run is built; the same on each side of a stop."""

    loader: str = "shuffled"
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    fp16: bool = False
    weigh: bool = False
    noise: bool = False
    wrap: Callable[[Any], Any] = lambda loader: loader
    options: dict[str, Any] = field(default_factory=dict)


class Run:
    """One process's part of a run: built from `seed`, which only a fresh start may show."""

    def __init__(self, setup: Setup, seed: int = 1) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.setup = setup
        self.model = network()
        self.optimizer = setup.optimizer(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)
        self.scaler = None
        if setup.fp16:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        self.loader = LOADERS[setup.loader](seed)
        self.accum = Accumulator(
            STEPS,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            max_grad_norm=1.0,
            **setup.options,
        )
        if setup.noise:
            self.accum.noise_scale = NoiseScale()
        self.seen: list[Any] = []
        """Inputs and loss of each micro-batch."""
        self.windows: list[Any] = []
        """What was logged of each window."""

    def checkpoints(self, directory: Path, **options: Any) -> Checkpointer:
        return Checkpointer(directory, self.accum, model=self.model, loader=self.loader, **options)

    def train(
        self, epochs: int = 2, until: int | None = None, checkpoint: Checkpointer | None = None
    ) -> Run:
        """Go on to the end, until so many micro-batches have run here, or until interrupted."""
        weigh = {"weigh": lambda item: float(len(item[0]))} if self.setup.weigh else {}
        for _ in range(self.accum.epoch, epochs):
            for x, y in self.accum.batches(self.setup.wrap(self.loader), **weigh):
                self.block(x, y)
                if until is not None and len(self.seen) == until:
                    return self
            if checkpoint is not None and checkpoint.interrupted:
                break
            torch.rand(5)  # an evaluation
        return self

    def block(self, x: Tensor, y: Tensor) -> None:
        with self.accum(self.model, weight=float(len(x))) as micro:
            with torch.autocast("cpu", torch.float16, enabled=self.setup.fp16):
                output = self.model(x)
            loss = nn.functional.mse_loss(output.float(), y)
            self.accum.backward(loss)
        self.seen.append((x.clone(), loss.item()))
        if micro.closes:
            last = self.accum.last
            self.windows.append((last.loss, last.weight, last.grad_norm, last.stepped, last.scale))

    def state(self) -> dict[str, Any]:
        """Everything that another process has to arrive at."""
        accum = self.accum
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "counters": [accum.windows, accum.updates, accum.skipped, accum.micro_batches],
            "noise": None if accum.noise_scale is None else accum.noise_scale.state_dict(),
            "place": [accum.epoch, accum.position, accum.pending],
            "random": [
                torch.get_rng_state(),
                random.getstate()[1],
                np.random.get_state()[1].tolist(),
            ],
        }


def difference(one: Any, other: Any, at: str = "") -> str | None:
    """Where two states differ in a bit, or None."""
    if isinstance(one, Tensor):
        return None if torch.equal(one, other) else f"{at}: {one} != {other}"
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{at}: {one.keys()} != {other.keys()}"
        pairs = [(f"{at}.{key}", one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{at}: {len(one)} != {len(other)} items"
        pairs = [(f"{at}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        same = one == other or (one != one and other != other)
        return None if same else f"{at}: {one} != {other}"
    found = (difference(a, b, name) for name, a, b in pairs)
    return next((text for text in found if text is not None), None)
