"""The data-parallel group: who the ranks are, and small sums over them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias  # Any: of private parts of a group

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from accumplug.parallel.private import require

Value: TypeAlias = "float | Tensor"
"""A number, or a 0-dim tensor that nobody has read."""


class DataParallelGroup:
    """The data-parallel group: its size, and sums over it.

    Without `torch.distributed` it is one rank, and a sum is what was given. Numbers that the host
    knows are summed in host memory, so that no rank waits for its device: over the group itself if
    it has a CPU backend ("cpu:gloo,cuda:nccl", gloo), else over a gloo group of the same ranks that
    is made for it. Which of the two follows from the group alone.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.compared = False
        """The options of all ranks have been found to be the same."""
        self._options = ""
        self._host: ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks of the group; 1 without a process group."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group) if self.size > 1 else 0

    def compare(self, options: Mapping[str, object], wait: bool) -> None:
        """Compare `options` with those of the other ranks: all of them if `wait`, else those that
        have come here. Through the process group's store, as collectives may differ with options.

        Raises:
            ValueError: on all ranks, with the value of each.
        """
        if self.size == 1:
            self.compared = True
            return
        # torch 2.13: there is no public name for the store of the default group
        require(dist.distributed_c10d, ["_get_default_store"], "comparing options between ranks")
        store = dist.distributed_c10d._get_default_store()
        if not self._options:
            name = f"accumplug/options/{dist.get_process_group_ranks(self.group)}"
            self._options = f"{name}/{store.add(f'{name}/{self.rank}', 1)}"  # the same on all ranks
            store.set(f"{self._options}/{self.rank}", json.dumps(options))
        keys = [f"{self._options}/{rank}" for rank in range(self.size)]
        with suppress(RuntimeError):
            store.wait(keys if wait else keys[:0])
        told = {r: json.loads(store.get(key)) for r, key in enumerate(keys) if store.check([key])}
        self.compared = len(told) == self.size
        if wait and not self.compared:
            missing = ", ".join(str(r) for r in range(self.size) if r not in told)
            raise RuntimeError(
                f"rank {self.rank} of {self.size} waited for rank {missing} before the first "
                f"micro-batch, where all ranks compare their options"
            )
        for name, own in options.items():
            values = {rank: its[name] for rank, its in told.items()}
            if any(value != own for value in values.values()):
                store.set(f"{self._options}/{self.rank}/read", "")
                with suppress(RuntimeError):  # who serves the store must not end before all read
                    store.wait([f"{key}/read" for key in keys], timedelta(seconds=10))
                each = ", ".join(f"{value!r} on rank {rank}" for rank, value in values.items())
                raise ValueError(f"{name} differs between ranks: {each}; give all the same")

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Sum each of `numbers` over the ranks, in host memory. One rank gets back what it gave.

        Raises:
            RuntimeError: another rank has ended, or has not come within the group's timeout.
        """
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._reduce(sums, self._host_group())
        return [*sums.tolist()]

    def sum_tensors(self, values: Sequence[Value], device: torch.device) -> list[Value]:
        """Sum each of `values` (numbers, or 0-dim tensors) over the ranks, on `device`.

        All ranks have to give the same kind of `device`: that of their model. The sums are 0-dim
        tensors that nobody has waited for. One rank gets back what it gave.
        """
        if self.size == 1 or not values:
            return list(values)
        device = self._reducible(device)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        # no torch.tensor(number, device=device): that is a copy that the host waits for
        whole = [
            value.detach().to(device, dtype, non_blocking=True)
            if isinstance(value, Tensor)
            else torch.full((), value, dtype=dtype, device=device)
            for value in values
        ]
        self._reduce(sums := torch.stack(whole), self.group)
        return [*sums.unbind()]

    def agree(
        self, weight: Value, values: Sequence[Value], numbers: Sequence[float], device: torch.device
    ) -> tuple[Value, list[Value], list[float]]:
        """Sum a weight, `values` and `numbers` over the ranks, in two reductions at most.

        `values` are summed on `device`, and the weight with them if any rank's is there. All ranks
        learn in host memory whether it is, so that none reduces where others do not.
        """
        if self.size == 1:
            return weight, list(values), list(numbers)
        if self._reducible(device).type == "cpu":  # nobody waits for tensors
            total, *sums = self.sum([float(v) for v in (weight, *values, *numbers)])
            return total, [*sums[: len(values)]], sums[len(values) :]
        known, unread = (0.0, 1.0) if isinstance(weight, Tensor) else (weight, 0.0)
        total, ranks_unread, *sums = self.sum([known, unread, *numbers])
        reduced = self.sum_tensors([*values, *([weight] if ranks_unread else [])], device)
        return reduced.pop() if ranks_unread else total, reduced, sums

    def _reducible(self, device: torch.device) -> torch.device:
        """`device` if the group can reduce there, else where it can (models in host memory)."""
        if self.size == 1 or device.type in dist.get_backend_config(self.group):
            return device
        accelerator = torch.accelerator.current_accelerator()
        if device.type != "cpu" or accelerator is None:
            return device
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    def _host_group(self) -> ProcessGroup | None:
        """The same ranks where they reduce in host memory; all of them have to be here."""
        if "cpu" in dist.get_backend_config(self.group):
            return self.group
        if self._host is None:
            group = dist.group.WORLD if self.group is None else self.group
            self._host = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=timeout_of(group, torch.accelerator.current_accelerator()),
                backend="gloo",
                use_local_synchronization=True,
            )
        return self._host

    def _reduce(self, sums: Tensor, group: ProcessGroup | None) -> None:
        try:
            dist.all_reduce(sums, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} waited for the other ranks to close a window, "
                f"and one of them has ended or did not come within the group's timeout. Ranks may "
                f"differ in micro-batches (with accum.batches), but not in windows: {error}"
            ) from error


def timeout_of(group: Any, device: torch.device | None) -> timedelta:
    """How long a collective of `group` on `device` waits for a rank."""
    # torch 2.13: no public name gives the timeout of a group
    require(group, ["_get_backend"], "the timeout of a process group")
    options = group._get_backend(device).options
    require(options, ["_timeout"], "the timeout of a process group")
    return timedelta(seconds=options._timeout.total_seconds())
