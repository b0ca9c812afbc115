"""The running sum of a window: the `.grad` of the parameters that belong to it."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accumplug.core.window import Weight, check_weight
from accumplug.parallel import fsdp
from accumplug.parallel.ddp import (
    ddp_modules,
    handled_parameters,
    in_order,
    leave_buffers,
    mark_used,
)


def unwrapped_name(name: str) -> str:
    """A parameter's name without what DDP and torch.compile put before it."""
    return name.replace("_orig_mod.", "").replace("module.", "", int(name.startswith("module.")))


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `model`, shards where it is sharded, by name without wrappers' prefixes."""
    return {unwrapped_name(n): p for n, p in fsdp.named_parameters(model).items()}


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of the parameter's gradient; before torch 2.10 it can't be another than its own."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def assign(parameter: nn.Parameter, grad: Tensor | None, dtype: torch.dtype | None = None) -> None:
    """Set `parameter.grad`; its dtype may differ from the parameter's (`Tensor.grad_dtype`)."""
    dtype = dtype or (parameter.dtype if grad is None else grad.dtype)
    parameter.grad = None
    if grad_dtype(parameter) != dtype:
        if not hasattr(parameter, "grad_dtype"):
            raise ValueError(
                f"accumulate_dtype needs Tensor.grad_dtype, which torch has from 2.10 on; this is "
                f"torch {torch.__version__}"
            )
        # None: torch (2.13) can't go back to following the parameter's dtype, but to any dtype
        parameter.grad_dtype = None if dtype == parameter.dtype else dtype
    parameter.grad = grad


@dataclass
class _Model:
    parameters: list[nn.Parameter]
    wrapped: set[int]
    """Of the parameters that its wrappers reduce or were told to ignore, the ids."""
    watched: list[nn.Parameter]
    ddp_modules: list[weakref.ref[DistributedDataParallel]]
    fsdp_roots: list[weakref.ref[FSDPModule]]


def _casts(parameter: nn.Parameter, dtype: torch.dtype | None) -> bool:
    """Whether the sum of `parameter` is to be in `dtype` (or is in another than its own)."""
    if not parameter.is_floating_point() or isinstance(parameter, DTensor):
        return False
    if dtype is None:
        return grad_dtype(parameter) != parameter.dtype
    return parameter.dtype.itemsize < dtype.itemsize


def _alike(grads: Iterable[Tensor]) -> dict[tuple[torch.device, bool, bool], list[Tensor]]:
    """`grads` by device, by whether they are narrower than fp32, and whether they are sparse."""
    groups: dict[tuple[torch.device, bool, bool], list[Tensor]] = {}
    for grad in grads:
        kind = (grad.device, grad.is_floating_point() and grad.itemsize < 4, grad.is_sparse)
        groups.setdefault(kind, []).append(grad)
    return groups


def _parameters(optimizers: Sequence[Optimizer]) -> dict[int, nn.Parameter]:
    return {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}


def _watched(model: nn.Module, own: list[nn.Parameter], most: int = 16) -> list[nn.Parameter]:
    """The first trainable parameter of each direct part of `model`, inside of its wrappers."""
    ids = {id(p) for p in own}
    while len(children := list(model.children())) == 1:
        model = children[0]
    parts = [(p for p in part.parameters() if p.requires_grad) for part in (model, *children)]
    found = [p for part in parts if (p := next(part, None)) is not None]
    return list({id(p): p for p in found if id(p) in ids}.values())[:most]


class GradientBuffer:
    """The parameters of the models and optimizers of one Accumulator, and what adds up in them.

    Models are referred to weakly: DistributedDataParallel must not outlive its process group.
    """

    changes: ClassVar[int] = 0
    """Counts whatever was added to any sum, so that others can keep what they found."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        prepared: Callable[[], list[nn.Module]] = list,
    ) -> None:
        self._models: weakref.WeakKeyDictionary[nn.Module, _Model] = weakref.WeakKeyDictionary()
        self.has_model = self._models.__contains__
        """Whether a module has been added."""
        self._optimizers = optimizers
        self._stepped = _parameters(optimizers)
        self._prepared = prepared
        self._all: list[nn.Parameter] | None = None
        self.distributed = False
        """Whether any model has parts that reduce over ranks."""
        self._is_cast = False
        self._restored: set[int] = set()
        self._watched: list[nn.Parameter] | None = None
        self._seen: list[tuple[nn.Parameter, Tensor, int]] = []
        self._closed: list[tuple[weakref.ref[nn.Parameter], weakref.ref[Tensor]]] = []
        GradientBuffer.changes += 1

    def add(self, model: nn.Module) -> None:
        """Add the parameters of `model` to the sum."""
        ddps = [weakref.ref(r) for r in ddp_modules(model)]
        fsdp_roots = [weakref.ref(r) for r in fsdp.roots(model)]
        own = list(fsdp.named_parameters(model).values())
        handled = handled_parameters(ddp_modules(model))
        self._models[model] = _Model(own, handled, _watched(model, own), ddps, fsdp_roots)
        self._all = self._watched = None
        self._is_cast = False
        self.distributed = self.distributed or bool(ddps or fsdp_roots)
        GradientBuffer.changes += 1

    def clear_new(self, model: nn.Module) -> None:
        """Drop what other losses have left in parameters that are about to join the sum."""
        own = {id(p) for p in self.parameters} | self._restored
        for parameter in fsdp.named_parameters(model).values():
            if id(parameter) not in own:
                parameter.grad = None

    def refresh(self) -> bool:
        """Rebuild the list of parameters: layers and parameter groups may have been added.

        Returns whether a model has others than before.
        """
        changed = False
        for model, known in self._models.items():
            sharded = bool(known.fsdp_roots)
            named = fsdp.named_parameters(model).values() if sharded else model.parameters()
            own, before = list(named), known.parameters
            if len(own) != len(before) or any(map(operator.is_not, own, before)):
                changed, self._watched = True, None
                known.parameters, known.watched = own, _watched(model, own)
        self._stepped = _parameters(self._optimizers)
        self._all = None
        self._is_cast = False
        return changed

    @property
    def models(self) -> list[nn.Module]:
        """The models that have been added and are still alive."""
        return list(self._models)

    def ddp_modules(self, models: Iterable[nn.Module]) -> list[DistributedDataParallel]:
        """The DDP modules of `models`, each once, in an order that all ranks find."""
        if not self.distributed:
            return []
        found = [r() for model in models for r in self._models[model].ddp_modules]
        once = {id(r): r for r in found if r is not None}.values()
        return in_order(once, self._order()) if len(once) > 1 else list(once)

    def _order(self) -> list[nn.Parameter]:
        """The parameters in an order that all ranks share, including one that has run no block."""
        prepared = [] if self._stepped else self._prepared()
        return [*self._stepped.values(), *(p for m in prepared for p in m.parameters())]

    def fsdp_roots(self, models: Iterable[nn.Module]) -> list[FSDPModule]:
        """The `fully_shard` roots of `models`, each once."""
        if not self.distributed:
            return []
        found = [r() for model in models for r in self._models[model].fsdp_roots]
        return list({id(r): r for r in found if r is not None}.values())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the sum, each once: the models' in their order, then the rest."""
        if self._all is None:
            every = {id(p): p for m in self._models.values() for p in m.parameters}
            self._all = list({**every, **self._stepped}.values())
        return self._all

    @property
    def reducible(self) -> list[nn.Parameter]:
        """The parameters to reduce, in an order that all ranks share, one without blocks too."""
        return [p for p in self._order() if p.requires_grad and not isinstance(p, DTensor)]

    def unwrapped(self) -> list[nn.Parameter]:
        """Parameters that are stepped and that no wrapper reduces, in the same order on all ranks:
        unfrozen after their module was wrapped, or in a module that was never wrapped."""
        wrapped: set[int] = set()
        for known in self._models.values():
            wrapped |= known.wrapped
        return [p for p in self.reducible if id(p) not in wrapped]

    def elements(self) -> float:
        """Number of elements of the sum, the same on all ranks."""
        return float(sum(p.numel() for p in self.parameters))

    @property
    def stepped_parameters(self) -> list[nn.Parameter]:
        """The parameters that accum's optimizers step."""
        return [p for p in self.parameters if id(p) in self._stepped]

    def named(self, model: nn.Module) -> dict[str, Tensor]:
        """The running sums of `model` on this rank, by name without the prefixes of wrappers."""
        parameters = named(model)
        found = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        names = {id(p): n for n, p in parameters.items()}
        for root in fsdp.roots(model):
            found |= fsdp.named(root, names)
        return found

    def restore(self, model: nn.Module, sums: dict[str, Tensor]) -> None:
        """Make `sums`, as `named` gave them, the running sums of `model`."""
        parameters = named(model)
        if unknown := sorted(n for n in sums if n.split("#")[0] not in parameters):
            raise ValueError(
                f"the saved running sum has {unknown[0]!r}, which the model does not have "
                f"({len(unknown)} of {len(sums)} names are unknown)"
            )
        for ddp in ddp_modules(model):
            mark_used(ddp, [parameters[n] for n in sums])
        for root in fsdp.roots(model):
            names = {id(p): n for n, p in parameters.items()}
            fsdp.restore(root, names, sums)
        for name, grad in sums.items():
            if (parameter := parameters.get(name)) is not None:
                assign(parameter, fsdp.like(grad.to(parameter.device), parameter))
        self._restored |= {id(parameters[n.split("#")[0]]) for n in sums}
        self.watch()

    def resume(self, model: nn.Module) -> None:
        """Prepare a model that first runs in a window that another process began."""
        for ddp in ddp_modules(model):
            if used := [p for p in ddp.parameters() if id(p) in self._restored]:
                mark_used(ddp, used)
                leave_buffers(ddp)

    def scale(self, factor: Weight) -> None:
        """Multiply the running sum by `factor`, a number or a 0-dim tensor."""
        if isinstance(factor, float) and factor == 1.0:
            return
        grads = [fsdp.local(p.grad) for p in self.parameters if p.grad is not None]
        for root in self.fsdp_roots(self._models):
            grads += fsdp.sums(root)
        with torch.no_grad():
            for (device, narrow, sparse), group in _alike(grads).items():
                here = (
                    factor.to(device, non_blocking=True) if isinstance(factor, Tensor) else factor
                )
                if narrow:
                    # a factor is rounded to the dtype of what it multiplies: by foreach kernels on
                    # the CPU (torch 2.13), and where it is a tensor, by all of them on CUDA
                    for grad in group:
                        grad.copy_(grad.float().mul_(here))
                elif sparse:
                    for grad in group:
                        grad.mul_(here)
                else:
                    torch._foreach_mul_(group, here)

    def take(self) -> list[Tensor | None]:
        """Take the sum out of `.grad`, so that the next backward starts from nothing."""
        grads = [p.grad for p in self.parameters]
        self.clear()
        return grads

    def put(self, grads: list[Tensor | None], added: bool) -> None:
        """Put back what `take` returned, with what is in `.grad` now `added` to it or lost."""
        for parameter, grad in zip(self.parameters, grads, strict=True):
            if grad is not None and parameter.grad is not None and added:
                with torch.no_grad():
                    grad += parameter.grad
            if grad is not None or not added:
                parameter.grad = grad

    @property
    def device(self) -> torch.device:
        """The device of the sum, which is that of its first parameter."""
        first = next(iter(self.parameters), None)
        return torch.device("cpu") if first is None else first.device

    def at_home(self, weight: Tensor) -> Weight:
        """Move a tensor weight to the device of the sum without waiting.

        A weight in host memory is read as a number if the sum is on another device.
        """
        home = self.device
        if weight.device.type == home.type:
            return weight.to(home, non_blocking=True)
        return check_weight(weight.item()) if weight.is_cpu else weight

    def norm(self) -> Tensor:
        """The 2-norm of this rank's running sum, 0-dim."""
        grads = [fsdp.local(p.grad) for p in self.parameters if p.grad is not None]
        for root in self.fsdp_roots(self._models):
            grads += fsdp.sums(root)
        values = [g.coalesce().values() if g.is_sparse else g for g in grads]
        return torch.nn.utils.get_total_norm(values)

    def finite(self) -> Tensor:
        """Whether the whole running sum is finite, 0-dim."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        values = [g.coalesce().values() if g.is_sparse else g for g in grads]
        return torch.isfinite(torch.nn.utils.get_total_norm(values, float("inf"))).to(self.device)

    def clear(self) -> None:
        """Drop the running sum by assignment, since 0 times NaN is NaN."""
        for parameter in self.parameters:
            parameter.grad = None
        for root in self.fsdp_roots(self._models):
            fsdp.clear(root)
        self._seen, self._closed = [], []

    def cast_up(self, dtype: torch.dtype) -> None:
        """Let `.grad` be of `dtype` where the parameter's own is narrower, for this window."""
        if self._is_cast:
            return
        for parameter in self.parameters:
            if _casts(parameter, dtype):
                grad = parameter.grad
                assign(parameter, None, dtype)
                assign(parameter, None if grad is None else grad.to(dtype), dtype)
        self._is_cast = True

    def cast_down(self) -> None:
        """Round a wide sum, once, to what optimizers take: the parameter's own dtype."""
        if not self._is_cast:
            return
        for parameter in self.parameters:
            grad = parameter.grad
            if _casts(parameter, None):
                assign(parameter, None if grad is None else grad.to(parameter.dtype))
        self._is_cast = False

    def watch_closed(self) -> None:
        """Remember the gradients that a closed window has left to a loop that steps by itself."""
        watched = self._watched_parameters()
        self._closed = [
            (weakref.ref(p), weakref.ref(g)) for p in watched if (g := p.grad) is not None
        ]

    def still_there(self) -> str | None:
        """Describe a gradient of the last window that is still there, or return None. Asked once.

        Waits for the device, but only where the loop keeps gradients (set_to_none=False).
        """
        left, self._closed = self._closed, []
        for reference, gradient in left:
            parameter, grad = reference(), gradient()
            if parameter is None or grad is None or parameter.grad is not grad:
                continue
            if bool(fsdp.local(grad).count_nonzero()):
                return f"the gradient of the parameter of shape {tuple(parameter.shape)}"
        return None

    def unwatch(self) -> None:
        """Forget what `watch` has remembered: the window is closed."""
        self._seen, self._restored = [], set()

    def watch(self) -> None:
        """Remember the sum by a sample of its tensors, one for each part of a model."""
        self._seen = [
            (p, grad, grad._version)
            for p in self._watched or self._watched_parameters()
            if (grad := p.grad) is not None and type(grad) is Tensor
        ]

    def _watched_parameters(self) -> list[nn.Parameter]:
        if self._watched is None:
            self._watched = [p for m in self._models.values() for p in m.watched]
        return self._watched

    def what_changed(self, gone: bool = False) -> str | None:
        """Describe a change of the sum since `watch`, or return None.

        `gone`: to be changed in place is no matter, as in a block that closes.
        """
        for parameter, grad, version in self._seen:
            replaced = parameter.grad is not grad
            if replaced or (grad._version != version and not gone):
                how = "set to None or replaced" if replaced else "changed in place"
                return f"the gradient of the parameter of shape {tuple(parameter.shape)} was {how}"
        return None
