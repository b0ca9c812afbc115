"""Which weights of a model have their gradients added in place, when, and why not the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import optimizer

from accumplug.inplace.calls import unwatch, watch
from accumplug.inplace.engine import MISSING
from accumplug.inplace.sums import Sum

SMALLEST = 2**19
"""Elements of a weight from which on the saving is larger than what it costs to notice it."""

_VECTOR = "vectors only"


@dataclass(frozen=True)
class InplaceReport:
    """What was added in place: `served` modules, and the `others` with the reason why not."""

    served: tuple[str, ...] = ()
    others: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        reasons: dict[str, list[str]] = {}
        for name, reason in self.others.items():
            reasons.setdefault(reason, []).append(name)
        lines = [f"in place: {_count(self.served)}"]
        return "\n".join(lines + [f"not: {_count(n)}: {reason}" for reason, n in reasons.items()])


class InplaceGradients:
    """Adds the gradients of large weights straight into their running sums.

    In a micro-batch that runs inside of `micro_batch()`, the gradient of a product with a
    weight (`F.linear`, `torch.addmm`, `@`, also with a transpose or a slice of it) or of a
    lookup in it (`F.embedding`) is added to `.grad` by the operation that computes it, to zeros
    where there is none. Whatever else is done with the weight goes through autograd as always.

    Args:
        models: the modules whose weights are meant, as they are now.
        smallest: elements of the smallest weight that is served.

    >>> serve = InplaceGradients(model)
    >>> with serve.micro_batch():
    ...     loss_fn(model(x), y).backward()
    """

    def __init__(
        self,
        *models: nn.Module,
        smallest: int = SMALLEST,
    ) -> None:
        self._sums: dict[int, Sum] = {}
        self._never: dict[int, str] = {}
        self._modules: dict[str, list[Tensor]] = {}
        self._unable = _unable()
        for i, model in enumerate(models):
            prefix = f"{i}." if len(models) > 1 else ""
            for name, module, whole in _walk(model, "", None):
                name = prefix + (name or type(module).__name__)
                self._add(name, module, whole, smallest)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """One micro-batch, its forward and its backward; afterwards the weights are as before.

        An optimizer that steps inside of it finds ordinary parameters: torch chooses its
        implementation (foreach) by their exact class.
        """
        sums = [s for key, s in self._sums.items() if key not in self._never and not s.refusal()]
        if not sums:
            yield
            return
        before = optimizer.register_optimizer_step_pre_hook(lambda *_: _each(_rest, sums))
        after = optimizer.register_optimizer_step_post_hook(lambda *_: _each(watch, sums))
        try:
            _each(Sum.start, sums)
            _each(watch, sums)
            yield
        finally:
            before.remove()
            after.remove()
            _each(unwatch, sums)
            _each(Sum.end, sums)

    def report(self) -> InplaceReport:
        """Which modules have been served so far, and why the others have not."""
        served: list[str] = []
        others: dict[str, str] = {}
        for name, weights in self._modules.items():
            reasons = {self._reason(weight): None for weight in weights}
            if None in reasons:
                served.append(name)
            else:
                others[name] = next((r for r in reasons if r and r != _VECTOR), _VECTOR)
        return InplaceReport(tuple(served), others)

    def _add(
        self,
        name: str,
        module: nn.Module,
        whole: str | None,
        smallest: int,
    ) -> None:
        weights: list[Tensor] = list(module.parameters(recurse=False))
        if weights:
            self._modules[name] = weights
        for weight in weights:
            reason = self._unable or whole or _never(module, weight, smallest)
            if reason is None:
                self._sums.setdefault(id(weight), Sum(weight))
            else:
                self._never[id(weight)] = reason

    def _reason(self, weight: Tensor) -> str | None:
        """Why nothing was added to the weight's sum in place; None if something was."""
        if id(weight) in self._never:
            return self._never[id(weight)]
        total = self._sums[id(weight)]
        refusal = None if total.open else total.refusal()
        if refusal is not None:
            return refusal
        if total.added:
            return None
        if not total.opened:
            return "no micro-batch has run yet"
        return total.fallback or "no product with its weight, and no lookup in it, was seen"


def _walk(
    module: nn.Module, name: str, whole: str | None
) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Each module with its name and a reason that holds for all that is inside of it."""
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        whole = "compiled"
    elif isinstance(module, torch.jit.ScriptModule):
        whole = "scripted"
    elif isinstance(module, FSDPModule):
        whole = "sharded"
    yield name, module, whole
    for key, child in module.named_children():
        yield from _walk(child, f"{name}.{key}" if name else key, whole)


@functools.cache
def _unable() -> str | None:
    """Why this version of torch lets nothing be added in place: what one product has shown."""
    if MISSING:
        return f"torch {torch.__version__} has no {MISSING[0]}"
    x = torch.ones(1, 2, dtype=torch.float32, device="cpu")
    total = Sum(nn.Parameter(torch.zeros_like(x).expand(2, 2).clone()))
    with torch.enable_grad():
        try:
            total.start()
            watch(total)
            for _ in range(2):
                torch.autograd.backward(F.linear(x, total.weight).sum())
            product = F.linear(x, total.weight).sum()
            (asked,) = torch.autograd.grad(product, total.weight, allow_unused=True)
        except (AttributeError, RuntimeError, TypeError) as error:
            return f"torch {torch.__version__} can't: {error}"
        finally:
            unwatch(total)
            total.end()
    gradients = ((total.weight.grad, 2), (asked, 1))
    if any(found is None or found.ne(value).any() for found, value in gradients):
        return f"torch {torch.__version__} adds up another gradient than autograd's"
    return None


def _never(module: nn.Module, weight: Tensor, smallest: int) -> str | None:
    if weight.dim() < 2:
        return _VECTOR
    if isinstance(module, _ConvNd):
        return "a convolution, whose gradient kernels can't add to a sum"
    if isinstance(module, ParametrizationList):
        return "parametrized"
    if weight.is_meta or not weight.is_floating_point():
        return f"its weight is {'on the meta device' if weight.is_meta else weight.dtype}"
    if weight.numel() < smallest:
        return f"fewer than {smallest} elements, where autograd is as quick"
    return None


def _rest(total: Sum) -> None:
    total.forget_low()
    unwatch(total)


def _each(action: Callable[[Sum], None], sums: Iterable[Sum]) -> None:
    for total in sums:
        action(total)


def _count(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} module{'' if len(names) == 1 else 's'} ({shown or '-'})"
