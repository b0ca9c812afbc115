"""FSDP2: where the running sum of a `fully_shard` model is, and how it is reduced.

While the reduction is deferred, each rank keeps the gradients of the whole model, not of its
shard, in private fields. Everything that touches them is in this file (read from torch 2.13,
torch/distributed/fsdp/_fully_shard).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def roots(model: nn.Module) -> list[FSDPModule]:
    """The outermost `fully_shard` modules in `model`."""
    if isinstance(model, FSDPModule):
        return [model]
    return [root for child in model.children() for root in roots(child)]


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `model` by name, of `fully_shard` modules always the shards.

    After a forward without a backward (an evaluation) a root goes on holding whole parameters, and
    `model.parameters()` would give those.
    """
    shards = {
        id(p._unsharded_param): p.sharded_param
        for root in roots(model)
        for p in _parameters(root)
        if hasattr(p, "_unsharded_param")
    }
    return {name: shards.get(id(p), p) for name, p in model.named_parameters()}


def defer(root: FSDPModule, deferred: bool) -> None:
    """Let the next backward of `root` keep its gradients local, or reduce-scatter all of them."""
    root.set_requires_gradient_sync(not deferred)


@contextmanager
def untouched(roots: Iterable[FSDPModule]) -> Iterator[None]:
    """Let a backward through `roots`, whose window is another one, add nothing nor reduce."""
    roots = list(roots)
    found = [whole for r in roots for p in _parameters(r) if (whole := _whole(p)) is not None]
    frozen = [p for p in found if p.requires_grad]
    for root in roots:
        defer(root, True)
    for parameter in frozen:  # AccumulateGrad passes over what requires no gradient
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for root in roots:
            defer(root, False)


def sums(root: FSDPModule) -> list[Tensor]:
    """The unsharded running sums of `root` while the reduction is deferred, each once."""
    found = [t for p in _parameters(root) for t in (_grad(p), p.unsharded_accumulated_grad)]
    return list({id(t): t for t in found if t is not None}.values())


def clear(root: FSDPModule) -> None:
    """Forget them."""
    for parameter in _parameters(root):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def reduce_now(root: FSDPModule) -> None:
    """Reduce-scatter what was deferred, outside of a backward. All ranks have to be here."""
    defer(root, False)
    root._get_fsdp_state()._lazy_init()  # if no forward has run in this process
    groups = list(_groups(root))
    for module in _modules(root):  # post_backward reads the unsharded parameters
        module.unshard()
    for group in reversed(groups):
        group.post_backward()
        group.finalize_backward()
        group._training_state = type(group._training_state).IDLE


def named(root: FSDPModule, names: dict[int, str]) -> dict[str, Tensor]:
    """The unsharded sums by `names`, a map from the id of a sharded parameter to its name."""
    found = {}
    for parameter in _parameters(root):
        name = names[id(parameter.sharded_param)]
        if (grad := _grad(parameter)) is not None:
            found[f"{name}#unsharded"] = grad
        if parameter.unsharded_accumulated_grad is not None:
            found[f"{name}#accumulated"] = parameter.unsharded_accumulated_grad
    return found


def restore(root: FSDPModule, names: dict[int, str], saved: dict[str, Tensor]) -> None:
    """Make `saved`, as `named` gave it, the unsharded sums of `root` in a new process."""
    for module in _modules(root):  # in a new process the unsharded parameters do not exist yet
        module.unshard()
        module.reshard()
    for parameter in _parameters(root):
        name = names[id(parameter.sharded_param)]
        if (grad := saved.get(f"{name}#unsharded")) is not None:
            parameter._unsharded_param.grad = grad.to(parameter._unsharded_param.device)
        if (grad := saved.get(f"{name}#accumulated")) is not None:
            parameter.unsharded_accumulated_grad = grad.to(parameter._unsharded_param.device)


def deferred_bytes(root: FSDPModule) -> int:
    """Bytes that deferring costs on each rank: the gradients of the whole model."""
    return sum(numel * dtype.itemsize for numel, dtype in _sums_to_be(root))


def adds_in(root: FSDPModule, dtype: torch.dtype) -> bool:
    """Whether all gradients of `root` are added up and reduced in at least `dtype`."""
    return all(own.itemsize >= dtype.itemsize for _, own in _sums_to_be(root))


def _sums_to_be(root: FSDPModule) -> Iterator[tuple[int, torch.dtype]]:
    """Number of elements and dtype of each deferred sum; known before the first forward."""
    for group in _groups(root):
        policy = group.mp_policy
        for parameter in group.fsdp_params:
            if (sharded := parameter.sharded_param).requires_grad:
                dtype = policy.reduce_dtype or policy.param_dtype or sharded.dtype
                yield sharded.numel(), dtype


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """`tensor` as a plain one; all ranks have to be here."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """`tensor`, this rank's part, as a gradient of `parameter`."""
    if isinstance(tensor, DTensor) or not isinstance(parameter, DTensor):
        return tensor
    return DTensor.from_local(
        tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _modules(root: FSDPModule) -> list[FSDPModule]:
    return [m for m in root.modules() if isinstance(m, FSDPModule)]  # type: ignore[attr-defined]


def _groups(root: FSDPModule) -> Iterator[Any]:
    seen = set()
    for module in _modules(root):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def _parameters(root: FSDPModule) -> Iterator[Any]:
    for group in _groups(root):
        yield from group.fsdp_params


def _whole(parameter: Any) -> Tensor | None:
    """The parameter that runs in forward; there is none before the first."""
    whole: Tensor | None = getattr(parameter, "_unsharded_param", None)
    return whole


def _grad(parameter: Any) -> Tensor | None:
    return None if (whole := _whole(parameter)) is None else whole.grad
