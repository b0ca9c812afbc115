"""Why micro-batches don't add up to the large batch: found by running, not by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from accumplug.analysis.batch_tree import cut
from accumplug.analysis.comparison import Case, Gradients, compare, dense, dot, fit
from accumplug.analysis.coupling import coupling, lowest_precision, names, quiet

__all__ = ["notes", "reasons", "sizes"]

Split = tuple[int, ...]


def notes(case: Case, reference: Gradients, passed_within: float | None) -> list[str]:
    """Say what is worth knowing even if the check passed (within that bound)."""
    found = []
    if unused := [name for name, gradient in reference.items() if gradient is None]:
        found.append(f"left without a gradient by this batch: {names(unused)}")
    if passed_within is None:
        return found
    if not dot(reference, reference):
        found.append("the large batch's gradient is 0, so nothing was compared")
    elif _apart(reference, case.whole(same_numbers=False)) > passed_within:
        found.append(
            f"{_drawn(case)}: here, micro-batches happened to draw what the large batch draws; "
            "on another device, or in another split, they need not"
        )
    return found


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
    moving, stops = _moving(case, reference, runs, tolerance)
    found += moving
    if not stops:
        return found
    with quiet(case.model, _BatchNorm) if moving else nullcontext():
        found += coupling(case, tolerance)
    if not found and case.loop is not None:
        found = _own_loop(case, runs)
    elif not found:
        wrong = [split for split, run in runs.items() if _apart(reference, run) > tolerance]
        found = _weights(case, min(wrong, key=len), tolerance)
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
        if math.isclose(factor, k, rel_tol=1e-2):
            if case.loop is not None:
                return f"{said}: nothing divides by the number of micro-batches"
            if case.reduction == "sum":
                return f"{said}: the loss is a mean over its items already, not a sum"
            return (
                f"{said}: the loss is divided by the number of its items once too often, as a "
                "mean is that is divided again"
            )
        return f"{said}: a constant factor is applied once too often, or is missing"
    return None


def _moving(
    case: Case, reference: Gradients, runs: Mapping[Split, Gradients], tolerance: float
) -> tuple[list[str], bool]:
    """Find what moves between two forward passes, by running again; say if eval mode stops it."""
    if _apart(reference, case.whole()) > tolerance:
        return [
            "two runs from the same random state differ: the model or the loss keeps something "
            "from run to run that is neither parameter nor buffer, or is not deterministic"
        ], False
    found = []
    if _apart(reference, case.whole(same_numbers=False)) > tolerance:
        found.append(f"{_drawn(case)}: micro-batches draw other numbers than the large batch does")
    case.whole()
    moved = case.moved_buffers()
    if moved and _apart(reference, case.whole(same_buffers=False)) > tolerance:
        found.append(
            f"each forward changes buffers that the next one reads ({names(moved)}), so "
            "micro-batches see others than the large batch does"
        )
    if not found:
        return [], True
    with quiet(case.model, _BatchNorm):
        whole = case.whole()
        again = [case.whole(same_buffers=False), case.whole(same_numbers=False)]
        left = max(_apart(whole, case.split(split)) for split in runs)
    if max(_apart(whole, run) for run in again) > tolerance:
        found[-1] += "; eval mode does not stop it, so nothing more can be told"
        return found, False
    found[-1] += f"; with it off (eval mode) the relative difference is {left:.1e}"
    if left <= tolerance:
        found[-1] += ", so all the rest is right"
    return found, True


def _apart(one: Gradients, other: Gradients) -> float:
    return compare(one, other).overall.relative


def _drawn(case: Case) -> str:
    """Name what draws random numbers."""
    layers = [
        name or type(module).__name__
        for name, module in case.model.named_modules()
        if isinstance(module, _DropoutNd) and module.training and module.p > 0
    ]
    return f"dropout without a fixed seed in {names(layers)}" if layers else "random numbers"


def _weights(case: Case, split: Split, tolerance: float) -> list[str]:
    """Find out which weights the micro-batches of `split` would have needed."""
    pieces = cut(case.batch, split)
    given = [case.items(piece) for piece in pieces]
    found = []
    for name in case.losses:
        _, needed = fit(case.whole(loss=name), [case.whole(piece, loss=name) for piece in pieces])
        shares = [weight / sum(given) for weight in given]
        gaps = [abs(n - share) for n, share in zip(needed, shares, strict=True)]
        if case.reduction == "sum" or max(gaps) <= tolerance:
            continue
        counts = f"its micro-batches ({sizes(split)}) count as {_shares(needed)}"
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
    return " : ".join(f"{round(number, 6) + 0.0:.3g}" for number in numbers)  # no -0


def sizes(split: Split) -> str:
    """Say how a batch was split, in few characters."""
    if len(set(split)) == 1:
        return f"{len(split)} x {split[0]}"
    text = " + ".join(map(str, split))
    return text if len(text) <= 32 else f"{text[:29]}..."
