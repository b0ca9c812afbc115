"""The run whose checkpoints are in format_1 and format_2, written by earlier versions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accumplug import Accumulator, Checkpointer

EPOCHS = 2


class Net(nn.Module):
    """Sparse gradients, buffers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=True)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))
        self.head = nn.Linear(4, 1)

    def forward(self, index: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(self.table(index)))
        return output


class Run:
    """Two optimizers, a scheduler, a shuffled loader and an object with a state of its own."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = Net()
        rest = [*self.model.body.parameters(), *self.model.head.parameters()]
        sparse = torch.optim.SparseAdam(list(self.model.table.parameters()), 1e-2, eps=1e-2)
        dense = torch.optim.AdamW(rest, 1e-2, eps=1e-2)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(dense, [2, 4], 0.5)
        self.accum = Accumulator(3, optimizer=[sparse, dense], scheduler=scheduler)
        samples = [(torch.tensor(i % 6), torch.tensor([i / 20])) for i in range(20)]
        self.loader = DataLoader(samples, 2, shuffle=True)  # type: ignore[arg-type]
        self.average = torch.optim.swa_utils.AveragedModel(self.model.head)

    def checkpoints(self, directory: Path, **options: Any) -> Checkpointer:
        return Checkpointer(
            directory,
            self.accum,
            model=self.model,
            loader=self.loader,
            average=self.average,
            **options,
        )

    def train(self, until: int | None = None) -> list[Tensor]:
        """The weights after the last of so many micro-batches."""
        for _ in range(self.accum.epoch, EPOCHS):
            for index, target in self.accum.batches(self.loader):
                with self.accum(self.model):
                    loss = nn.functional.mse_loss(self.model(index), target)
                    self.accum.backward(loss)
                if self.accum.pending == 0:
                    self.average.update_parameters(self.model.head)
                if self.accum.micro_batches == until:
                    break
            if self.accum.micro_batches == until:
                break
        return [value.clone() for value in self.model.state_dict().values()]
