"""Modules and losses that let one item of a micro-batch act on another: no split can be equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from accumplug.analysis.batch_tree import cut, items_in, take
from accumplug.analysis.comparison import Case, Gradients, compare, fit

__all__ = ["coupling", "lowest_precision", "names", "quiet"]


def coupling(case: Case, tolerance: float) -> list[str]:
    """Find modules and losses that let one item of a micro-batch act on another."""
    if items_in(case.batch) < 2:
        return []
    apart = {name: _apart(case, name) for name in case.losses}
    found = [
        f"{name} depends on the order of the items: a permuted batch gives another gradient (or "
        "the first dimension does not count the items)"
        for name, (_, moved) in apart.items()
        if moved > tolerance
    ]
    if all(residual <= tolerance for residual, _ in apart.values()):
        return found
    norms = [
        name or type(module).__name__
        for name, module in case.model.named_modules()
        if isinstance(module, _BatchNorm) and module.training
    ]
    if norms:
        found.append(
            f"BatchNorm ({names(norms)}) normalises over what it sees, which is a micro-batch: no "
            "accumulation can equal the large batch. GroupNorm, LayerNorm or BatchNorm in eval "
            "mode can"
        )
    with quiet(case.model) if norms else nullcontext():
        if norms:
            apart = {name: _apart(case, name) for name in case.losses}
        guilty = [name for name, (residual, _) in apart.items() if residual > tolerance]
        if guilty and (module := _coupling_module(case)):
            found.append(
                f"{module} mixes the items of a micro-batch: given the same rows, it puts out "
                "others when fewer rows stand beside them"
            )
        elif guilty:
            found.append(
                f"{names(guilty)} couples samples: its gradient is no weighted mean of those of "
                "its parts, whatever the weights (contrastive losses are like that). Accumulation "
                "can't equal the large batch; gather the outputs of the whole batch first"
            )
    return found


def _apart(case: Case, loss: str) -> tuple[float, float]:
    """Measure how far a loss's gradient is from any weighted sum of those of its halves.

    Done for the batch as it is and permuted; the second number is how far permuting moves it.
    """
    items = items_in(case.batch)
    order = torch.randperm(items, generator=torch.Generator().manual_seed(0))
    whole, permuted = case.whole(loss=loss), case.whole(take(case.batch, order), loss=loss)
    moved = compare(whole, permuted).overall.relative
    residuals = []
    for gradient, batch in ((whole, case.batch), (permuted, take(case.batch, order))):
        halves = cut(batch, (items // 2, items - items // 2))
        residuals.append(fit(gradient, [case.whole(half, loss=loss) for half in halves])[0])
    return max(residuals), moved


def _coupling_module(case: Case) -> str | None:
    """Find the innermost module whose rows come out differently with fewer rows beside them."""
    half = items_in(case.batch) // 2
    whole, part = (_record(case, batch) for batch in (case.batch, take(case.batch, slice(half))))
    for name, (given, made) in whole.items():
        if (
            name in part
            and _same(given, part[name][0], half)
            and not _same(made, part[name][1], half)
        ):
            module = case.model.get_submodule(name)
            return f"{name or 'the model'} ({type(module).__name__})"
    return None


def _record(case: Case, batch: Any) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Run the losses forward and keep what went into and came out of each module first."""
    seen: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen.setdefault(name, (_tensors([args, kwargs]), _tensors(output)))

        return hook

    handles = [
        module.register_forward_hook(watch(name), with_kwargs=True)
        for name, module in case.model.named_modules()
    ]
    try:
        case.reset()
        case.loss(batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def lowest_precision(case: Case, reference: Gradients) -> tuple[str, float]:
    """Give the coarsest type among gradients and what modules put out (autocast), and its step."""
    dtypes = {gradient.dtype for gradient in reference.values() if gradient is not None}
    dtypes |= {made.dtype for _, out in _record(case, case.batch).values() for made in out}
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return str(coarsest).removeprefix("torch."), torch.finfo(coarsest).eps


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()] if value.is_floating_point() and value.dim() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        [t for inner in value for t in _tensors(inner)] if isinstance(value, list | tuple) else []
    )


def _same(whole: Sequence[Tensor], part: Sequence[Tensor], rows: int) -> bool:
    """Say whether the first rows are the same to about 1e-3; what has other rows is passed over."""
    pairs = [(a[:rows].double(), b.double()) for a, b in zip(whole, part, strict=False)]
    return all((a - b).norm() <= 1e-3 * a.norm() for a, b in pairs if a.shape == b.shape)


@contextmanager
def quiet(model: nn.Module, *keep: type[nn.Module]) -> Iterator[None]:
    """Put all modules but those of the types `keep` into eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    for module, mode in modes:
        module.training = mode and isinstance(module, keep)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def names(those: Sequence[str], most: int = 4) -> str:
    """Give the first few names and how many more there are."""
    more = f" and {len(those) - most} more" if len(those) > most else ""
    return ", ".join(those[:most]) + more
