"""fully_shard through Accelerate: both sync modes, whoever steps, are one big batch."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from versions import REDUCE_SCATTER, averaging

from accumplug import Accumulator, Checkpointer
from accumplug.storage.layout import list_checkpoints

from .harness import RankError, Ranks
from .reference import big_batches, error, items, loss, windows_of
from .test_accelerate import accelerated, dealt, samples
from .test_sharded import CLIP, SIZES, STEPS, net, textbook

GROUPS = 3
"""What the plugin makes of `net`: its two inner layers and the rest."""


@contextmanager
def sharding(rank: int, scaled: bool = False, **options: Any) -> Iterator[Accelerator]:
    """An Accelerator that shards. On the CPU it would pass over its plugin without a word."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=20,
        cpu_ram_efficient_loading=False,
    )
    warnings.filterwarnings("ignore", message="TypedStorage")  # torch 2.8, of its own checkpoints
    if scaled:
        options["mixed_precision"] = "fp16"
    with averaging(), accelerated(rank, fsdp_plugin=plugin, **options) as accelerator:
        # accelerate 1.15, state.py: only on a machine with accelerators the plugin decides
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        assert accelerator.is_fsdp2
        if scaled:  # nor does it make a scaler here
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            accelerator.native_amp = True
        yield accelerator


@contextmanager
def counting_reductions() -> Iterator[list[int]]:
    """How many numbers each reduce-scatter had."""
    found: list[int] = []
    reduce_scatter = getattr(dist, REDUCE_SCATTER)

    def count(*args: Any, **options: Any) -> Any:
        found.append(options["input"].numel())
        return reduce_scatter(*args, **options)

    with mock.patch.object(dist, REDUCE_SCATTER, count):
        yield found


def whole(parameters: Any) -> list[Tensor]:
    """The parameters, put together from their shards."""
    return [p.full_tensor().detach() for p in parameters]


def train(rank: int, sync: str, who: str, scaled: bool) -> tuple[list[Tensor], list[float], Any]:
    """Token-weighted windows of three and a tail; `who` steps: accum, or the loop, and where."""
    warnings.filterwarnings("ignore", message="deferring the reduction")
    with sharding(rank, scaled) as accelerator, counting_reductions() as scattered:
        model: Any = net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert sum(isinstance(m, FSDPModule) for m in model.modules()) == GROUPS
        options = {"optimizer": optimizer, "max_grad_norm": CLIP} if who == "accum" else {}
        accum = Accumulator(STEPS, accelerator=accelerator, sync=sync, **options)
        norms = []

        def step() -> None:
            norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
            if who == "loop behind" and accelerator.sync_gradients:
                # in torch 2.8, the number that a DTensor is said to be is that of one rank
                norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            optimizer.step()
            optimizer.zero_grad()

        @accum.on_update
        def note() -> None:
            if who != "loop behind":
                assert accum.last is not None
                norms.append(float(accum.last.grad_norm or 0.0))

        kind = next(model.parameters()).dtype  # under fp16 Accelerate makes all weights fp32
        for x, y in accum.batches(items(rank, SIZES[rank])):
            with accum(model, weight=len(x)) as micro:
                accelerator.backward(loss(model, (x.to(kind), y.to(kind))))
                if who == "loop":
                    step()
            if who == "loop behind" and micro.closes:
                step()
        counts = accum.updates, accum.syncs, len(scattered)
        return whole(model.parameters()), norms, counts


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("who", ["accum", "loop", "loop behind"])
@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_sharded_window_of_an_accelerate_loop_is_one_big_batch(
    ranks: Ranks, world: int, sync: str, who: str, scaled: bool
) -> None:
    """Weights by token, a tail, the clip of whoever steps; reductions as the mode says."""
    expected, expected_norms = textbook(world, CLIP)
    # torch 2.8 adds 1e-6 to the norm of each shard where it clips, not to that of all
    clipped = 1e-13 if who == "accum" or hasattr(Tensor, "grad_dtype") else 1e-7
    for got, norms, (updates, syncs, scattered) in ranks.run(world, train, sync, who, scaled):
        assert updates == 3
        assert syncs == (3 if sync == "last" else 7)
        if world > 1:  # torch 2.8 reduces over one rank as well, later ones don't
            assert scattered == GROUPS * syncs
        # AdamW divides by the root of a moment, which stretches rounding (1e-16, with the scaler
        # the 1e-7 of fp32) a hundredfold
        for ours, theirs in zip(got, expected, strict=True):
            tolerance = 1e-4 if scaled else clipped
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance)
        assert norms == pytest.approx(expected_norms, rel=1e-5 if scaled else clipped)


def like_accumulate(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after two windows of four: by Accelerate's accumulate, and by accum."""
    warnings.filterwarnings("ignore", message="deferring the reduction")
    found = []
    for ours in (False, True):
        with sharding(rank, gradient_accumulation_steps=1 if ours else 4) as accelerator:
            model: Any = net()
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
            loader: Any = DataLoader(samples(16 * dist.get_world_size()), batch_size=2)  # type: ignore[arg-type]
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            accumulate = Accumulator(4, accelerator=accelerator) if ours else accelerator.accumulate
            for item in loader:
                with accumulate(model):
                    accelerator.backward(loss(model, item))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(whole(model.parameters()))
    return found[0], found[1]


@pytest.mark.parametrize("world", [1, 2])
def test_full_sharded_windows_have_the_bits_of_accumulate(ranks: Ranks, world: int) -> None:
    """Where Accelerate was right nothing changes."""
    for theirs, ours in ranks.run(world, like_accumulate):
        assert all(map(torch.equal, theirs, ours))


def prepared(rank: int, batches: bool) -> tuple[list[Tensor], int, int]:
    """A prepared loader and scheduler; five micro-batches on each rank in windows of two."""
    warnings.filterwarnings("ignore", message="deferring the reduction")
    with sharding(rank) as accelerator:
        model: Any = net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        loader: Any = DataLoader(samples(10 * dist.get_world_size()), batch_size=2)  # type: ignore[arg-type]
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        accum = Accumulator(2, accelerator=accelerator)
        for item in accum.batches(loader) if batches else loader:
            with accum(model):
                accelerator.backward(loss(model, item))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return whole(model.parameters()), accum.updates, scheduler.scheduler.last_epoch


@pytest.mark.parametrize("batches", [False, True], ids=["", "batches"])
def test_the_tail_of_a_prepared_loader(ranks: Ranks, batches: bool) -> None:
    """It is a mean over the one micro-batch that it has on each rank."""
    windows = windows_of(dealt(20, 2), 2)
    _, expected = big_batches(
        windows, net(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    for after, updates, epoch in ranks.run(2, prepared, batches):
        assert (updates, epoch) == (3, 6)  # a prepared scheduler ticks once for each rank
        assert error(after, expected) <= 1e-13


def refused(rank: int) -> None:
    """What can't be made right with an Accelerator that shards."""
    warnings.filterwarnings("ignore", message="deferring the reduction")
    silent = pytest.raises(ValueError, match="trains in fp32 without saying so")
    with sharding(rank, mixed_precision="fp16") as accelerator, silent:
        Accumulator(2, accelerator=accelerator)
    with sharding(rank, mixed_precision="bf16") as accelerator:
        accelerator.state.fsdp_plugin.set_mixed_precision("bf16")
        model: Any = net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        accum = Accumulator(2, accelerator=accelerator, accumulate_dtype=torch.float32)
        with pytest.raises(ValueError, match="reduce_dtype"), accum(model):
            pass
    with sharding(rank) as accelerator:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        accum = Accumulator(1, accelerator=accelerator)
        data = items(rank, [3, 3, 3][: 2 + rank])
        with pytest.raises(RuntimeError, match="drop_last"):
            for item in accum.batches(data):
                with accum(model):
                    accelerator.backward(loss(model, item))
                    optimizer.step()
                    optimizer.zero_grad()
        accum.discard()
        with pytest.raises(Exception, match="do not support `clip_grad_value_`"), accum(model):
            accelerator.backward(loss(model, data[0]))
            accelerator.clip_grad_value_(model.parameters(), 1.0)


def test_what_a_sharded_accelerate_loop_can_not_do_is_said(ranks: Ranks) -> None:
    """On all ranks."""
    ranks.run(2, refused)


def saving(rank: int, sync: str, at: int, directory: Path, resume: bool) -> list[Tensor]:
    """Save with save_state after `at` micro-batches and go on; or load that and go on from it."""
    warnings.filterwarnings("ignore", message="deferring the reduction")
    with sharding(rank) as accelerator:
        torch.manual_seed(7 if resume else 1)
        model: Any = net()
        if resume:
            nn.init.zeros_(model[0].weight)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        accum = Accumulator(STEPS, accelerator=accelerator, sync=sync)
        if resume:
            accelerator.load_state(str(directory))
        for index, item in enumerate(items(rank, [3] * 9)):
            if resume and index < at:
                continue
            if index == at and not resume and at < STEPS:
                with pytest.warns(UserWarning, match="Save later, or use Checkpointer"):
                    accelerator.save_state(str(directory))
            elif index == at and not resume:
                accelerator.save_state(str(directory))
            with accum(model, weight=len(item[0])):
                accelerator.backward(loss(model, item))
                optimizer.step()
                optimizer.zero_grad()
        assert accum.updates == 3
        return whole(model.parameters())


@pytest.mark.parametrize("at", [4, 6])
@pytest.mark.parametrize("sync", ["last", "every"])
def test_save_state_takes_the_window_of_a_sharded_model_along(
    ranks: Ranks, sync: str, at: int, tmp_path: Path
) -> None:
    """With the sums that each rank keeps to itself; and the run that saves is not changed."""
    quiet = ranks.run(2, saving, sync, 99, tmp_path / "none", False)
    saved = ranks.run(2, saving, sync, at, tmp_path / "some", False)
    rest = ranks.run(2, saving, sync, at, tmp_path / "some", True)
    for one, two, three in zip(quiet, saved, rest, strict=True):
        assert all(map(torch.equal, one, two))
        assert all(map(torch.equal, one, three))


@pytest.mark.parametrize("sync", ["last", "every"])
def test_save_state_before_the_first_update_of_a_sharded_model_is_warned_of(
    ranks: Ranks, sync: str, tmp_path: Path
) -> None:
    """Its files can't be loaded; the run goes on as it would have."""
    quiet = ranks.run(2, saving, sync, 99, tmp_path / "none", False)
    saved = ranks.run(2, saving, sync, 2, tmp_path / "some", False)
    for one, two in zip(quiet, saved, strict=True):
        assert all(map(torch.equal, one, two))
    with pytest.raises(RankError, match="Missing key in checkpoint state_dict"):
        ranks.run(2, saving, sync, 2, tmp_path / "some", True)


def keeping(rank: int, sync: str, directory: Path, resume: bool) -> tuple[int, list[Tensor]]:
    """A run with a Checkpointer that saves after each micro-batch; the loop clips and steps."""
    warnings.filterwarnings("ignore", message="deferring the reduction")
    with sharding(rank) as accelerator:
        torch.manual_seed(7 if resume else 1)
        model: Any = nn.Sequential(*net(), nn.Dropout(0.3))  # type: ignore[arg-type]
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        data: Any = samples(14)
        loader: Any = DataLoader(data, batch_size=1, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accum = Accumulator(STEPS, accelerator=accelerator, sync=sync)
        ran = 0
        with Checkpointer(directory, accum, loader=loader, every=1, keep=99) as checkpoint:
            if resume:
                assert checkpoint.resume() is not None
            for item in accum.batches(loader):
                with accum(model):
                    accelerator.backward(loss(model, item))
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
                ran += 1
        return ran, whole(model.parameters())


@pytest.mark.parametrize("sync", ["last", "every"])
def test_a_checkpointer_of_a_sharded_accelerate_loop(
    ranks: Ranks, sync: str, tmp_path: Path
) -> None:
    """Each micro-batch is a place to go on from, to the same bits."""
    quiet = ranks.run(2, keeping, sync, tmp_path / "all", False)
    saved = list_checkpoints(tmp_path / "all")
    assert len(saved) == 7
    for index, checkpoint in enumerate(saved):
        directory = tmp_path / f"{index}"
        shutil.copytree(checkpoint, directory / checkpoint.name)
        for one, other in zip(quiet, ranks.run(2, keeping, sync, directory, True), strict=True):
            assert other[0] == 6 - index
            assert all(map(torch.equal, one[1], other[1]))
