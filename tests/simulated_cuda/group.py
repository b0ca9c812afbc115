"""Process groups that reduce on the simulated devices, as NCCL does: they take tensors on the
rank's own device and no others. `simulated_nccl` stands for "nccl", `simulated_mixed` for
"cpu:gloo,cuda:nccl"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simulated_cuda import device

TIMEOUT = timedelta(seconds=8)


@dataclass(frozen=True)
class Collective:
    """A call of a group."""

    name: str
    device: str
    elements: int


calls: list[Collective] = []
"""The collectives of this process, in order."""


class _Done(dist._Work):  # type: ignore[misc]
    """Work that is done: a stream would wait for it, not the host."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        devices = {t.device for t in result if t.is_cuda}
        self._future = torch.futures.Future(devices=list(devices) or None)
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def get_future(self) -> Any:
        """A future that has its value."""
        return self._future


class SimulatedNccl(dist.ProcessGroup):  # type: ignore[misc]
    """Reduces through gloo what is on the device of this rank."""

    def __init__(self, store: dist.Store, rank: int, size: int, mixed: bool) -> None:
        super().__init__(rank, size)
        self._mixed = mixed
        # two channels: a rank that reduces on the device is not met by one that does on the CPU
        self._channels = {
            kind: dist.ProcessGroupGloo(dist.PrefixStore(kind, store), rank, size, TIMEOUT)
            for kind in ("cpu", "cuda")
        }

    def _on_host(self, name: str, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """The channel for `tensors`, and copies of them in host memory."""
        first = tensors[0].device
        if first.type == "cpu" and not self._mixed:
            raise RuntimeError("No backend type associated with device type cpu")
        if first.type == "cuda" and first.index != dist.get_rank():
            raise RuntimeError(f"Duplicate GPU detected: rank {dist.get_rank()} uses {first}")
        if any(t.device != first for t in tensors):
            raise RuntimeError("tensors of one collective are on several devices")
        calls.append(Collective(name, str(first), sum(t.numel() for t in tensors)))
        with device.silence():
            return self._channels[first.type], [t.detach().cpu().clone() for t in tensors]

    def _put(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        with device.silence(), torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value.view(tensor.shape))

    def _reduce(self, channel: Any, values: list[Tensor], operation: Any) -> None:
        """Reduce host memory in place; gloo has no mean."""
        options = dist.AllreduceOptions()
        mean = operation == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if mean else operation
        for value in values:
            channel.allreduce([value], options).wait()
            if mean:
                value /= self.size()

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        """Sum, mean, minimum or maximum over the ranks."""
        channel, values = self._on_host("allreduce", tensors)
        self._reduce(channel, values, getattr(options, "reduceOp", dist.ReduceOp.SUM))
        self._put(tensors, values)
        return _Done(list(tensors))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        """The root's values on all ranks."""
        channel, values = self._on_host("broadcast", tensors)
        root = dist.BroadcastOptions()
        root.rootRank = options.rootRank
        for value in values:
            channel.broadcast([value], root).wait()
        self._put(tensors, values)
        return _Done(list(tensors))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """The values of all ranks on each."""
        channel, values = self._on_host("allgather", inputs)
        for output, value in zip(outputs, values, strict=True):
            gathered = [torch.empty_like(value) for _ in output]
            channel.allgather([gathered], [value]).wait()
            self._put(output, gathered)
        return _Done([t for output in outputs for t in output])

    def _allgather_base(self, output: Any, value: Any, options: Any = None) -> Any:
        channel, (own,) = self._on_host("allgather", [value])
        gathered = [torch.empty_like(own) for _ in range(self.size())]
        channel.allgather([gathered], [own]).wait()
        self._put([output], [torch.cat([g.reshape(-1) for g in gathered])])
        return _Done([output])

    def _reduce_scatter_base(self, output: Any, value: Any, options: Any = None) -> Any:
        channel, (own,) = self._on_host("reduce_scatter", [value])
        self._reduce(channel, [own], getattr(options, "reduceOp", dist.ReduceOp.SUM))
        self._put([output], [own.reshape(-1).chunk(self.size())[self.rank()]])
        return _Done([output])

    def barrier(self, opts: Any = None) -> Any:
        """Waits for the device, too."""
        device._wait()
        self._channels["cuda"].barrier().wait()
        return _Done([])

    def _get_backend(self, device: torch.device) -> Any:
        """What has the group's options."""
        return SimpleNamespace(options=SimpleNamespace(_timeout=TIMEOUT))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """As DTensor gathers."""
        for output, value in zip(outputs, inputs, strict=True):
            self._allgather_base(output, value)
        return _Done(list(outputs))

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, options: Any = None
    ) -> Any:
        """As DTensor reduces."""
        for output, value in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, value, options)
        return _Done(list(outputs))

    # torch has two names for each of these, and calls one or the other
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @property
    def group_name(self) -> str:
        """By which DeviceMesh finds it."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def getBackendName(self) -> str:
        """What torch shows."""
        return "simulated_mixed" if self._mixed else "simulated_nccl"


def _creator(mixed: bool) -> Callable[..., SimulatedNccl]:
    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SimulatedNccl:
        return SimulatedNccl(store, rank, size, mixed)

    return create


dist.Backend.register_backend("simulated_nccl", _creator(False), devices=["cuda"])
dist.Backend.register_backend("simulated_mixed", _creator(True), devices=["cpu", "cuda"])
