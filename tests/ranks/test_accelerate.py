"""Accelerate loops on several ranks: prepared models, optimizers, schedulers and loaders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from accumplug import Accumulator

from .harness import RankError, Ranks
from .reference import (
    Item,
    big_batches,
    counting,
    equal,
    error,
    forked,
    grads,
    loss,
    net,
    parameters,
    sgd,
    windows_of,
)

MODELS = {"net": net, "counting": counting, "forked": forked}


@contextmanager
def accelerated(rank: int, **options: Any) -> Iterator[Accelerator]:
    """An Accelerator as under torchrun with ACCELERATE_USE_CPU=true."""
    world = dist.get_world_size()
    before = dict(os.environ)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    try:
        accelerator = Accelerator(**options)
        assert accelerator.num_processes == world
        assert accelerator.distributed_type == DistributedType.MULTI_CPU
        yield accelerator
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def samples(count: int, pass_: int = 0) -> list[Item]:
    """Single samples, the same on each rank."""
    generator = torch.Generator().manual_seed(50 + pass_)
    return [
        (torch.randn(3, generator=generator), torch.randn(2, generator=generator))
        for _ in range(count)
    ]


def dealt(count: int, world: int) -> list[list[Item]]:
    """The batches of two samples that Accelerate deals to each rank, in turn."""
    data = samples(count)
    batches = [
        (torch.stack([x for x, _ in part]), torch.stack([y for _, y in part]))
        for part in (data[start : start + 2] for start in range(0, count, 2))
    ]
    return [batches[rank::world] for rank in range(world)]


def train(
    rank: int,
    count: int,
    epochs: int = 1,
    batches: bool = True,
    takes_step: bool = False,
    where: str = "inside",
    model: str = "net",
    clip: str = "norm",
    even: bool = False,
    unused: bool = False,
    **options: Any,
) -> Any:
    """Windows of two over a prepared loader; the loop clips and steps, or accum does."""
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=unused)]
    config = DataLoaderConfiguration(even_batches=even)
    with accelerated(rank, dataloader_config=config, kwargs_handlers=handlers) as accelerator:
        bare = MODELS[model]()
        optimizer = sgd(bare.parameters())
        scheduler = LambdaLR(optimizer, lambda _: 1.0)
        ddp, optimizer, scheduler, loader = accelerator.prepare(
            bare, optimizer, scheduler, DataLoader(samples(count), batch_size=2)
        )
        if takes_step:
            options |= {"optimizer": optimizer, "scheduler": scheduler, "max_grad_norm": 0.5}
        accum = Accumulator(2, accelerator=accelerator, **options)
        losses = []
        accum.on_update(lambda: losses.append(accum.last))

        def step() -> None:
            if clip == "norm":
                accelerator.clip_grad_norm_(ddp.parameters(), 0.5)
            elif clip == "value":
                accelerator.clip_grad_value_(ddp.parameters(), 0.05)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        for _ in range(epochs):
            for item in accum.batches(loader) if batches else loader:
                with accum(ddp, weight=len(item[0])) as micro:
                    accelerator.backward(loss(ddp, item))
                    if not takes_step and where == "inside":
                        step()
                if not takes_step and where == "behind" and micro.closes:
                    step()
        norm = accum.last.grad_norm if accum.last is not None else None
        counters = accum.updates, accum.pending, accum.epoch, accum.syncs
        return parameters(ddp), counters, scheduler.scheduler.last_epoch, norm


def check(results: Any, windows: list[list[Item]], clip: float | None, ticks: int) -> None:
    """All ranks have made the updates that plain torch makes of `windows`."""
    expected, weights = big_batches(windows, clip=clip)
    last = torch.cat([g.flatten() for g in expected[-1] if g is not None]).norm().item()
    for after, (updates, pending, _, syncs), epoch, norm in results:
        assert (updates, pending, syncs) == (len(windows), 0, len(windows))
        assert epoch == ticks * len(windows)
        assert error(after, weights) <= 1e-13
        assert norm is None or norm == pytest.approx(last, rel=1e-12)
    assert equal([after for after, *_ in results])


@pytest.mark.parametrize("where", ["inside", "behind"])
@pytest.mark.parametrize("batches", [False, True], ids=["", "batches"])
@pytest.mark.parametrize("world", [2, 3])
def test_an_accelerate_loop_of_even_data(
    ranks: Ranks, world: int, batches: bool, where: str
) -> None:
    """Five batches on each rank in windows of two, twice; the loop clips, steps and ticks.

    A prepared scheduler ticks once for each rank, which is Accelerate's own way.
    """
    count = 10 * world
    results = ranks.run(world, train, count, 2, batches=batches, where=where)
    check(results, windows_of(dealt(count, world), 2) * 2, 0.5, world)


def test_accum_takes_the_step_of_prepared_objects(ranks: Ranks) -> None:
    """With accelerator= and optimizer= both; the scheduler ticks once for each update."""
    results = ranks.run(2, train, 20, 2, takes_step=True)
    check(results, windows_of(dealt(20, 2), 2) * 2, 0.5, 1)


COUNTS = [(10, 2), (9, 2), (2, 2), (13, 3), (4, 3)]
"""Samples and ranks: 3 and 2 batches; the same, the last of one sample; 1 and 0; 3, 2 and 2; 1, 1
and 0."""


@pytest.mark.parametrize("takes_step", [False, True], ids=["the loop steps", "accum steps"])
@pytest.mark.parametrize("case", COUNTS, ids=str)
def test_an_accelerate_loop_of_uneven_data(
    ranks: Ranks, case: tuple[int, int], takes_step: bool
) -> None:
    """A rank without data clips, steps and ticks as the loops of the others do."""
    count, world = case
    results = ranks.run(world, train, count, 2, takes_step=takes_step)
    windows = windows_of(dealt(count, world), 2)
    check(results, windows * 2, 0.5, 1 if takes_step else world)


def test_an_accelerate_loop_of_uneven_data_without_a_clip(ranks: Ranks) -> None:
    """What the others do not do, a rank without data does not do either."""
    results = ranks.run(2, train, 10, clip="none")
    check(results, windows_of(dealt(10, 2), 2), None, 2)


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_replicas_stay_equal_however_the_loop_clips(ranks: Ranks, clip: str) -> None:
    """A rank without data does what the others do in the closing block."""
    results = ranks.run(2, train, 18, where="inside", clip=clip)
    assert equal([after for after, *_ in results])


def test_a_step_behind_the_block_is_refused_while_a_rank_has_no_data(ranks: Ranks) -> None:
    """It could not follow; all ranks say so, none waits."""
    with pytest.raises(RankError, match=r"(?s)rank 0: .*step there.*rank 1: .*step there"):
        ranks.run(2, train, 18, where="behind", clip="norm")


def test_buffers_in_an_accelerate_loop_of_uneven_data(ranks: Ranks) -> None:
    """Their broadcast is part of the forward."""
    for count in (18, 2):
        results = ranks.run(2, train, count, 2, model="counting")
        assert equal([after for after, *_ in results])
        assert {counters[0] for _, counters, *_ in results} == {2 * -(-count // 8)}


def test_unused_parameters_in_an_accelerate_loop_of_uneven_data(ranks: Ranks) -> None:
    """A head that nobody uses stays as it was, on all ranks."""
    results = ranks.run(2, train, 18, 2, model="forked", unused=True)
    assert equal([after for after, *_ in results])
    for after, *_ in results:
        assert torch.equal(after[-1], parameters(forked())[-1])


def test_sync_in_every_micro_batch_of_an_accelerate_loop(ranks: Ranks) -> None:
    """The same updates, with uneven data."""
    results = ranks.run(2, train, 10, sync="every")
    _, weights = big_batches(windows_of(dealt(10, 2), 2), clip=0.5)
    for after, *_ in results:
        assert error(after, weights) <= 1e-13
    assert equal([after for after, *_ in results])


def train_two(rank: int, count: int, order: str) -> tuple[list[Tensor], int]:
    """Two prepared models in one block."""
    config = DataLoaderConfiguration(even_batches=False)
    with accelerated(rank, dataloader_config=config) as accelerator:
        torch.manual_seed(4)
        small, large = nn.Linear(3, 3), net()
        both = nn.ModuleList([small, large])
        loader: Any = DataLoader(samples(count), batch_size=2)  # type: ignore[arg-type]
        first, second, optimizer, loader = accelerator.prepare(
            small, large, sgd(both.parameters()), loader
        )
        accum = Accumulator(2, accelerator=accelerator)
        for x, y in accum.batches(loader):
            with accum(*((first, second) if order == "small first" else (second, first))):
                accelerator.backward(nn.functional.mse_loss(second(first(x)), y))
                accelerator.clip_grad_norm_(both.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return parameters(both), accum.updates


@pytest.mark.parametrize("order", ["small first", "large first"])
@pytest.mark.parametrize("count", [2, 10])
def test_two_models_of_an_accelerate_loop(ranks: Ranks, count: int, order: str) -> None:
    """In the order of the block or in that of prepare: reduced and clipped together."""
    results = ranks.run(2, train_two, count, order)
    torch.manual_seed(4)
    both = nn.ModuleList([nn.Linear(3, 3), net()])
    optimizer = sgd(both.parameters())
    for window in windows_of(dealt(count, 2), 2):
        optimizer.zero_grad()
        losses = [nn.functional.mse_loss(both[1](both[0](x)), y) for x, y in window]
        (torch.stack(losses).sum() / len(losses)).backward()
        nn.utils.clip_grad_norm_(both.parameters(), 0.5)
        optimizer.step()
    for after, _ in results:
        assert error(after, parameters(both)) <= 1e-13
    assert equal([after for after, _ in results])


def leave_out_in_loop(rank: int, way: str) -> Any:
    """Rank 1 leaves out the micro-batch that closes the second window; its loop does not step."""
    with accelerated(rank) as accelerator:
        bare = net()
        optimizer = sgd(bare.parameters())
        ddp, optimizer, loader = accelerator.prepare(
            bare, optimizer, DataLoader(samples(16), batch_size=2)
        )
        accum = Accumulator(2, accelerator=accelerator)
        for index, item in enumerate(loader):
            out = rank == 1 and index == 3
            with accum(ddp, weight=0 if out and way == "weight" else len(item[0])) as micro:
                if out and way == "skip":
                    micro.skip()
                    continue
                accelerator.backward(loss(ddp, item) * (float("nan") if out else 1.0))
                accelerator.clip_grad_norm_(ddp.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return parameters(ddp), accum.updates


@pytest.mark.parametrize("way", ["weight", "skip"])
def test_a_rank_that_leaves_out_the_closing_micro_batch(ranks: Ranks, way: str) -> None:
    """It takes the step of the others all the same."""
    results = ranks.run(2, leave_out_in_loop, way)
    first, second = dealt(16, 2)
    windows = [first[0:2] + second[0:2], first[2:4] + second[2:3]]
    _, weights = big_batches(windows, clip=0.5)
    for after, updates in results:
        assert updates == 2
        assert error(after, weights) <= 1e-13
    assert equal([after for after, _ in results])


def like_accumulate(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after two windows of four: by Accelerate's accumulate, and by accum."""
    found = []
    for ours in (False, True):
        with accelerated(rank, gradient_accumulation_steps=1 if ours else 4) as accelerator:
            torch.set_default_dtype(torch.float32)
            bare = net()
            data = [(x.float(), y.float()) for x, y in samples(32)]
            ddp, optimizer, loader = accelerator.prepare(
                bare, sgd(bare.parameters()), DataLoader(data, batch_size=2)
            )
            accumulate = Accumulator(4, accelerator=accelerator) if ours else accelerator.accumulate
            for item in loader:
                with accumulate(ddp):
                    accelerator.backward(loss(ddp, item))
                    accelerator.clip_grad_norm_(ddp.parameters(), 0.5) if ours or (
                        accelerator.sync_gradients
                    ) else None
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(parameters(ddp))
    return found[0], found[1]


def test_full_windows_have_the_bits_of_accumulate(ranks: Ranks) -> None:
    """Where Accelerate was right nothing changes."""
    for theirs, ours in ranks.run(2, like_accumulate):
        assert all(map(torch.equal, theirs, ours))


def sync_script(rank: int) -> list[tuple[Any, ...]]:
    """Accelerate's own test of accumulation, with accum in place of accumulate.

    Written after accelerate/test_utils/scripts/test_sync.py (Apache-2.0, The HuggingFace Team), for
    full windows. A plain model sees the samples of all ranks; what it disagrees about comes back.
    """
    wrong: list[tuple[Any, ...]] = []
    for split, dispatch, each in product([False, True], repeat=3):
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
        config = DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
        with accelerated(
            rank, dataloader_config=config, gradient_accumulation_plugin=plugin
        ) as accelerator:
            wrong += [(split, dispatch, each, *row) for row in compare(accelerator, split)]
    return wrong


def compare(accelerator: Accelerator, split: bool) -> Iterator[tuple[Any, ...]]:
    """One run of it."""
    accum = Accumulator(2, accelerator=accelerator)
    plain, bare = net(), net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda epoch: (epoch + 1) ** 0.65)
    ddp_optimizer: Any = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    ddp_scheduler: Any = LambdaLR(ddp_optimizer, lambda epoch: (epoch + 1) ** 0.65)
    loader: Any = DataLoader(samples(128), batch_size=16)  # type: ignore[arg-type]
    ddp, ddp_optimizer, ddp_scheduler, loader = accelerator.prepare(
        bare, ddp_optimizer, ddp_scheduler, loader
    )
    for iteration, item in enumerate(loader):
        whole = tuple(accelerator.gather(tuple(item)))
        (loss(plain, whole) / 2).backward()
        closes = iteration % 2 == 1
        with accum(ddp):
            accelerator.backward(loss(ddp, item))
            far = error(grads(ddp), grads(plain))
            if (far <= 1e-13) != closes:
                yield iteration, "gradients", far
            ddp_optimizer.step()
            ddp_scheduler.step()
            ddp_optimizer.zero_grad()
        if closes:
            optimizer.step()
            for _ in range(1 if split else accelerator.num_processes):
                scheduler.step()
            optimizer.zero_grad()
        if error(parameters(ddp), parameters(plain)) > 1e-13:
            yield iteration, "parameters"
        if scheduler.get_last_lr() != ddp_scheduler.get_last_lr():
            yield iteration, "learning rates"
    if iteration != (7 if split else 3):
        yield iteration, "iterations"


def test_the_sync_script_of_accelerate(ranks: Ranks) -> None:
    """Split and dispatched batches, and a plugin that asks for a sync of each."""
    assert ranks.run(2, sync_script) == [[], []]


def read_dispatched(rank: int, read: str, split: bool, iterable: bool) -> Any:
    """Sizes of the windows of two passes over what rank 0 fetches for all: 7 batches in turn."""
    config = DataLoaderConfiguration(dispatch_batches=True, split_batches=split)
    with accelerated(rank, dataloader_config=config) as accelerator:
        bare, sizes = net(), []
        size = accelerator.num_processes
        rows = Rows(samples(7 * size)) if iterable else samples(7 * size)
        ddp, optimizer, loader = accelerator.prepare(
            bare, sgd(bare.parameters()), DataLoader(rows, batch_size=size)
        )
        accum = Accumulator(3, accelerator=accelerator)
        for _ in range(2):
            for item in READERS[read](loader):
                with accum(ddp, weight=len(item[0])) as micro:
                    accelerator.backward(loss(ddp, item))
                    optimizer.step()
                    optimizer.zero_grad()
                if micro.closes:
                    sizes.append(micro.index + 1)
        return sizes, accum.pending, accum.epoch, parameters(ddp)


class Rows(IterableDataset[Item]):
    def __init__(self, rows: list[Item]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Item]:
        return iter(self.rows)


def ahead(batches: Iterable[Item], count: int) -> Iterator[Item]:
    """`count` batches before the block of the first of them."""
    batches = iter(batches)
    while window := list(islice(batches, count)):
        yield from window


READERS = {"one by one": iter, "two": partial(ahead, count=2), "three": partial(ahead, count=3)}


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_a_dispatcher_is_counted_on_each_rank_however_the_loop_reads(
    ranks: Ranks, world: int, split: bool, iterable: bool
) -> None:
    """One rank fetches for all; the last round may be filled up. Windows are those of a loop that
    takes batch by batch."""
    count = 7 if split else -(-7 // world)
    expected = ([3] * (count // 3) + [count % 3] * bool(count % 3)) * 2
    one = ranks.run(world, read_dispatched, "one by one", split, iterable)
    assert [(sizes, pending, epoch) for sizes, pending, epoch, _ in one] == [
        (expected, 0, 2)
    ] * world
    for read in ("two", "three"):
        results = ranks.run(world, read_dispatched, read, split, iterable)
        assert [result[:3] for result in results] == [(expected, 0, 2)] * world
        assert equal([result[3] for result in results + one])
