"""A run stopped inside of a window on ranks, with Accelerate or plain DDP: it goes on exactly."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator, Checkpointer
from accumplug.storage.layout import list_checkpoints

from .harness import RankError, Ranks
from .reference import Gradients, equal, error, grads, items, parameters
from .test_accelerate import accelerated

STEPS = 4


class Sided(nn.Module):
    """`side` takes part in the first micro-batch of a window only."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head, self.side = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        """The head of the mixture, and the side if `both`."""
        self.seen += x.detach().abs().mean()  # other values on each rank
        out: Tensor = self.head(self.mix(x).tanh()) / (1 + self.seen)
        return out + self.side(x) if both else out


def sided(
    rank: int, way: str, directory: Path, count: int, at: int, resume: bool
) -> tuple[list[Gradients], list[Tensor]]:
    """Train 12 micro-batches, or up to `at` and save, or from there on; the loop steps itself."""
    torch.manual_seed(7 if resume else 1)
    net = Sided()
    parts: list[Any] = [[*net.mix.parameters(), *net.side.parameters()], [*net.head.parameters()]]
    groups = parts if count == 2 else [net.parameters()]
    optimizers: list[Any] = [torch.optim.AdamW(group, lr=0.05) for group in groups]
    model: Any = net
    with ExitStack() as stack:
        accelerator = None
        if way == "plain":
            model = DistributedDataParallel(net, find_unused_parameters=True)
            accum = Accumulator(STEPS)
        else:
            handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
            accelerator = stack.enter_context(accelerated(rank, kwargs_handlers=handlers))
            model, *optimizers = accelerator.prepare(model, *optimizers)
            accum = Accumulator(STEPS, accelerator=accelerator)
        checkpoint = None
        if way != "save_state":
            named = {} if accelerator else {f"optimizer{i}": o for i, o in enumerate(optimizers)}
            checkpoint = stack.enter_context(
                Checkpointer(directory, accum, model=None if way == "prepared" else model, **named)
            )
            assert (checkpoint.resume() is not None) == resume
        elif resume:
            assert accelerator is not None
            accelerator.load_state(str(directory))
        assert accum.micro_batches == (at if resume else 0)
        seen: list[Gradients] = []
        for x, y in items(rank, [3] * 12)[accum.micro_batches :]:
            with accum(model, weight=len(x)) as micro:
                accum.backward((model(x, accum.pending == 0) - y).square().mean())
                if micro.closes:
                    seen.append(grads(net))
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            if accum.micro_batches == at and not resume:
                if checkpoint is not None:
                    checkpoint.save()
                elif accelerator is not None:
                    accelerator.save_state(str(directory))
        return seen, parameters(net)


@pytest.mark.parametrize("at", [2, 7])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("way", ["plain", "Checkpointer", "prepared", "save_state"])
def test_a_part_that_only_the_first_micro_batch_uses_is_reduced_after_a_resume(
    ranks: Ranks, tmp_path: Path, way: str, count: int, at: int
) -> None:
    """Its gradient is that of all ranks, bit for bit as in the run that was not stopped."""
    whole = ranks.run(2, sided, way, tmp_path / "a", count, at, False)
    rest = ranks.run(2, sided, way, tmp_path / "a", count, at, True)
    for (seen, after), (later, end) in zip(whole, rest, strict=True):
        assert all(map(equal, zip(seen[at // STEPS :], later, strict=True)))
        assert equal([after, end])
    assert equal([end for _, end in rest])
    assert equal([later[0] for later, _ in rest])


class Wide(nn.Module):
    """Its gradients come in another order than its parameters, and fill several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(61, 2)
        self.first, self.middle = nn.Linear(3, 67), nn.Linear(67, 61)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x).tanh()).tanh())
        return out


def wide(
    rank: int, way: str, directory: Path, at: int, resume: bool, counts: tuple[int, ...] = ()
) -> tuple[list[Gradients], list[Tensor]]:
    """Train 12 micro-batches (or `counts` through batches), or up to `at` and save, or the rest."""
    torch.manual_seed(7 if resume else 1)
    net = Wide()
    model: Any = net
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.05)
    with ExitStack() as stack:
        handlers = [DistributedDataParallelKwargs(bucket_cap_mb=0.01)]
        accelerator = stack.enter_context(accelerated(rank, kwargs_handlers=handlers))
        model, optimizer = accelerator.prepare(model, optimizer)
        accum = Accumulator(STEPS, accelerator=accelerator, optimizer=optimizer)
        data: Any = items(rank, [3] * (counts[rank] if counts else 12))
        checkpoint = None
        if way != "save_state":
            named = {"loader": data, "every": 1, "keep": 99} if counts else {}
            checkpoint = stack.enter_context(
                Checkpointer(directory, accum, model=model if way == "model=" else None, **named)
            )
            assert (checkpoint.resume() is not None) == resume
        elif resume:
            accelerator.load_state(str(directory))
        seen: list[Gradients] = []
        start = accum.micro_batches
        if way != "save_state":
            accum.on_update(lambda: seen.append([p.detach().clone() for p in net.parameters()]))
        for x, y in accum.batches(data) if counts else data[start:]:
            with accum(model, weight=len(x)) as micro:
                accum.backward((model(x) - y).square().mean())
            if way == "save_state" and micro.closes:
                seen.append([p.detach().clone() for p in net.parameters()])
            if accum.micro_batches == at and not resume:
                if checkpoint is not None:
                    checkpoint.save()
                else:
                    accelerator.save_state(str(directory))
        return seen, parameters(net)


@pytest.mark.parametrize("at", [4, 5, 7])
@pytest.mark.parametrize("way", ["model=", "prepared", "save_state"])
def test_three_ranks_sum_in_the_same_buckets_after_a_resume(
    ranks: Ranks, tmp_path: Path, way: str, at: int
) -> None:
    """Accelerate does not keep the wrapper, which is known from the first block on."""
    whole = ranks.run(3, wide, way, tmp_path / "a", at, False)
    rest = ranks.run(3, wide, way, tmp_path / "a", at, True)
    for (seen, after), (later, end) in zip(whole, rest, strict=True):
        assert len(seen) == 3
        assert all(map(equal, zip(seen[at // STEPS :], later, strict=True)))
        assert equal([after, end])


@pytest.mark.parametrize("counts", [(12, 12, 5), (12, 12, 12)], ids=str)
def test_a_rank_without_data_keeps_nobody_waiting_after_a_resume(
    ranks: Ranks, tmp_path: Path, counts: tuple[int, ...]
) -> None:
    """It runs no block, so the wrapper of a prepared model stays unknown there."""
    whole = ranks.run(3, wide, "prepared", tmp_path, 99, False, counts)
    saved = list_checkpoints(tmp_path)
    for place in (0, 3, 4, 6):
        directory = tmp_path / "after" / str(place)
        shutil.copytree(saved[place], directory / saved[place].name)
        rest = ranks.run(3, wide, "prepared", directory, 99, True, counts)
        for (_, after), (later, end) in zip(whole, rest, strict=True):
            assert later
            assert error(end, after) <= 1e-6
            assert equal([end, after]) or len(set(counts)) > 1


def test_a_rank_whose_data_had_ended_before_the_resume_is_told_to_name_its_models(
    ranks: Ranks, tmp_path: Path
) -> None:
    """It runs no block here, so it knows no wrapper; on all ranks, before an update."""
    ranks.run(3, wide, "prepared", tmp_path, 99, False, (1, 12, 9))
    for newer in list_checkpoints(tmp_path)[4:]:
        shutil.rmtree(newer)
    with pytest.raises(RankError, match=r"(?s)rank 0: .*models=\[.*rank 1: .*models=\[.*rank 2: "):
        ranks.run(3, wide, "prepared", tmp_path, 99, True, (1, 12, 9))
