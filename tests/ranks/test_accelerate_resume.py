"""A run stopped inside of a window on ranks, with Accelerate or plain DDP: it goes on exactly."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator, Checkpointer

from .harness import Ranks
from .reference import Gradients, equal, grads, items, parameters
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
