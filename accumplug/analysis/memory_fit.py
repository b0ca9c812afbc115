"""Whether a micro-batch of some size fits in memory: by running it, and the same on all ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from accumplug.analysis.batch_tree import items_in, mapped, take
from accumplug.analysis.bench import PeakMemory
from accumplug.analysis.sync_counter import call_loss
from accumplug.analysis.user_target import Target

__all__ = ["Trial", "launched_ranks"]


class Trial:
    """Runs one update on micro-batches of a size, and says whether memory sufficed.

    A micro-batch repeats the rows of the target's batch as often as needed; the optimizer is an
    AdamW that leaves the weights where they are. On the CPU, where the system ends a process
    that takes too much, a size is not tried if what an item took before says that it won't fit.
    """

    def __init__(self, target: Target, device: torch.device) -> None:
        self._target = target
        self._device = device
        self._model = target.model.to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, weight_decay=0.0)
        self._memory = PeakMemory(device)
        self._per_item = 0.0
        norms = [m for m in self._model.modules() if isinstance(m, _BatchNorm) and m.training]
        self._least = 2 if norms else 1  # BatchNorm refuses a single item

    def __call__(self, size: int) -> bool:
        """Try a micro-batch of `size` items."""
        if self._device.type == "cpu" and self._per_item * size > available_memory():
            return False
        self._memory.restart()
        before = self._memory.bytes()
        try:
            self._update(size)
        except (torch.OutOfMemoryError, MemoryError):
            return False
        except RuntimeError as error:
            if "allocate memory" not in str(error):  # the CPU's allocator, torch 2.13
                raise
            return False
        finally:
            self._model.zero_grad(set_to_none=True)
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        self._per_item = max(0, self._memory.bytes() - before) / size
        return True

    def _update(self, size: int) -> None:
        def moved(value: Any) -> Any:
            return value.to(self._device) if isinstance(value, Tensor) else NotImplemented

        rows = torch.arange(max(size, self._least)) % items_in(self._target.batch)
        batch = mapped(take(self._target.batch, rows), moved)
        for _ in range(2):  # the second pass adds to a gradient that is there, as in a window
            torch.autograd.backward(call_loss(self._target.loss_fn, self._model, batch))
        self._optimizer.step()


def available_memory() -> float:
    """Give the bytes that the system can still hand out, on Linux; elsewhere no limit."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return float(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float("inf")


@contextmanager
def launched_ranks(backend: str | None = "gloo") -> Iterator[tuple[int, Callable[[int], int]]]:
    """Give the number of ranks, and a function that finds the smallest number over them.

    Under torchrun a process group is made, unless there is one, and taken down again. `backend`
    None lets torch choose one for each kind of device.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    made_group = launched > 1 and not dist.is_initialized()
    if made_group:
        dist.init_process_group(backend)
    try:
        yield (dist.get_world_size() if dist.is_initialized() else 1), _smallest
    finally:
        if made_group:
            dist.destroy_process_group()


def _smallest(number: int) -> int:
    if not dist.is_initialized():
        return number
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, number)
    return min(found)
