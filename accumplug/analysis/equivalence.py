"""The equivalence check: one large batch against the same batch in micro-batches, on any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from accumplug.analysis import diagnosis
from accumplug.analysis.comparison import Case, Difference, Loop, Split, compare, dense
from accumplug.analysis.precision import precision_of
from accumplug.analysis.sync_counter import Losses, check_module
from accumplug.analysis.targets import find_items
from accumplug.dataloading.batch_tree import Batch, items_in

__all__ = ["EquivalenceResult", "equivalence_check"]

BOUND = 1e-4
ROUNDINGS = 4
"""The default bound in units of the coarsest format's rounding, where that is above 1e-4.

Measured on four kinds of models (MLPs, transformer layers, convolutions) in bf16, fp16 and under
autocast: at most 1.6 for up to 64 micro-batches, where a wrong weight makes 10 and more.
"""


@dataclass(frozen=True)
class EquivalenceResult:
    """The result of `equivalence_check`; printed, it reads as an answer.

    Attributes:
        passed: whether every split is within the bound.
        max_abs_diff: largest absolute difference of one gradient element, over all splits.
        relative: norm of the difference / norm of the large batch's gradient; worst split.
        bound: the bound that was applied to both.
        largest: largest absolute element of the large batch's gradient.
        items: rows in the large batch.
        precision: the coarsest number format of the check, e.g. "float32", "bfloat16", "TF32".
        eps: its relative rounding.
        settings: torch's settings for TF32 and cuDNN; empty on a CPU.
        splits: the difference for each split, given as the sizes of its micro-batches.
        parameters: the difference for each parameter; worst split. Where the true gradient is 0,
            a large relative difference means nothing.
        reasons: why it failed; empty if it passed.
        notes: other remarks.
    """

    passed: bool
    max_abs_diff: float
    relative: float
    bound: float
    largest: float
    items: int
    precision: str
    eps: float
    settings: str
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
            f"relative difference {self.relative:.1e} ({self.precision} rounds to {self.eps:.1e})",
            *([f"settings: {self.settings}"] if self.settings else []),
            "",
            f"  {'micro-batches':<34}{head}",
        ]
        for split, gap in self.splits.items():
            name = diagnosis.describe_split(split)
            lines.append(f"  {name:<34}{gap.max_abs:>20.1e}{gap.relative:>12.1e}")
        lines += ["", f"  {'parameter (largest first)':<34}{head}"]
        by_size = sorted(self.parameters.items(), key=lambda item: -item[1].max_abs)
        for name, gap in by_size[:5]:
            lines.append(f"  {name:<34}{gap.max_abs:>20.1e}{gap.relative:>12.1e}")
        if len(by_size) > 5:
            lines.append(f"  and {len(by_size) - 5} more parameters")
        lines += ["", *(f"why: {reason}" for reason in self.reasons)] if self.reasons else []
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)


def equivalence_check(
    model: torch.nn.Module,
    batch: Batch,
    loss_fn: Losses,
    *,
    splits: Sequence[Sequence[int]] | None = None,
    items: Callable[[Batch], float] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    bound: float | None = None,
    loop: Loop | None = None,
) -> EquivalenceResult:
    """Compare the gradient of one large batch with the one accumulated over its micro-batches.

    The reference is one plain backward over `batch`; the splits run through an `Accumulator`.
    Afterwards the model has its gradients, buffers, modes and random states back.

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
            torch for a batch that is (inputs, targets); or a mapping of named losses, which are
            summed.
        splits: sizes of the micro-batches, e.g. `[(8, 8), (3, 13)]`; by default halves,
            quarters and three uneven pieces.
        items: counts what the loss is a mean over. By default the rows, or the targets whose
            label is not ignored (-100, or the criterion's `ignore_index`) where there are such.
        reduction: "mean", or "sum" for a loss that is a sum over the items.
        bound: largest allowed difference. By default 1e-4, or 4 times the rounding of the coarsest
            number format where that is more: 0.03 for bfloat16, 4e-3 for float16 and TF32.
        loop: your own loop, checked in place of the Accumulator. It is called with the model and
            the list of micro-batches, and leaves the gradient in `.grad`.

    Returns:
        An `EquivalenceResult`: `passed`, the differences overall, per split and per parameter, and
        the `reasons` if it failed.

    Raises:
        TypeError: `model`, `loss_fn` or the loss has the wrong type.
        ValueError: the batch can't be split so, the loss is not one number or reaches no
            parameter, or `bound` is below 0.
        RuntimeError: there are several ranks; the check is for a single process.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise RuntimeError("equivalence_check is for a single process; run it without torchrun")
    check_module(model)
    if bound is not None and not bound >= 0:
        raise ValueError(f"bound must be a number of at least 0, got {bound!r}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    if items is not None and not callable(items):
        raise TypeError(f"items must be a function that counts a batch, got {items!r}")
    losses = dict(loss_fn) if isinstance(loss_fn, Mapping) else {"the loss": loss_fn}
    count = items_in(batch)
    chosen = default_splits(count) if splits is None else [tuple(split) for split in splits]
    if not chosen:
        raise ValueError("there is nothing to compare: give at least one split")
    case = Case(model, batch, losses, items or items_in, reduction, loop)
    with torch.enable_grad(), case:
        counted = None
        if items is None:
            case.items, counted = find_items(case, chosen)
        if not (total := float(case.items(batch))) > 0:
            raise ValueError(f"items= counts {total:g} items in the large batch")
        reference = case.whole()
        graded = [gradient for gradient in reference.values() if gradient is not None]
        if not graded:
            raise ValueError("the loss reaches no parameter: none has a gradient")
        precision = precision_of(case, reference)
        bound = max(BOUND, ROUNDINGS * precision.eps) if bound is None else bound
        largest = max(float(dense(gradient).abs().max()) for gradient in graded)
        runs = {split: case.accumulated(split) for split in chosen}
        found = {split: compare(reference, run) for split, run in runs.items()}
        gap = _worst([one.overall for one in found.values()])
        passed = gap.max_abs <= bound * max(1.0, largest) and gap.relative <= bound
        reasons = [] if passed else diagnosis.reasons(case, reference, runs, bound, precision)
        notes = diagnosis.notes(case, reference, bound if passed else None)
    return EquivalenceResult(
        passed=passed,
        max_abs_diff=gap.max_abs,
        relative=gap.relative,
        bound=bound,
        largest=largest,
        items=count,
        precision=precision.name,
        eps=precision.eps,
        settings=precision.settings,
        splits={split: one.overall for split, one in found.items()},
        parameters={n: _worst([o.parameters[n] for o in found.values()]) for n in reference},
        reasons=tuple(reasons),
        notes=(*([counted] if counted else []), *notes),
    )


def default_splits(items: int) -> list[Split]:
    """Return halves, quarters and three uneven pieces, as far as there are items for them.

    No piece has a single item where that can be avoided, since BatchNorm refuses one.
    """
    if items < 2:
        raise ValueError(f"the check needs a batch of at least 2 items to split, got {items}")
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
