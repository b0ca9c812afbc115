"""The proof on one's own model: one large batch against the same batch in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accumplug.analysis import diagnosis
from accumplug.analysis.batch_tree import items_in
from accumplug.analysis.comparison import Case, Difference, Loop, compare, dense
from accumplug.analysis.sync_counter import Losses
from accumplug.analysis.sync_counter import StepResult as StepResult
from accumplug.analysis.sync_counter import SyncCounter as SyncCounter
from accumplug.analysis.sync_counter import sync_counter as sync_counter
from accumplug.analysis.sync_counter import train_one_optimizer_step as train_one_optimizer_step

Split = tuple[int, ...]


@dataclass(frozen=True)
class EquivalenceResult:
    """What `equivalence_check` found; printed, it reads as an answer.

    Attributes:
        passed: whether every split came within the bound.
        max_abs_diff: largest difference of one number in the gradient, over all splits.
        relative: norm of the difference / norm of the large batch's gradient; worst split.
        bound: what was asked.
        largest: largest number in the large batch's gradient.
        items: items in the large batch.
        dtype: of the gradient.
        splits: the difference for each split, which is the sizes of its micro-batches.
        parameters: the difference for each parameter; worst split. One whose true gradient is
            0 may show a large relative difference that means nothing.
        reasons: why it failed; empty if it passed.
        notes: what is worth knowing anyway.
    """

    passed: bool
    max_abs_diff: float
    relative: float
    bound: float
    largest: float
    items: int
    dtype: torch.dtype
    splits: Mapping[Split, Difference]
    parameters: Mapping[str, Difference]
    reasons: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        verdict, is_it = ("PASS", "is") if self.passed else ("FAIL", "is not")
        head = f"{'largest difference':>20}{'relative':>12}"
        lines = [
            f"{verdict}: accumulated over micro-batches, the gradient {is_it} that of one large "
            f"batch of {self.items} items",
            f"largest difference {self.max_abs_diff:.1e} (bound {self.bound:.0e}; the gradient's "
            f"largest number is {self.largest:.1e})",
            f"relative difference {self.relative:.1e} ({_name(self.dtype)} rounds to "
            f"{torch.finfo(self.dtype).eps:.1e})",
            "",
            f"  {'micro-batches':<34}{head}",
        ]
        for split, gap in self.splits.items():
            lines.append(f"  {diagnosis.sizes(split):<34}{gap.max_abs:>20.1e}{gap.relative:>12.1e}")
        lines += [
            "",
            f"  {'parameter (largest first)':<34}{'largest difference':>20}{'relative':>12}",
        ]
        by_size = sorted(self.parameters.items(), key=lambda item: -item[1].max_abs)
        for name, gap in by_size[:5]:
            lines.append(f"  {name:<34}{gap.max_abs:>20.1e}{gap.relative:>12.1e}")
        if len(by_size) > 5:
            lines.append(f"  and {len(by_size) - 5} more parameters")
        lines += ["", *(f"why: {reason}" for reason in self.reasons)] if self.reasons else []
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)


def equivalence_check(
    model: nn.Module,
    batch: Any,
    loss_fn: Losses,
    *,
    splits: Sequence[Sequence[int]] | None = None,
    items: Callable[[Any], float] = items_in,
    reduction: str = "mean",
    bound: float = 1e-4,
    loop: Loop | None = None,
) -> EquivalenceResult:
    """Compare the gradient of one large batch with that of its micro-batches, accumulated.

    The reference is one plain backward over `batch`; the splits run through an `Accumulator`.
    The model comes back as it was: gradients, buffers, modes and random states.

    It passes if, for every split, the largest difference is at most `bound` (times the largest
    number of the gradient, where that is above 1) and the relative difference is too, so
    that a wrong factor can't hide behind a small gradient.

    >>> result = equivalence_check(model, (inputs, targets), nn.CrossEntropyLoss())
    >>> print(result)
    >>> assert result.passed

    Args:
        model: the bare model, in the mode and precision in which it is to be checked.
        batch: tensors whose first dimension counts the items, alone or in tuples, lists, dicts
            and dataclasses, nested.
        loss_fn: `loss_fn(model, batch)`, a mean over the items of the batch; or a criterion of
            torch for a batch that is (inputs, targets); or several by name, which are summed.
        splits: sizes of the micro-batches, e.g. `[(8, 8), (3, 13)]`; by default halves,
            quarters and three uneven pieces.
        items: counts what the loss is a mean over (e.g. target tokens); rows by default.
        reduction: "mean", or "sum" for a loss that is a sum over the items.
        loop: your own loop to be checked in place of the Accumulator: called with the model and
            the list of micro-batches, it leaves the gradient in `.grad`.

    Returns:
        What was found: `passed`, `max_abs_diff`, `relative`, per split and per parameter, and the
        `reasons` if it failed. Printed, it reads as an answer.

    Raises:
        ValueError: the batch can't be cut so, the loss is not one number or reaches no parameter,
            or `bound` is not a number of at least 0.
        RuntimeError: there are several ranks; the check is for a single process.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise RuntimeError("equivalence_check is for a single process; run it without torchrun")
    if not bound >= 0:
        raise ValueError(f"bound must be a number of at least 0, got {bound!r}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    losses = dict(loss_fn) if isinstance(loss_fn, Mapping) else {"the loss": loss_fn}
    count = items_in(batch)
    chosen = default_splits(count) if splits is None else [tuple(split) for split in splits]
    if not chosen:
        raise ValueError("there is nothing to compare: give at least one split")
    if not (counted := float(items(batch))) > 0:
        raise ValueError(f"items= counts {counted:g} items in the large batch")
    case = Case(model, batch, losses, items, reduction, loop)
    with torch.enable_grad(), case:
        reference = case.whole()
        graded = [gradient for gradient in reference.values() if gradient is not None]
        if not graded:
            raise ValueError("the loss reached no parameter: none has a gradient")
        largest = max(float(dense(gradient).abs().max()) for gradient in graded)
        runs = {split: case.split(split) for split in chosen}
        found = {split: compare(reference, run) for split, run in runs.items()}
        gap = _worst([one.overall for one in found.values()])
        passed = gap.max_abs <= bound * max(1.0, largest) and gap.relative <= bound
        reasons = [] if passed else diagnosis.reasons(case, reference, runs, bound)
        notes = diagnosis.notes(case, reference, bound if passed else None)
    return EquivalenceResult(
        passed=passed,
        max_abs_diff=gap.max_abs,
        relative=gap.relative,
        bound=bound,
        largest=largest,
        items=count,
        dtype=graded[0].dtype,
        splits={split: one.overall for split, one in found.items()},
        parameters={n: _worst([o.parameters[n] for o in found.values()]) for n in reference},
        reasons=tuple(reasons),
        notes=tuple(notes),
    )


def default_splits(items: int) -> list[Split]:
    """Give halves, quarters and three uneven pieces, as far as there are items for them.

    No piece has a single item where that can be helped, as BatchNorm refuses one.
    """
    if items < 2:
        raise ValueError(f"a batch of {items} item can't be split; the check needs at least 2")
    half, quarter = items // 2, items // 4
    splits: list[Split] = [(half, items - half)]
    if quarter > 1 or items == 4:
        splits.append((quarter, quarter, quarter, items - 3 * quarter))
    if items >= 3:
        first = max(1, min(2, items // 3))
        second = max(1, (items - first) // 3)
        splits.append((first, second, items - first - second))
    return list(dict.fromkeys(splits))


def _worst(differences: Sequence[Difference]) -> Difference:
    return Difference(
        max(difference.max_abs for difference in differences),
        max(difference.relative for difference in differences),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
