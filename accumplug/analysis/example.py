"""The built-in example of `accumplug check` and `accumplug sweep`: a model, a batch, a loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Triple", "example"]

Triple = tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]


def example(items: int = 64, width: int = 512, seed: int = 0) -> Triple:
    """Give a classifier with LayerNorm, a made-up batch that it can learn, and its loss.

    `items` vectors of 784 numbers in 10 classes; `width` sets the hidden size (0.7 million
    parameters at 512). Nothing is downloaded and no random state outside is touched.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(784, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, 10),
        )
        inputs = torch.randn(items, 784)
        targets = (inputs @ torch.randn(784, 10)).argmax(1)
    return model, (inputs, targets), nn.CrossEntropyLoss()
