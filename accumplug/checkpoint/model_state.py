"""A model's state: its weights, and what a forward may change between two updates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from accumplug.checkpoint import dtensor_shards
from accumplug.parallel import fsdp
from accumplug.storage.codec import TensorShard

LARGE = 1 << 20  # bytes of a buffer that is left out while nobody has written into it

Fingerprint = tuple[Any, ...]
"""Equal fingerprints: the tensors are the same ones, and nobody has written into them since."""


def unwrap_model(model: nn.Module) -> nn.Module:
    """`model` without DistributedDataParallel and torch.compile around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def constants(model: nn.Module) -> dict[int, Fingerprint]:
    """Fingerprints of large buffers that are in no state_dict: masks and tables, mostly.

    `forward_state` leaves them out for as long as they stay as they are now: whoever builds the
    model again builds them again.
    """
    return {
        id(buffer): fingerprint(buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if name in module._non_persistent_buffers_set
        and buffer is not None
        and buffer.nbytes > LARGE
    }


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Of one tensor; of a sharded one, of its shard."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.data_ptr(), tensor._version


def parameters(model: nn.Module, sharded: bool) -> Iterable[nn.Parameter]:
    """Those of `model`; of a sharded one the shards."""
    return fsdp.named_parameters(model).values() if sharded else model.parameters()


def forward_state(model: nn.Module, constants: Mapping[int, Fingerprint]) -> dict[str, Any]:
    """The buffers of `model`, in its state_dict or not, and the extra state of its modules."""
    buffers: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            known = None if buffer is None else constants.get(id(buffer))
            if known is None or known != fingerprint(buffer):
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extra[prefix] = module.get_extra_state()
    return {"buffers": buffers, "extra": extra}


def load_forward_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `forward_state` gave. What it left out stays as it is."""
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, value in state["buffers"].items():
            prefix, _, last = name.rpartition(".")
            _set_buffer(modules[prefix], last, value)
    for prefix, value in state["extra"].items():
        modules[prefix].set_extra_state(value)


def _set_buffer(module: nn.Module, name: str, value: Any) -> None:
    own = module._buffers[name]
    if isinstance(value, TensorShard):
        value = dtensor_shards.to_dtensor([value], own)
    same = own is not None and value is not None
    if same and (own.dtype, own.shape) == (value.dtype, value.shape):  # type: ignore[union-attr]
        own.copy_(value)  # type: ignore[union-attr]
    elif own is not None or value is not None:  # it has come, gone or grown since the model's start
        first = next(module.parameters(), torch.empty(0)) if own is None else own
        module._buffers[name] = None if value is None else value.clone().to(first.device)


def load_weights(model: nn.Module, states: Sequence[Any], left_out: Collection[str] = ()) -> None:
    """Load the state_dict of `model` that one rank, or all of them, have saved.

    The names in `left_out` are not in it, and stay as they are.

    Raises:
        ValueError: a tensor has another dtype here; load_state_dict would convert it silently.
    """
    own = model.state_dict()
    state = dtensor_shards.assemble(states, own)
    for name, value in own.items():
        saved = state.get(name)
        if isinstance(saved, Tensor) and isinstance(value, Tensor) and saved.dtype != value.dtype:
            raise ValueError(f"{name} is {value.dtype} here and {saved.dtype} in the checkpoint")
    if not left_out:
        model.load_state_dict(state)
        return
    missing, unexpected = model.load_state_dict(state, strict=False)
    if wrong := [*(set(missing) - set(left_out)), *unexpected]:
        raise ValueError(f"{', '.join(sorted(wrong))}: in one of checkpoint and model only")
