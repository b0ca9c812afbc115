"""Why micro-batches don't add up to the large batch: found by running, not by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from accumplug.comparison import Case, Gradients, compare, dense, dot, fit
from accumplug.coupling import coupling, lowest_precision, names, quiet
from accumplug.pieces import cut, items_in

__all__ = ["notes", "reasons"]

Split = tuple[int, ...]


def notes(reference: Gradients) -> list[str]:
    """Say what is worth knowing even if the check passed."""
    unused = [name for name, gradient in reference.items() if gradient is None]
    if not unused:
        return []
    return [f"left without a gradient by this batch: {names(unused)}"]


def reasons(
    case: Case, reference: Gradients, runs: Mapping[Split, Gradients], bound: float
) -> list[str]:
    """Say why the accumulated gradients are not within `bound` of the reference."""
    if not all(bool(dense(g).isfinite().all()) for g in reference.values()):
        return ["the large batch's own gradient is not finite: look at its loss first"]
    if empty := _not_finite(case, runs):
        return [empty]
    dtype, eps = lowest_precision(case, reference)
    tolerance = max(bound, 16 * eps)
    found = _one_sided(reference, runs)
    if max(compare(reference, run).overall.relative for run in runs.values()) <= tolerance > bound:
        return [*found, f"not more than the rounding of {dtype} ({eps:.0e}): {_FINER}"]
    if factor := _factor(case, reference, runs, tolerance):
        return [*found, factor]
    drawn = _random_numbers(case, reference, runs, tolerance)
    found += drawn
    with quiet(case.model, _BatchNorm) if drawn else nullcontext():
        found += coupling(case, tolerance)
    if not found:
        found += _own_loop(case, runs) if case.loop is not None else _weights(case, tolerance)
    return found or [f"the cause was not recognised; {_FINER}"]


_FINER = "check in float32 or float64 to tell rounding from a fault, or give a larger bound"


def _not_finite(case: Case, runs: Mapping[Split, Gradients]) -> str | None:
    """Find a micro-batch whose loss is not finite although it has a weight."""
    for split in runs:
        for number, piece in enumerate(cut(case.batch, split), 1):
            if case.items(piece) and not bool(case.loss(piece).isfinite()):
                return (
                    f"the loss of micro-batch {number} of {len(split)} is not finite, as that of a "
                    "mean over no target is: count what the loss is a mean over with items=, so "
                    "that its weight is 0"
                )
    return None


def _one_sided(reference: Gradients, runs: Mapping[Split, Gradients]) -> list[str]:
    """Find parameters that have a gradient in the one and none in the other."""
    lost = {n for run in runs.values() for n in run if run[n] is None and reference[n] is not None}
    won = {n for run in runs.values() for n in run if run[n] is not None and reference[n] is None}
    found = []
    if lost:
        found.append(f"no gradient reached {names(sorted(lost))} in the micro-batches")
    if won:
        found.append(f"only micro-batches, not the large batch, gave {names(sorted(won))} any")
    return found


def _factor(
    case: Case, reference: Gradients, runs: Mapping[Split, Gradients], tolerance: float
) -> str | None:
    """Recognise a gradient that is right but for one factor, in splits of equal sizes."""
    for split, run in runs.items():
        k, square = len(split), dot(run, run)
        if len(set(split)) > 1 or k == 1 or not square:
            continue
        factor = dot(run, reference) / dot(reference, reference)
        apart = square - factor**2 * dot(reference, reference)
        if apart > (tolerance**2) * square or abs(factor - 1) <= tolerance:
            return None
        said = f"{k} micro-batches give {factor:.4g} times the large batch's gradient"
        if math.isclose(factor, 1 / k, rel_tol=1e-2):
            if case.loop is not None:
                return f"{said}, 1/{k}: it is divided by the number of micro-batches twice"
            return (
                f"{said}, 1/{k}: the loss adds up over micro-batches where it should be a mean. "
                'Either it is a sum over its items (say so: reduction="sum"), or it divides by '
                "the whole batch or the number of micro-batches itself (let it not)"
            )
        if math.isclose(factor, k, rel_tol=1e-2) and case.reduction == "sum":
            return f"{said}: the loss is a mean over its items already, not a sum"
        if math.isclose(factor, k, rel_tol=1e-2):
            return f"{said}: nothing divides by the number of micro-batches"
        return f"{said}: a constant factor is applied once too often, or is missing"
    return None


def _random_numbers(
    case: Case, reference: Gradients, runs: Mapping[Split, Gradients], tolerance: float
) -> list[str]:
    """Find out whether the forward pass draws random numbers, by running it twice."""
    if compare(reference, case.whole()).overall.relative > tolerance:
        return ["two runs from the same random state differ: the model is not deterministic"]
    if compare(reference, case.whole(same_numbers=False)).overall.relative <= tolerance:
        return []
    layers = [
        name or type(module).__name__
        for name, module in case.model.named_modules()
        if isinstance(module, _DropoutNd) and module.training and module.p > 0
    ]
    drawn = f"dropout without a fixed seed in {names(layers)}" if layers else "random numbers"
    with quiet(case.model, _BatchNorm):
        whole = case.whole()
        left = max(compare(whole, case.split(s)).overall.relative for s in runs)
    rest = f"with it off (eval mode) the relative difference is {left:.1e}"
    if left <= tolerance:
        rest += ", so all the rest is right"
    return [f"{drawn}: micro-batches draw other numbers than the large batch does; {rest}"]


def _weights(case: Case, tolerance: float) -> list[str]:
    """Find out which weights the micro-batches would have needed, from the two halves."""
    items = items_in(case.batch)
    halves = cut(case.batch, (items // 2, items - items // 2)) if items > 1 else []
    given = [case.items(half) for half in halves]
    found = []
    for name in case.losses if halves else ():
        _, needed = fit(case.whole(loss=name), [case.whole(half, loss=name) for half in halves])
        shares = [weight / sum(given) for weight in given]
        gaps = [abs(n - share) for n, share in zip(needed, shares, strict=True)]
        if case.reduction == "sum" or max(gaps) <= tolerance:
            continue
        counts = f"its halves count as {_shares(needed)}"
        if all(math.isclose(n, 1, abs_tol=tolerance) for n in needed):
            found.append(f'{name} is a sum over its items, not a mean: say reduction="sum"')
        elif not math.isclose(sum(needed), 1, abs_tol=tolerance):
            found.append(
                f"{name} is no mean over items: {counts}, which does not add up to 1 (a root or a "
                "ratio of means is like that)"
            )
        else:
            found.append(
                f"{name} is a mean over something else than what the weights count: {counts}, the "
                f"weights given are {_shares(shares)}. Pass items= (in a loop: weight=), e.g. the "
                "number of target tokens; terms with different denominators need extra="
            )
    return found


def _own_loop(case: Case, runs: Mapping[Split, Gradients]) -> list[str]:
    """Say how much each micro-batch counted in the loop that was given, and should have."""
    found = []
    for split, run in runs.items():
        pieces = cut(case.batch, split)
        left, shares = fit(run, [case.whole(piece) for piece in pieces])
        weights = [case.items(piece) for piece in pieces]
        right = [weight / sum(weights) for weight in weights]
        if left < 1e-3 and max(abs(a - b) for a, b in zip(shares, right, strict=True)) > 1e-3:
            found.append(
                f"the loop lets micro-batches of {'+'.join(map(str, split))} count as "
                f"{_shares(shares)}; right is {_shares(right)}"
            )
    return found


def _shares(numbers: Sequence[float]) -> str:
    return " : ".join(f"{number:.3g}" for number in numbers)
