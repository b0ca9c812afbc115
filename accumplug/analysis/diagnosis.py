"""Why micro-batches do not add up to the large batch: found by running, not by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from accumplug.analysis.comparison import (
    Case,
    Gradients,
    Split,
    dense,
    dot,
    fit,
    relative_difference,
)
from accumplug.analysis.coupling import coupling, eval_mode, list_names
from accumplug.analysis.precision import Precision
from accumplug.dataloading.batch_tree import cut

__all__ = ["describe_split", "notes", "reasons"]


def notes(case: Case, reference: Gradients, passed_within: float | None) -> list[str]:
    """Return remarks that matter even if the check passed (within that bound)."""
    found = []
    if unused := [name for name, gradient in reference.items() if gradient is None]:
        found.append(f"left without a gradient by this batch: {list_names(unused)}")
    if passed_within is None:
        return found
    if not dot(reference, reference):
        found.append("the large batch's gradient is 0, so nothing was compared")
    elif relative_difference(reference, case.whole(same_random_state=False)) > passed_within:
        found.append(
            f"{_random_source(case)}: here, the micro-batches happened to draw the same numbers as "
            "the large batch; on another device, or in another split, they may not"
        )
    return found


def reasons(
    case: Case,
    reference: Gradients,
    runs: Mapping[Split, Gradients],
    bound: float,
    precision: Precision,
) -> list[str]:
    """Find out why the accumulated gradients are not within `bound` of the reference."""
    if not all(bool(dense(g).isfinite().all()) for g in reference.values()):
        return ["the large batch's own gradient is not finite: look at its loss first"]
    if empty := _not_finite(case, runs):
        return [empty]
    tolerance = max(bound, 16 * precision.eps)
    found = _one_sided(reference, runs)
    if max(relative_difference(reference, run) for run in runs.values()) <= tolerance > bound:
        said = f"no more than the rounding of {precision.name} ({precision.eps:.0e}) may explain"
        return [*found, f"{said}: {_FINER}"]
    if factor := _factor(case, reference, runs, tolerance):
        return [*found, factor]
    changing, stops = _changing(case, reference, runs, tolerance, precision)
    found += changing
    if not stops:
        return found
    with eval_mode(case.model, _BatchNorm) if changing else nullcontext():
        found += coupling(case, tolerance)
    if not found and case.loop is not None:
        found = _own_loop(case, runs)
    elif not found:
        wrong = [s for s, run in runs.items() if relative_difference(reference, run) > tolerance]
        found = _weights(case, min(wrong, key=len), tolerance)
    return found or [f"the cause is not known; {_FINER}"]


_FINER = "check in float32 or float64 to tell rounding from a fault, or give a larger bound"


def _not_finite(case: Case, runs: Mapping[Split, Gradients]) -> str | None:
    """Find a micro-batch whose loss is not finite although it has a weight."""
    for split in runs:
        for number, piece in enumerate(cut(case.batch, split), 1):
            if case.items(piece) and not bool(case.loss(piece).isfinite()):
                return (
                    f"the loss of micro-batch {number} of {len(split)} is not finite, like a mean "
                    "over no target: let items= count what the loss is a mean over, so that its "
                    "weight is 0"
                )
    return None


def _one_sided(reference: Gradients, runs: Mapping[Split, Gradients]) -> list[str]:
    """Find parameters with a gradient in one of the two and none in the other."""
    both = [(n, reference[n], run[n]) for run in runs.values() for n in run]
    lost = {n for n, whole, accumulated in both if whole is not None and accumulated is None}
    won = {n for n, whole, accumulated in both if whole is None and accumulated is not None}
    found = []
    if lost:
        found.append(f"no gradient reached {list_names(sorted(lost))} in the micro-batches")
    if won:
        found.append(f"a gradient reached {list_names(sorted(won))} only in the micro-batches")
    return found


def _factor(
    case: Case, reference: Gradients, runs: Mapping[Split, Gradients], tolerance: float
) -> str | None:
    """Recognise a gradient that is wrong by one factor, in splits of equal sizes."""
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
                return f"{said}, 1/{k}: it is divided twice by the number of micro-batches"
            return (
                f"{said}, 1/{k}: the loss is not a mean over the items of its micro-batch. Either "
                'it is a sum over them (then pass reduction="sum"), or it already divides by the '
                "whole batch or the number of micro-batches (remove that division)"
            )
        if math.isclose(factor, k, rel_tol=1e-2):
            if case.loop is not None:
                return f"{said}: nothing divides by the number of micro-batches"
            if case.reduction == "sum":
                return f"{said}: the loss is a mean over its items already, not a sum"
            return (
                f"{said}: the loss is divided by the number of its items once too often, like a "
                "mean that is divided again"
            )
        return f"{said}: a constant factor is applied once too often, or is missing"
    return None


def _changing(
    case: Case,
    reference: Gradients,
    runs: Mapping[Split, Gradients],
    tolerance: float,
    precision: Precision,
) -> tuple[list[str], bool]:
    """Find out what changes from one forward pass to the next, and whether eval mode stops it."""
    if relative_difference(reference, case.whole()) > tolerance:
        settings = f" ({precision.settings})" if precision.settings else ""
        return [
            "two runs from the same random state differ: the model or the loss keeps state that "
            f"is neither a parameter nor a buffer, or is not deterministic{settings}"
        ], False
    found = []
    if relative_difference(reference, case.whole(same_random_state=False)) > tolerance:
        found.append(
            f"{_random_source(case)}: the micro-batches draw other numbers than the large batch"
        )
    case.whole()
    changed = case.changed_buffers()
    if changed and relative_difference(reference, case.whole(same_buffers=False)) > tolerance:
        found.append(
            f"each forward pass changes buffers that the next one reads ({list_names(changed)}), "
            "so the micro-batches see other values than the large batch"
        )
    if not found:
        return [], True
    with eval_mode(case.model, _BatchNorm):
        whole = case.whole()
        again = [case.whole(same_buffers=False), case.whole(same_random_state=False)]
        left = max(relative_difference(whole, case.accumulated(split)) for split in runs)
    if max(relative_difference(whole, run) for run in again) > tolerance:
        found[-1] += "; eval mode does not stop it, so nothing more can be found out"
        return found, False
    found[-1] += f"; without it (eval mode) the relative difference is {left:.1e}"
    if left <= tolerance:
        found[-1] += ", so everything else is right"
    return found, True


def _random_source(case: Case) -> str:
    """Name the modules that draw random numbers."""
    layers = [
        name or type(module).__name__
        for name, module in case.model.named_modules()
        if isinstance(module, _DropoutNd) and module.training and module.p > 0
    ]
    return f"dropout without a fixed seed in {list_names(layers)}" if layers else "random numbers"


def _weights(case: Case, split: Split, tolerance: float) -> list[str]:
    """Find out which weights the micro-batches of `split` need."""
    pieces = cut(case.batch, split)
    given = [case.items(piece) for piece in pieces]
    found = []
    for name in case.losses:
        _, needed = fit(case.whole(loss=name), [case.whole(piece, loss=name) for piece in pieces])
        shares = [weight / sum(given) for weight in given]
        gaps = [abs(n - share) for n, share in zip(needed, shares, strict=True)]
        if case.reduction == "sum" or max(gaps) <= tolerance:
            continue
        counts = f"its micro-batches ({describe_split(split)}) count as {_shares(needed)}"
        if all(math.isclose(n, 1, abs_tol=tolerance) for n in needed):
            found.append(f'{name} is a sum over its items, not a mean: pass reduction="sum"')
        elif not math.isclose(sum(needed), 1, abs_tol=tolerance):
            found.append(
                f"{name} is no mean over items: {counts}, which does not add up to 1 (like a root "
                "or a ratio of means)"
            )
        else:
            found.append(
                f"{name} is a mean over other items than the weights count: {counts}, the given "
                f"weights are {_shares(shares)}. Pass items= (in a loop: weight=), e.g. the number "
                "of target tokens; terms with different denominators need extra="
            )
    return found


def _own_loop(case: Case, runs: Mapping[Split, Gradients]) -> list[str]:
    """Compare the weight of each micro-batch in the user's loop with the right one."""
    found = []
    for split, run in runs.items():
        pieces = cut(case.batch, split)
        left, shares = fit(run, [case.whole(piece) for piece in pieces])
        weights = [case.items(piece) for piece in pieces]
        right = [weight / sum(weights) for weight in weights]
        if left < 1e-3 and max(abs(a - b) for a, b in zip(shares, right, strict=True)) > 1e-3:
            found.append(
                f"in the loop, micro-batches of {'+'.join(map(str, split))} count as "
                f"{_shares(shares)}; right is {_shares(right)}"
            )
    return found


def _shares(numbers: Sequence[float]) -> str:
    return " : ".join(f"{round(number, 6) + 0.0:.3g}" for number in numbers)  # no -0


def describe_split(split: Split) -> str:
    """Describe a split in few characters."""
    if len(set(split)) == 1:
        return f"{len(split)} x {split[0]}"
    text = " + ".join(map(str, split))
    return text if len(text) <= 32 else f"{text[:29]}..."
