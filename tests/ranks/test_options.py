"""Options that differ between ranks are named before anything is reduced, on all of them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator

from .harness import Ranks
from .reference import items, loss, net, sgd

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "sync": ("last", "every"),
    "tail": ("flush", "drop"),
    "nonfinite": ("skip_window", "raise"),
    "accumulate_dtype": (None, torch.float32),
    "max_grad_norm": (1.0, None),
    "steps": (2, None),
    "optimizer": (True, False),
    "scaler": (False, True),
}


def differing(rank: int, name: str, odd: int, kind: str, loops: str) -> str:
    """Train with an option that is another one on rank `odd`; what was raised, and when."""
    model: Any = net()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model)
    value = DIFFERENT[name][rank == odd]
    optimizer = sgd(model.parameters())
    options: dict[str, Any] = {"steps": 2, "optimizer": optimizer, name: value}
    if name == "optimizer":
        options["optimizer"] = optimizer if value else None
    if name == "scaler":
        options["scaler"] = torch.amp.GradScaler("cpu") if value else None
    accum = Accumulator(**options)
    data = items(rank, [3] * 4)
    try:
        for item in accum.batches(data) if loops == "batches" else data:
            with accum(model):
                accum.backward(loss(model, item))
    except ValueError as error:
        assert (accum.micro_batches, accum.updates) == (0, 0)
        return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("world", [2, 3])
def test_an_option_that_differs_is_named_with_the_value_of_each_rank(
    ranks: Ranks, world: int, name: str
) -> None:
    """Before the first micro-batch, on all ranks, whichever of them is the odd one."""
    for odd, loops in ((world - 1, "batches"), (0, "plain")):
        if name == "optimizer":
            loops = "plain"  # without one, batches has a warning of its own
        messages = ranks.run(world, differing, name, odd, "ddp", loops)
        assert len(set(messages)) == 1
        assert messages[0].startswith(f"{name} differs between ranks: ")
        assert all(f" on rank {rank}" in messages[0] for rank in range(world))


@pytest.mark.parametrize("kind", ["bare", "fsdp"])
def test_a_sync_that_differs_does_not_hang_whatever_the_wrapper(ranks: Ranks, kind: str) -> None:
    """One rank would reduce in its first micro-batch, and the other at the close."""
    messages = ranks.run(2, differing, "sync", 1, kind, "plain")
    assert (
        messages
        == ["sync differs between ranks: 'last' on rank 0, 'every' on rank 1; give all the same"]
        * 2
    )


def second(rank: int, inside: bool) -> str:
    """A second Accumulator differs, which runs inside of a pass of the first, or after it."""
    models = [DistributedDataParallel(net()) for _ in range(2)]
    one, two = (
        Accumulator(100, optimizer=sgd(m.parameters()), max_grad_norm=1.0 + rank * index)
        for index, m in enumerate(models)
    )
    try:
        for item in one.batches(items(rank, [3] * 8)):
            with one(models[0]):
                one.backward(loss(models[0], item))
            if inside:
                time.sleep(0.1)  # no rank waits here for another one, which may have no data
                with two(models[1]):
                    two.backward(loss(models[1], item))
        with two(models[1]):
            pass
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("inside", [True, False])
def test_a_second_accumulator_is_compared_too(ranks: Ranks, inside: bool) -> None:
    """By its own options, and inside of another's pass without a wait."""
    messages = ranks.run(2, second, inside)
    expected = "max_grad_norm differs between ranks: 1.0 on rank 0, 2.0 on rank 1; give all the "
    assert messages == [expected + "same"] * 2


def none_comes(rank: int) -> str:
    """Rank 1 never runs a block."""
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=1))
    model, message = DistributedDataParallel(net()), ""
    accum = Accumulator(2, optimizer=sgd(model.parameters()))
    if rank == 0:
        with pytest.raises(RuntimeError) as raised, accum(model):
            pass
        message = str(raised.value)
    return message


def test_a_rank_that_never_comes_is_named_when_the_time_is_over(ranks: Ranks) -> None:
    """Within the timeout of the group's store."""
    message, _ = ranks.run(2, none_comes)
    assert "rank 0 of 2 waited for rank 1" in message
