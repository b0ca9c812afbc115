"""What a loop gives to a backward, looked at before anything is added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from accumplug.core.window import Weight, check_weight, is_number

if TYPE_CHECKING:
    from accumplug.accumulator import Accumulator
    from accumplug.core.normalization import Plan
    from accumplug.loop.micro_batch import MicroBatch


def check_backward(
    accum: Accumulator, micro: MicroBatch, loss: Tensor, extra: Tensor | None, reduction: str
) -> None:
    """Raise for what can't be back-propagated here."""
    plain = extra is None and reduction == "mean" and not (micro.backwards or micro.skipped)
    if plain and isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction is "mean" or "sum"; got {reduction!r}')
    for name, term in (("loss", loss), ("extra", extra)):
        if name == "extra" and term is None:
            continue
        if not isinstance(term, Tensor) or term.numel() != 1:
            what = tuple(term.shape) if isinstance(term, Tensor) else type(term).__name__
            raise ValueError(f"{name} is a tensor of one element, a mean or a sum; got {what}")
        if not term.requires_grad and not (is_number(micro.weight) and micro.weight == 0):
            raise ValueError(
                f"{name} has no graph: nothing in it requires a gradient. Was it detached, or "
                f"computed under no_grad?"
            )
    if extra is not None and accum._plan() is None:
        raise ValueError(
            "extra= has its own denominator, so the size of the window must be known before "
            "its first backward; use accum.batches(loader, weigh=...), which looks ahead"
        )
    if micro.skipped:
        raise RuntimeError("backward after skip: this micro-batch was left out")
    if micro.backwards and (
        (micro.finished and (micro.ddp_modules or micro.roots))
        or accum._options.nonfinite == "skip_micro_batch"
    ):
        raise RuntimeError(
            "a second backward in a micro-batch whose gradient is finished with the first "
            "(it is reduced over the ranks there); add the losses and call backward once"
        )


def one_weight(micro: MicroBatch, weight: Weight | None, plan: Plan | None) -> Weight:
    """The weight of this micro-batch: one, whoever says it."""
    if micro.finished and not micro.backwards and weight is not None and micro.weight == 0:
        raise ValueError(
            f"this micro-batch closes the window with the weight 0, and now has {weight}; a "
            f"micro-batch has one weight"
        )
    said = micro.weight if weight is None else check_weight(weight)
    known = micro.weight if micro.backwards else plan and plan.weights[micro.index]
    if known is not None:
        silent = weight is None and (micro.backwards or not is_number(said) or said == 1)
        if not silent and is_number(said) and is_number(known) and said != known:
            raise ValueError(
                f"this micro-batch has the weight {known} (from "
                f"{'its first backward' if micro.backwards else 'weigh='}), and now {said}; a "
                f"micro-batch has one weight"
            )
        said = known
    return said
