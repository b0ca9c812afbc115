"""The items that a loss is a mean over: rows, or the targets whose label is not ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from accumplug.analysis.comparison import Case, Split
from accumplug.analysis.sync_counter import IGNORED, ignored_label
from accumplug.dataloading.batch_tree import Batch, cut, items_in, leaves

__all__ = ["find_items"]

Count = Callable[[Batch], float]


def find_items(case: Case, splits: Sequence[Split]) -> tuple[Count, str | None]:
    """Find how to count the items that the loss is a mean over, and say it if it is not rows.

    Where integers of the batch carry the ignored label, the candidates are the labels that are
    not ignored (all of them, or without the first column, as causal language models shift them)
    and the rows. The first candidate is taken whose weighted mean of the micro-batches' losses is
    the loss of the whole batch; without any, e.g. because of dropout, the labels.
    """
    ignored = _ignored_label(case)
    tensors = _tensors(case.batch)
    marked = [i for i, t in enumerate(tensors) if _is_integer(t) and bool((t == ignored).any())]
    if case.reduction == "sum" or not marked:
        return items_in, None
    labels = [partial(_count, index=i, ignored=ignored, skip=0) for i in marked]
    shifted = [
        partial(_count, index=i, ignored=ignored, skip=1) for i in marked if tensors[i].dim() > 1
    ]
    found = next(_that_fit(case, splits, [*labels, *shifted, items_in]), labels[0])
    if found is items_in:
        return items_in, None
    return found, (
        f"the loss is taken for a mean over the {found(case.batch):g} targets that are not "
        f"{ignored}; each micro-batch is weighted by their number (items= counts otherwise)"
    )


def _ignored_label(case: Case) -> int:
    labels = (ignored_label(loss) for loss in case.losses.values())
    return next((label for label in labels if label is not None), IGNORED)


def _that_fit(case: Case, splits: Sequence[Split], counts: Sequence[Count]) -> Iterator[Count]:
    """Yield the counts with which the losses of micro-batches average to that of the batch."""
    whole = _loss(case, case.batch)
    tolerance = max(1e-4, 4 * torch.finfo(whole.dtype).eps) * max(1.0, abs(float(whole)))
    pieces = [[(piece, float(_loss(case, piece))) for piece in cut(case.batch, s)] for s in splits]
    for count in counts:
        means = []
        for split in pieces:
            weighted = [(count(piece), loss) for piece, loss in split]
            total = sum(weight for weight, _ in weighted) or 1
            means.append(sum(weight * loss for weight, loss in weighted if weight) / total)
        if all(abs(mean - float(whole)) <= tolerance for mean in means):
            yield count


def _loss(case: Case, batch: Batch) -> Tensor:
    case.reset()
    return case.loss(batch).detach()


def _count(batch: Batch, *, index: int, ignored: int, skip: int) -> float:
    labels = _tensors(batch)[index]
    return int(((labels[..., skip:] if skip else labels) != ignored).sum())


def _tensors(batch: Batch) -> list[Tensor]:
    return [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
