"""A contrastive loss over the rows of all ranks, reduced once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from dataloading.test_contrastive import Towers, clip_loss, gradients, pairs, relative, sgd
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator

from .harness import Ranks

SHARES = {2: [(0, 8), (8, 12)], 3: [(0, 4), (4, 7), (7, 12)]}


def train(rank: int, world: int) -> Any:
    """This rank's rows of 12, in parts of 2."""
    bare = Towers()
    model = DistributedDataParallel(bare)
    begin, end = SHARES[world][rank]
    batch = tuple(side[begin:end] for side in pairs())
    accum = Accumulator(None, optimizer=sgd(model))
    loss = accum.contrastive(model, batch=batch, size=2, loss=clip_loss)
    assert (accum.updates, accum.syncs) == (1, 1)
    return [p.detach() for p in bare.parameters()], float(loss), accum.last.loss


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_have_the_negatives_of_all_of_them(world: int, ranks: Ranks) -> None:
    """Of uneven shares; the update is that of 12 rows on one device."""
    torch.set_default_dtype(torch.float64)
    try:
        start = Towers()
        loss, expected = gradients(copy.deepcopy(start), pairs())
    finally:
        torch.set_default_dtype(torch.float32)
    for weights, found, logged in ranks.run(world, train, world):
        model = copy.deepcopy(start)
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.data = weight
        assert relative(model, start, expected) <= 1e-12
        assert found == pytest.approx(float(loss), rel=1e-13)
        assert logged == pytest.approx(float(loss), rel=1e-13)


def train_temperature(rank: int, world: int) -> float:
    """What an update of rate 1 does to a temperature of the wrapped model that the loss uses."""
    bare = Towers()
    bare.temperature = torch.nn.Parameter(torch.tensor(0.5))
    model = DistributedDataParallel(bare)
    begin, end = SHARES[world][rank]
    batch = tuple(side[begin:end] for side in pairs())
    accum = Accumulator(None, optimizer=sgd(model))
    accum.contrastive(
        model, batch=batch, size=2, loss=lambda a, b: clip_loss(a * bare.temperature, b)
    )
    return bare.temperature.item()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_learn_a_temperature_of_the_loss_once(world: int, ranks: Ranks) -> None:
    """Each rank has the whole gradient for it; their sum must not count it `world` times."""
    torch.set_default_dtype(torch.float64)
    try:
        heat = torch.tensor(0.5, requires_grad=True)
        one, other = Towers()(*pairs())
        clip_loss(one * heat, other).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    for found in ranks.run(world, train_temperature, world):
        assert found == pytest.approx(0.5 - float(heat.grad), rel=1e-12)
