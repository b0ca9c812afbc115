"""FSDP2: where the running sum of a `fully_shard` model is, and how it is reduced.

While the reduction is deferred, each rank keeps the gradients of the whole model, not of its
shard, in private fields. Everything that touches them is in this file (read from torch 2.8 to
2.15, torch/distributed/fsdp/_fully_shard):

- `_unsharded_param.grad` has the sum in the dtype of the backward; from 2.15 on in its own dtype.
- `unsharded_accumulated_grad` has it until 2.14 if it is reduced in another dtype than that. From
  2.15 on it is another name of `_unsharded_param.grad`.
- A reduction is waited for by `FSDPModule.finalize_backward` (public, from 2.15 on), before that
  by the parameter groups' `finalize_backward`. The latter has the same name from 2.15 on and
  waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any  # of private parts, and of what hooks are given

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from accumplug.errors import MovedError
from accumplug.parallel.private import require

PURPOSE = "the deferred gradients of fully_shard"


def roots(model: nn.Module) -> list[FSDPModule]:
    """The outermost `fully_shard` modules in `model`."""
    if isinstance(model, FSDPModule):
        return [model]
    return [root for child in model.children() for root in roots(child)]


def check_names(root: FSDPModule) -> None:
    """Raise MovedError if this torch has not all that is read here, before anything is done."""
    require(root, ["_get_fsdp_state"], PURPOSE)
    for state in map(_state, _modules(root)):
        groups = "_fsdp_param_group" + "s" * (not hasattr(state, "_fsdp_param_group"))
        require(state, [groups, "_lazy_init", "_state_ctx"], PURPOSE)
    public = hasattr(root, "finalize_backward")  # from torch 2.15 on
    own = [] if public else ["finalize_backward", "_training_state"]
    for group in _groups(root):
        require(group, ["fsdp_params", "post_backward", *own], PURPOSE)
        for parameter in group.fsdp_params:
            require(parameter, ["sharded_param", "mp_policy"], PURPOSE)


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
    if getattr(_state(root)._state_ctx, "manual_backward_finalization", False):
        raise ValueError(
            "set_manual_backward_finalization(True) leaves gradients unreduced until "
            "finalize_backward(), which is after accum has read them; leave it off, and "
            "accum.flush() reduces what is left"
        )
    root.set_requires_gradient_sync(not deferred)


def check_deferred(roots: Iterable[FSDPModule], others: Iterable[nn.Parameter]) -> None:
    """Raise MovedError if a deferred backward has left no sum in `roots`, and none in `others`.

    A sum that lay elsewhere would be neither scaled nor saved nor thrown away.
    """
    roots = list(roots)
    found = (
        _grad(p) is not None or _separate(p) is not None for r in roots for p in _parameters(r)
    )
    if roots and not any(found) and all(p.grad is None for p in others):
        raise MovedError("FSDPParam._unsharded_param.grad", PURPOSE)


@contextmanager
def recorded_outputs(root: FSDPModule, outputs: list[Tensor]) -> Iterator[None]:
    """Append the output tensors of the forwards of `root` to `outputs` during a block."""

    def record(module: nn.Module, arguments: Any, output: Any) -> None:
        found, _ = tree_flatten(output)
        outputs.extend(leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad)

    handle = root.register_forward_hook(record)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def untouched(roots: Iterable[FSDPModule]) -> Iterator[None]:
    """Keep a backward from adding to or reducing `roots`, which belong to another window."""
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
    found = [t for p in _parameters(root) for t in (_grad(p), _separate(p))]
    return list({id(t): t for t in found if t is not None}.values())


def clear(root: FSDPModule) -> None:
    """Drop the deferred sums of `root`."""
    for parameter in _parameters(root):
        if _sums_separately(parameter):
            parameter.unsharded_accumulated_grad = None
        if (whole := _whole(parameter)) is not None:
            whole.grad = None


def reduce_now(root: FSDPModule) -> None:
    """Reduce-scatter what was deferred, outside of a backward. All ranks have to be here."""
    _state(root)._lazy_init()  # if no forward has run in this process
    groups = list(_groups(root))[::-1]
    for module in _modules(root):  # post_backward reads the unsharded parameters
        module.unshard()
    if hasattr(root, "finalize_backward"):
        _finalize(root, groups)
    else:
        defer(root, False)
        for group in groups:
            group.post_backward()
            group.finalize_backward()
            group._training_state = type(group._training_state).IDLE
    if sums(root):
        raise MovedError("FSDPParamGroup.post_backward", "reducing deferred gradients")


def _finalize(root: Any, groups: list[Any]) -> None:
    """The public way of torch 2.15, which reduces the groups that have had a deferred backward."""
    defer(root, True)
    for group in groups:  # those whose sum was restored have had theirs in another process
        group.post_backward()
    defer(root, False)
    root.set_manual_backward_finalization(True)
    root.finalize_backward()
    root.set_manual_backward_finalization(False)


def named(root: FSDPModule, names: dict[int, str]) -> dict[str, Tensor]:
    """The unsharded sums by `names`, a map from the id of a sharded parameter to its name."""
    found = {}
    for parameter in _parameters(root):
        name = names[id(parameter.sharded_param)]
        if (grad := _grad(parameter)) is not None:
            found[f"{name}#unsharded"] = grad
        if (grad := _separate(parameter)) is not None:
            found[f"{name}#accumulated"] = grad
    return found


def restore(root: FSDPModule, names: dict[int, str], saved: dict[str, Tensor]) -> None:
    """Make `saved`, as `named` gave it, the unsharded sums of `root` in a new process.

    They may have been saved by another version of torch, which had them in the other place.
    """
    for module in _modules(root):  # in a new process the unsharded parameters do not exist yet
        module.unshard()
        module.reshard()
    for parameter in _parameters(root):
        name, whole = names[id(parameter.sharded_param)], parameter._unsharded_param
        for grad in (saved.get(f"{name}#unsharded"), saved.get(f"{name}#accumulated")):
            if grad is None:
                continue
            grad = grad.to(whole.device)
            if not _sums_separately(parameter):
                whole.grad = grad.to(whole.grad_dtype or grad.dtype)
            elif grad.dtype == whole.dtype:
                whole.grad = grad
            else:
                parameter.unsharded_accumulated_grad = grad


def deferred_bytes(root: FSDPModule) -> int:
    """Bytes that deferring costs on each rank: the gradients of the whole model."""
    return sum(numel * dtype.itemsize for numel, dtype in _sums_to_be(root))


def adds_in(root: FSDPModule, dtype: torch.dtype) -> bool:
    """Whether all gradients of `root` are added up and reduced in at least `dtype`."""
    return all(own.itemsize >= dtype.itemsize for _, own in _sums_to_be(root))


def _sums_to_be(root: FSDPModule) -> Iterator[tuple[int, torch.dtype]]:
    """Number of elements and dtype of each deferred sum; known before the first forward."""
    for parameter in _parameters(root):
        if (sharded := parameter.sharded_param).requires_grad:
            policy, dtype = parameter.mp_policy, sharded.dtype
            if _sums_separately(parameter):
                dtype = policy.param_dtype or dtype
            else:
                dtype = sharded.grad_dtype or dtype
            yield sharded.numel(), policy.reduce_dtype or dtype


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


def _modules(root: FSDPModule) -> Iterator[FSDPModule]:
    return (m for m in root.modules() if isinstance(m, FSDPModule))  # type: ignore[attr-defined]


def _state(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def _groups(root: FSDPModule) -> Iterator[Any]:
    seen = set()
    for state in map(_state, _modules(root)):
        if hasattr(state, "_fsdp_param_groups"):
            groups = state._fsdp_param_groups
        else:  # torch 2.10 and before: one or None
            groups = [group for group in (state._fsdp_param_group,) if group is not None]
        for group in groups:
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


def _sums_separately(parameter: Any) -> bool:
    """Whether `unsharded_accumulated_grad` is a place of its own."""
    return "unsharded_accumulated_grad" in vars(parameter)


def _separate(parameter: Any) -> Tensor | None:
    return parameter.unsharded_accumulated_grad if _sums_separately(parameter) else None
