"""The close of a window: unscale, norm, clip, step, scaler, scheduler. Knows nothing of ranks.

What arrives here is the finished gradient; with several ranks it is the same on each, and so
is every decision taken from it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accumplug.core.options import Scaler, Scheduler
from accumplug.core.result import read_together
from accumplug.errors import MovedError, NonFiniteError
from accumplug.parallel.fsdp import local, whole


class Outcome(NamedTuple):
    """The outcome of a close."""

    stepped: bool
    """Whether an optimizer has stepped."""
    grad_norm: float
    """Total norm before clipping."""
    total: float
    """Weight of the window."""
    read: list[float]
    """The values that were to be read with the others."""


def take_update(
    parameters: Sequence[nn.Parameter],
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Scheduler],
    scaler: Scaler | None,
    max_grad_norm: float | None,
    nonfinite: str,
    total: float | Tensor = 1.0,
    before_step: Callable[[], None] = lambda: None,
    unread: Sequence[float | Tensor] = (),
) -> Outcome:
    """Turn the gradients of `parameters` into an update, unless they are not finite.

    The host waits for the device once: for the norm, the scaler's flags, the window's `total`
    weight and what is `unread` together. With a total of 0 there is no update. With a
    scaler its own rule holds: an optimizer with an inf or NaN among its gradients does not step,
    and the scale backs off once. A scheduler ticks when its optimizer has stepped. `before_step`
    runs on the clipped gradient.

    Raises:
        NonFiniteError: the gradient is not finite and `nonfinite` is "raise".
        ValueError: `total` is no sum of weights, which a tensor tells only here.
    """
    graded = [p for p in parameters if p.grad is not None]
    if not graded and parameters:
        warnings.warn(
            f"none of the {len(parameters)} parameters that the optimizer steps has a gradient; "
            f"was it built over the model that runs in the block?",
            stacklevel=6,
        )
    for optimizer in optimizers:
        if scaler is not None and has_gradients(optimizer):
            scaler.unscale_(optimizer)
    norm = total_norm(graded)
    flags = [_found_inf(scaler, o, norm) for o in optimizers] if scaler is not None else []
    value, known_total, *values = read_together([norm, total, *flags, *unread])
    flag_values, read = values[: len(flags)], values[len(flags) :]
    if not 0 <= known_total < math.inf:
        raise ValueError(
            f"the weights of the window sum up to {known_total}; a weight is how many items a "
            f"micro-batch's loss is a mean over: finite, and 0 or more"
        )
    nothing = known_total == 0
    finite = math.isfinite(value) and not any(flag_values)
    if not (finite or nothing) and nonfinite == "raise":
        if scaler is not None:
            scaler.update()
        raise NonFiniteError(_explain(value, scaler))
    if scaler is None or _states(scaler) is None:
        good = list(optimizers) if finite and not nothing else []
    else:
        flagged = zip(optimizers, flag_values, strict=True)
        good = [o for o, flag in flagged if not (nothing or flag)]
    if max_grad_norm is not None and good:
        clipped = graded
        if len(good) < len(optimizers):  # a NaN of one that is skipped must not spread
            own = {id(p) for o in good for group in o.param_groups for p in group["params"]}
            clipped = [p for p in graded if id(p) in own]
            norm = total_norm(clipped)
        _clip(clipped, norm, max_grad_norm)
    before_step()
    stepped = _step(optimizers, good, scaler if graded else None)
    for scheduler in schedulers:
        its = getattr(scheduler, "optimizer", None)
        if its in stepped if its in optimizers else stepped:
            scheduler.step()
    return Outcome(bool(stepped), value, known_total, read)


def _step(
    optimizers: Sequence[Optimizer], good: list[Optimizer], scaler: Scaler | None
) -> list[Optimizer]:
    """Step the `good` optimizers, whose gradients are unscaled and finite, then update the scaler.

    Returns the optimizers that have stepped.
    """
    if scaler is None or _states(scaler) is not None:
        for optimizer in good:
            optimizer.step()
        if scaler is not None:
            scaler.update()
        return good
    scale = scaler.get_scale()  # a scaler of another make: it alone knows what it skips
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return list(optimizers) if scaler.get_scale() >= scale else []


def _clip(graded: Sequence[nn.Parameter], norm: Tensor, max_grad_norm: float) -> None:
    """Scale the gradients of total norm `norm` down to `max_grad_norm`."""
    plain = [p for p in graded if not isinstance(p.grad, DTensor)]
    torch.nn.utils.clip_grads_with_norm_(plain, max_grad_norm, norm)
    if len(plain) < len(graded):
        factor = torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0)  # as in clip_grads_with_norm_
        torch._foreach_mul_([local(p.grad) for p in graded if isinstance(p.grad, DTensor)], factor)


def total_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients of `parameters` together, 0-dim; sparse ones included."""
    grads = [g for p in parameters if (g := p.grad) is not None]
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    plain = [g for g in dense if not isinstance(g, DTensor)]
    if len(plain) == len(dense):
        return torch.nn.utils.get_total_norm(plain)
    norms = [whole(torch.nn.utils.get_total_norm(gs)) for gs in _meshes(dense)]
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([*norms, torch.nn.utils.get_total_norm(plain)])
    )
    return norm


def _meshes(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """The sharded gradients among `grads`, by the mesh that they are sharded over."""
    groups: dict[DeviceMesh, list[Tensor]] = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            groups.setdefault(grad.device_mesh, []).append(grad)
    return list(groups.values())


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether any parameter of `optimizer` has a gradient."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _states(scaler: Scaler | None) -> Any:  # or None; torch does not name the type
    # torch/amp/grad_scaler.py: {id(optimizer): {"stage", "found_inf_per_device"}}.
    # Reading the flags here instead of in scaler.step() saves a wait for the device.
    return _private(scaler, "_per_optimizer_states", "its flags and whether it has unscaled")


def _private(scaler: Scaler | None, name: str, purpose: str) -> Any:  # of whatever type it is
    """A field of a GradScaler; None for a scaler of another kind."""
    if isinstance(scaler, torch.amp.GradScaler) and not hasattr(scaler, name):
        raise MovedError(f"GradScaler.{name}", purpose)
    return getattr(scaler, name, None)


def _found_inf(scaler: Scaler, optimizer: Optimizer, like: Tensor) -> Tensor:
    """The scaler's flag for `optimizer` after unscale_, 0-dim; 0 where there is none."""
    found: list[Tensor] = []
    if (states := _states(scaler)) is not None and id(optimizer) in states:
        found = [
            whole(f).to(like.device) for f in states[id(optimizer)]["found_inf_per_device"].values()
        ]
    return torch.stack(found).sum() if found else torch.zeros((), device=like.device)


def scale_state(scaler: Scaler) -> object:
    """Differs if the scale of `scaler` has been changed; not read from the device."""
    scale = _private(scaler, "_scale", "noticing a change of the scale inside of a window")
    return (id(scale), scale._version) if isinstance(scale, Tensor) else None


def unscaled(scaler: Scaler) -> bool:
    """Whether `scaler` stands between unscale_ and update, where nothing may be saved."""
    states = _states(scaler) or {}
    return any(state["stage"].name != "READY" for state in list(states.values()))


def forget_unscaled(scaler: Scaler, optimizers: Iterable[Optimizer]) -> None:
    """Let `scaler` unscale `optimizers` again: the gradients it has unscaled are thrown away."""
    states = _states(scaler) or {}
    for optimizer in optimizers:
        states.pop(id(optimizer), None)


def _explain(norm: float, scaler: Scaler | None) -> str:
    hint = ""
    if scaler is not None:
        hint = (
            f" (the GradScaler's scale is {scaler.get_scale():g}; while it searches its scale an "
            f'overflow is normal, and nonfinite="skip_window" lets it)'
        )
    return (
        f"the gradient of the window is not finite: its norm is {norm}{hint}. The gradients are "
        f"left in place to be looked at; accum.discard() throws the window away"
    )
