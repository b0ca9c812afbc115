"""Copies of tensors in host memory that is used again for each save."""

from __future__ import annotations

import torch
from torch import Tensor

from accumplug.storage.codec import Encoded
from accumplug.storage.safetensors_io import fill


class HostBuffers:
    """Host memory by part and name; pinned where the tensors are on a GPU.

    What `copy` returned must not be in use any more when it is called again for that part.
    """

    def __init__(self) -> None:
        self._held: dict[str, dict[str, Tensor]] = {}
        self._room: dict[str, dict[str, Tensor]] = {}
        """What was copied to once: gradients that are gone at a window's start come again."""

    def copy(self, part: str, encoded: Encoded) -> Encoded:
        """`encoded` with copies of its tensors. Waits until they are made."""
        old = self._room.setdefault(part, {})
        held = {name: _room(old.get(name), tensor) for name, tensor in encoded.tensors.items()}
        self._held[part] = held
        old.update(held)
        for name, tensor in encoded.tensors.items():
            if tensor.is_cpu and tensor.numel() and tensor.stride() == held[name].stride():
                fill(held[name], tensor.detach())
            else:
                held[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in encoded.tensors.values()}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return Encoded(encoded.tree, held)

    def holds(self, part: str, encoded: Encoded) -> bool:
        """Whether the last copy of `part` has the tensors of `encoded`, bit for bit."""
        held = self._held.get(part)
        if held is None or held.keys() != encoded.tensors.keys():
            return False
        return all(_same(held[name], tensor) for name, tensor in encoded.tensors.items())


def _room(old: Tensor | None, tensor: Tensor) -> Tensor:
    """HostBuffers for a copy of `tensor`: the `old` one if it fits."""
    dense = torch.empty_like(tensor, device="meta")  # as `tensor`, without gaps and overlaps
    if old is not None and (old.dtype, old.shape, old.stride()) == (
        dense.dtype,
        dense.shape,
        dense.stride(),
    ):
        return old
    return torch.empty_strided(
        dense.shape, dense.stride(), dtype=dense.dtype, device="cpu", pin_memory=tensor.is_cuda
    )


def _same(held: Tensor, tensor: Tensor) -> bool:
    if (held.dtype, held.shape) != (tensor.dtype, tensor.shape):
        return False
    one, other = (t.detach().cpu().contiguous().reshape(-1) for t in (held, tensor))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
