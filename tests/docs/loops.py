"""The names that the documents' loops take as known, and plain torch to compare them with."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from textbook import data, mean_loss, network, relative
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from accumplug import Accumulator

COMMON = {"torch": torch, "F": F, "nn": nn, "Accumulator": Accumulator, "loss_fn": F.mse_loss}


def given(batches, dtype=torch.float64, momentum=0.0):
    """A model, its data, and an optimizer that hides nothing."""
    model = network(dtype)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=momentum)
    scheduler = StepLR(optimizer, 1, gamma=0.9)
    return COMMON | {
        "model": model,
        "loader": batches,
        "optimizer": optimizer,
        "scheduler": scheduler,
    }


def rows(count=22, dtype=torch.float32):
    """Samples one by one, for loaders that make micro-batches of them."""
    return [(x[0], y[0]) for x, y in data([1] * count, dtype)]


def trained(model, batches, steps, clip=None, lr=0.1, momentum=0.0):
    """A copy of `model` after plain torch's training on one large batch for each window."""
    model = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), lr=lr, momentum=momentum)
    for begin in range(0, len(batches), steps):
        window = batches[begin : begin + steps]
        whole = torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])
        optimizer.zero_grad()
        mean_loss(model, whole).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def apart(one, other):
    """The relative difference of the parameters of two models."""
    return relative(list(one.parameters()), list(other.parameters()))
