"""One block and the other ranks: in which backward a gradient is reduced, and by whom if in none.

A backward adds nothing to what belongs to other Accumulators either.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import Tensor

from accumplug.core.autograd import run_backward
from accumplug.parallel import fsdp
from accumplug.parallel.ddp import (
    buffers_once,
    check_reduced,
    rebuild_buckets,
    reduce_now,
    reduce_sums,
    reduction_times,
)

if TYPE_CHECKING:
    from accumplug.accumulator import Accumulator
    from accumplug.loop.micro_batch import MicroBatch


def defer(accum: Accumulator, micro: MicroBatch) -> ExitStack:
    """Keep DDP and fully_shard from reducing, except in the backward that has to."""
    deferred = ExitStack()
    own = {id(ddp) for ddp in micro.ddp_modules}
    for reference in accum._foreign().ddp_modules:
        if (ddp := reference()) is not None and id(ddp) not in own:
            deferred.enter_context(ddp.no_sync())
    for root in micro.roots:
        fsdp.defer(root, not micro.reduces)
        deferred.callback(fsdp.defer, root, False)
        if not micro.reduces:
            accum._models.warn_deferral(root)
    for ddp in micro.ddp_modules:
        deferred.enter_context(buffers_once(ddp) if micro.overlaps else ddp.no_sync())
    return deferred


def back(
    accum: Accumulator,
    micro: MicroBatch,
    roots: list[Tensor],
    grads: list[Tensor],
    retain_graph: bool | None,
    create_graph: bool,
) -> None:
    """Run the backward, and raise if it has reduced or changed what it was not to."""
    others = accum._foreign()
    if not (others.parameters or micro.ddp_modules) and accum.micro_batches:
        run_backward(roots, grads, retain_graph, create_graph)
        return
    foreign = [p for r in others.parameters if (p := r()) is not None and p.requires_grad]
    times, versions = reduction_times(micro.ddp_modules), _versions(accum, micro)
    for parameter in foreign:  # AccumulateGrad passes over what requires no gradient
        parameter.requires_grad_(False)
    try:
        with fsdp.untouched(r for ref in others.roots if (r := ref()) is not None):
            run_backward(roots, grads, retain_graph, create_graph)
    finally:
        for parameter in foreign:
            parameter.requires_grad_(True)
    if not micro.reduces:
        fsdp.check_deferred(micro.roots, accum._sum.parameters)
    micro.reduced = reduction_times(micro.ddp_modules) != times
    if micro.reduced and not micro.overlaps:
        raise RuntimeError(
            "DistributedDataParallel reduced in a micro-batch that was not to: its forward ran "
            "outside of the block, or an earlier forward had no backward. "
            "Run it inside of `with accum(model):`, or under torch.no_grad()"
        )
    if versions != _versions(accum, micro):
        raise ValueError(
            "a parameter changed in the backward of a micro-batch that does not close: an "
            "optimizer steps inside of it, once for each micro-batch. Remove it, or use steps=1"
        )


def reduce(accum: Accumulator, micro: MicroBatch) -> bool:
    """Average the running sum over the ranks, where the backward has not; say if it was."""
    if micro.virtual and micro.roots:
        if accum._options.sync == "every":
            return False  # each micro-batch was reduced, and a shard is nobody else's
        for root in micro.roots:
            fsdp.reduce_now(root)
    if accum._wide is not None:
        reduce_sums(micro.ddp_modules, accum._ranks)
        return True
    for ddp in micro.ddp_modules:
        if not micro.reduced:
            reduce_now(ddp)
        check_reduced(ddp)
    for ddp in micro.ddp_modules:  # now that all ranks are here; else the next forward does it
        rebuild_buckets(ddp)
    return True


def refuse_left_out(accum: Accumulator, micro: MicroBatch) -> None:
    """Raise RuntimeError if the window has sums in a DDP module that is not in this block."""
    own = {id(ddp) for ddp in micro.ddp_modules}
    for ddp in accum._sum.ddp_modules(accum._sum.models):
        if id(ddp) not in own and any(p.grad is not None for p in ddp.parameters()):
            raise RuntimeError(
                f"the micro-batch that closes the window leaves out a model that earlier ones "
                f"used, {type(ddp.module).__name__}: its gradients would be reduced by nobody. "
                f"Give each block the same models: accum(a, b)"
            )


def _versions(accum: Accumulator, micro: MicroBatch) -> list[int] | None:
    """In the first micro-batch: what shows that a backward has changed the parameters."""
    if accum.micro_batches or micro.ends:
        return None
    return [p._version for p in accum._sum.parameters]
