"""The data-parallel group: who the ranks are, and small sums over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class DataParallelGroup:
    """The data-parallel group: its size, and sums over it.

    Without `torch.distributed` it is one rank, and a sum is what was given.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group

    @property
    def size(self) -> int:
        """Number of ranks of the group; 1 without a process group."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size(self.group)
        return 1

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(self.group)
        return 0

    def sum(self, values: Sequence[float | Tensor]) -> list[float] | list[Tensor]:
        """Sum each of `values` (numbers, or 0-dim tensors on one device) over the ranks.

        Returns floats if that costs no wait for a device; else 0-dim tensors of float64 (float32
        where the device has no float64). One rank gets back what it gave.

        Raises:
            RuntimeError: another rank has ended, or has not come within the group's timeout.
        """
        if self.size == 1:
            return list(values)  # type: ignore[return-value]  # a list of either, as given
        device = next((v.device for v in values if isinstance(v, Tensor)), None)
        on_device = device is not None
        device = device or self._device()
        dtype = torch.float32 if device.type == "mps" else torch.float64
        if on_device:
            sums = torch.stack([torch.as_tensor(v, dtype=dtype, device=device) for v in values])
        else:
            sums = torch.tensor(values, dtype=dtype, device=device)
        try:
            dist.all_reduce(sums, group=self.group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} waited for the other ranks to close a window, "
                f"and one of them has ended or did not come within the group's timeout. Ranks may "
                f"differ in micro-batches (with accum.batches), but not in windows: {error}"
            ) from error
        return list(sums.unbind()) if on_device or device.type != "cpu" else sums.tolist()

    def _device(self) -> torch.device:
        """A device that the group's backend can reduce on, the CPU if it can."""
        if "cpu" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cpu") if accelerator is None else accelerator
