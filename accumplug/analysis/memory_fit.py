"""Finding out whether a micro-batch fits in memory, by running it; and the ranks of a launcher."""

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

from accumplug.analysis.bench import PeakMemory
from accumplug.analysis.sync_counter import call_loss
from accumplug.analysis.user_target import Target
from accumplug.dataloading.batch_tree import items_in, mapped, take

__all__ = ["Trial", "launched_ranks", "rank_device"]


class Trial:
    """Runs one update on micro-batches of a given size; returns whether there was enough memory.

    A micro-batch repeats the rows of the target's batch as often as needed; the optimizer is an
    AdamW that does not change the weights. On the CPU, where the system kills a process that takes
    too much memory, a size is not tried if the memory per item of smaller sizes rules it out.
    """

    def __init__(self, target: Target, device: torch.device) -> None:
        if items_in(target.batch) < 1:
            raise ValueError("the batch has no items to make a micro-batch of")
        self._target = target
        self._device = device
        self._model = target.model.to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, weight_decay=0.0)
        self._memory = PeakMemory(device)
        self._per_item = 0.0
        norms = [m for m in self._model.modules() if isinstance(m, _BatchNorm) and m.training]
        self._least = 2 if norms else 1  # BatchNorm refuses a single item

    def __call__(self, size: int) -> bool:
        """Run a micro-batch of `size` items; return whether it fits."""
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
    """Return the bytes that the system has available on Linux, and infinity elsewhere."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return float(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float("inf")


@contextmanager
def launched_ranks(backend: str | None = "gloo") -> Iterator[tuple[int, Callable[[int], int]]]:
    """Yield the number of ranks, and a function that returns the smallest number over them.

    Under torchrun a process group is made, unless there is one, and destroyed at the end.
    `backend=None` lets torch choose one for each kind of device.
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


def rank_device(name: str | None = None) -> torch.device:
    """Return this rank's device, and make it the current one of its kind.

    Under torchrun a device without an index is the one with the rank's number on its machine
    (LOCAL_RANK), so that the ranks do not all use the first one. `name` is a device as torch
    writes it, by default the accelerator, or the CPU where there is none.
    """
    # A CUDA build names its accelerator even where there is none.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(name or found or "cpu")
    if device.type == "cpu" or "LOCAL_RANK" not in os.environ:
        return device
    if device.index is None:
        index, count = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
        if index >= count:
            raise ValueError(f"rank {index} of this machine has no device: torch sees {count}")
        device = torch.device(device.type, index)
    torch.accelerator.set_device_index(device)
    return device


def _smallest(number: int) -> int:
    if not dist.is_initialized():
        return number
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, number)
    return min(found)
