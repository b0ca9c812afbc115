"""What a loop gives to a backward, looked at before anything is added."""

from __future__ import annotations

from torch import Tensor

from accumplug.core.options import Options
from accumplug.core.state import REAL, REDUCED, BlockState, LoopState
from accumplug.core.window import Weight, check_weight
from accumplug.errors import OptionTypeError


def check_backward(
    state: LoopState,
    block: BlockState,
    options: Options,
    loss: Tensor,
    extra: Tensor | None,
    reduction: str,
) -> None:
    """Raise for a loss that can't be back-propagated here."""
    plain = extra is None and reduction == "mean" and not (block.backwards or block.skipped)
    if plain and isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction is "mean" or "sum"; got {reduction!r}')
    for name, term in (("loss", loss), ("extra", extra)):
        if name == "extra" and term is None:
            continue
        if not isinstance(term, Tensor):
            raise OptionTypeError(
                f"{name} is a tensor of one element, a mean or a sum; got {type(term).__name__}"
            )
        if term.numel() != 1:
            raise ValueError(
                f"{name} is a tensor of one element, a mean or a sum; got {tuple(term.shape)}"
            )
        if not term.requires_grad and not block.adds_nothing:
            raise ValueError(
                f"{name} has no graph: nothing in it requires a gradient. Was it detached, or "
                f"computed under no_grad?"
            )
    if extra is not None and state.plan is None:
        raise ValueError(
            "extra= has its own denominator, so the size of the window must be known before "
            "its first backward; use accum.batches(loader, weigh=...), which looks ahead"
        )
    if block.skipped:
        raise RuntimeError("backward after skip: this micro-batch was left out")
    if block.backwards and (
        (block.phase >= REDUCED and (block.ddp_modules or block.fsdp_roots))
        or options.nonfinite == "skip_micro_batch"
    ):
        raise RuntimeError(
            "a second backward in a micro-batch whose gradient is finished with the first "
            "(it is reduced over the ranks there); add the losses and call backward once"
        )


def one_weight(state: LoopState, block: BlockState, weight: Weight | None) -> Weight:
    """The weight of this micro-batch, which may be given in one place only."""
    if block.phase >= REDUCED and not block.backwards and weight is not None and block.weight == 0:
        raise ValueError(
            f"this micro-batch closes the window with the weight 0, and now has {weight}; a "
            f"micro-batch has one weight"
        )
    said = block.weight if weight is None else check_weight(weight)
    known = block.weight if block.backwards else promised_weight(state)
    if known is not None:
        number = isinstance(said, float)
        silent = weight is None and (block.backwards or (number and said == 1))
        if not silent and number and isinstance(known, float) and said != known:
            raise ValueError(
                f"this micro-batch has the weight {known} (from "
                f"{'its first backward' if block.backwards else 'weigh='}), and now {said}; a "
                f"micro-batch has one weight"
            )
        if silent and not block.backwards and not (isinstance(known, float) and known == said):
            _refuse_guess(state)
        said = known
    return said


def _refuse_guess(state: LoopState) -> None:
    """Raise RuntimeError where a block may be of one of several items, which `weigh=` has weighed
    differently: the loop reads ahead, or has left out what came before its first block."""
    data_pass = state.data_pass
    if data_pass is None or not data_pass.items.reads_ahead or state.parts is not None:
        return
    weights = [weight for plan in data_pass.plans for weight in plan.weights]
    if not all(isinstance(weight, float) for weight in weights) or len(set(weights)) > 1:
        raise RuntimeError(
            f"the loop had {data_pass.items.outstanding} items before a block on the first of "
            f"them: it reads ahead, or leaves items out, so the weight of this block can't be "
            f"taken from weigh=. Say it: accum(model, weight=n)"
        )


def promised_weight(state: LoopState) -> Weight | None:
    """The weight that `weigh=` has counted for the micro-batch that runs."""
    if (plan := state.plan) is None:
        return None
    parts = state.parts
    if parts is not None and parts.weights is not None:
        return parts.weights[parts.index]
    return plan.weights[plan.done] if plan.done < len(plan.weights) else None


def refuse_skip(state: LoopState, block: BlockState, ranks: int) -> None:
    """Raise RuntimeError where a micro-batch can't be left out."""
    if block.backwards:
        raise RuntimeError("skip after a backward; what was added can't be taken back")
    if block.kind is not REAL:
        return
    promised = promised_weight(state)
    if promised is not None and promised != 0:
        raise RuntimeError(
            f"weigh= has counted {promised} items for this micro-batch already; let weigh return "
            f"0 for what is to be skipped"
        )
    if block.fsdp_roots and ranks > 1:
        raise RuntimeError(
            "skip under fully_shard would leave the other ranks waiting, as each of them runs "
            "forward and backward together with this one; run both and give weight=0"
        )
