"""Modules and losses in which one item of a micro-batch acts on another: no split can be equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from accumplug.analysis.comparison import Case, fit, relative_difference
from accumplug.dataloading.batch_tree import Batch, cut, items_in, take

__all__ = ["coupling", "eval_mode", "list_names", "record_modules"]

Record: TypeAlias = tuple[list[Tensor], list[Tensor]]  # a module's inputs and outputs


def coupling(case: Case, tolerance: float) -> list[str]:
    """Name the modules and losses in which one item of a micro-batch acts on another."""
    if items_in(case.batch) < 2:
        return []
    tested = {name: _test_loss(case, name) for name in case.losses}
    found = [
        f"{name} depends on the order of the items: a permuted batch gives another gradient (or "
        "the first dimension does not count the items)"
        for name, (_, moved) in tested.items()
        if moved > tolerance
    ]
    if all(residual <= tolerance for residual, _ in tested.values()):
        return found
    norms = [
        name or type(module).__name__
        for name, module in case.model.named_modules()
        if isinstance(module, _BatchNorm) and module.training
    ]
    if norms:
        found.append(
            f"BatchNorm ({list_names(norms)}) normalises over the items of a micro-batch: no "
            "accumulation can equal the large batch. GroupNorm, LayerNorm or BatchNorm in eval "
            "mode can"
        )
    with eval_mode(case.model) if norms else nullcontext():
        if norms:
            tested = {name: _test_loss(case, name) for name in case.losses}
        guilty = [name for name, (residual, _) in tested.items() if residual > tolerance]
        if guilty and (module := _coupling_module(case)):
            found.append(
                f"{module} mixes the items of a micro-batch: for the same rows its output "
                "changes if there are fewer other rows"
            )
        elif guilty:
            found.append(
                f"{list_names(guilty)} couples samples: its gradient is no weighted mean of the "
                "gradients of its parts, whatever the weights (as in contrastive losses). "
                "Accumulation can't equal the large batch; gather the outputs of the whole batch "
                "first"
            )
    return found


def _test_loss(case: Case, loss: str) -> tuple[float, float]:
    """Measure how far a loss's gradient is from any weighted sum of those of its halves.

    This is done for the batch as it is and permuted. The second number is the relative difference
    that the permutation makes.
    """
    items = items_in(case.batch)
    order = torch.randperm(items, generator=torch.Generator().manual_seed(0))
    permuted = take(case.batch, order)
    gradients = [case.whole(batch, loss=loss) for batch in (case.batch, permuted)]
    residuals = []
    for gradient, batch in zip(gradients, (case.batch, permuted), strict=True):
        halves = cut(batch, (items // 2, items - items // 2))
        residuals.append(fit(gradient, [case.whole(half, loss=loss) for half in halves])[0])
    return max(residuals), relative_difference(*gradients)


def _coupling_module(case: Case) -> str | None:
    """Find the innermost module whose output for the same rows changes with fewer other rows."""
    half = items_in(case.batch) // 2
    whole = record_modules(case, case.batch)
    part = record_modules(case, take(case.batch, slice(half)))
    for name in (name for name in whole if name in part):  # inner modules come first
        (inputs, outputs), (part_inputs, part_outputs) = whole[name], part[name]
        if _same(inputs, part_inputs, half) and not _same(outputs, part_outputs, half):
            module = case.model.get_submodule(name)
            return f"{name or 'the model'} ({type(module).__name__})"
    return None


def record_modules(case: Case, batch: Batch) -> dict[str, Record]:
    """Run a forward pass and record the inputs and outputs of each module's first call."""
    seen: dict[str, Record] = {}

    def recorder(name: str) -> Any:  # torch's type of a hook with kwargs is a union
        def hook(_: nn.Module, args: object, kwargs: object, output: object) -> None:
            seen.setdefault(name, (_tensors([args, kwargs]), _tensors(output)))

        return hook

    handles = [
        module.register_forward_hook(recorder(name), with_kwargs=True)
        for name, module in case.model.named_modules()
    ]
    try:
        case.reset()
        case.loss(batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()] if value.is_floating_point() and value.dim() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        [t for inner in value for t in _tensors(inner)] if isinstance(value, list | tuple) else []
    )


def _same(whole: Sequence[Tensor], part: Sequence[Tensor], rows: int) -> bool:
    """Say whether the first rows agree to about 1e-3; tensors of other shapes are skipped."""
    pairs = [(a[:rows].double(), b.double()) for a, b in zip(whole, part, strict=False)]
    return all((a - b).norm() <= 1e-3 * a.norm() for a, b in pairs if a.shape == b.shape)


@contextmanager
def eval_mode(model: nn.Module, *keep: type[nn.Module]) -> Iterator[None]:
    """Put all modules into eval mode, except those of the types `keep`."""
    modes = [(module, module.training) for module in model.modules()]
    for module, mode in modes:
        module.training = mode and isinstance(module, keep)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def list_names(names: Sequence[str], most: int = 4) -> str:
    """Join the first few names, and say how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
