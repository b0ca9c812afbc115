"""One block and the other ranks: in which backward a gradient is reduced, and by whom if in none.

A backward adds nothing to what belongs to other Accumulators either.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from accumplug.core.autograd import run_backward
from accumplug.core.gradients import GradientBuffer, grad_dtype
from accumplug.core.options import Options
from accumplug.core.state import COUNTED, REAL, BlockState
from accumplug.loop.registry import Registry
from accumplug.parallel import fsdp
from accumplug.parallel.ddp import (
    before_forward,
    buffers_once,
    check_reduced,
    forget_marks,
    others_unsynced,
    rebuild_buckets,
    reduce_now,
    reduced_parameters,
    reduction_times,
)
from accumplug.parallel.group import DataParallelGroup

BUCKET = 25 * 2**20  # bytes of a flat bucket, as many as DDP's


class Reducer:
    """Reduces the running sum over the ranks once in a window (or in each micro-batch)."""

    def __init__(
        self,
        group: DataParallelGroup,
        gradients: GradientBuffer,
        options: Options,
        registry: Registry,
    ) -> None:
        self._group = group
        self._gradients = gradients
        self._every = options.sync == "every"
        self._may_overlap = (
            options.nonfinite != "skip_micro_batch" and options.accumulate_dtype is None
        )
        self._casts = options.accumulate_dtype is not None
        self._registry = registry
        self._checked = False
        self._warned = False
        self._unfinished = False
        """DDP may have run a forward that its reducer expects a backward of."""

    def reduces(self, block: BlockState) -> bool:
        """Whether the gradient is reduced over the ranks in this block."""
        return block.ends or self._every

    def enter(self, block: BlockState, absent: bool) -> None:
        """A block begins: find the wrapped modules in it, and keep them from reducing too early.

        `absent`: a rank without data takes part in this window.
        """
        gradients = self._gradients
        if gradients.distributed:
            block.ddp_modules = gradients.ddp_modules(block.models)
            block.fsdp_roots = gradients.fsdp_roots(block.models)
            # Not with several DDP modules (ranks that use them in another order would mix them
            # up), nor while a rank is without data, nor if the micro-batch may have to be taken
            # back or the sum has another dtype than DDP's buckets.
            block.overlaps = (
                (block.ends or self._every)
                and block.kind in COUNTED
                and len(block.ddp_modules) == 1
                and not (absent or block.by_hand)
                and self._may_overlap
            )
            self._unfinished = self._unfinished or block.overlaps
            if (block.index == 0 or self._every) and not block.by_hand:
                for ddp in block.ddp_modules:
                    before_forward(ddp)
            if block.ends:
                self._refuse_left_out(block)
        block.others = others = self._registry.other_owners()
        unseen = others.unseen and self._group.size > 1 and any(b() for b in others.unseen)
        if block.ddp_modules or block.fsdp_roots or others.ddp_modules or unseen:
            block.deferred = self._defer(block, bool(unseen))

    def _defer(self, block: BlockState, unseen: bool) -> ExitStack:
        """Keep DDP and fully_shard from reducing, except in the backward that has to."""
        deferred = ExitStack()
        own = {id(ddp) for ddp in block.ddp_modules}
        for reference in block.others.ddp_modules:
            if (ddp := reference()) is not None and id(ddp) not in own:
                deferred.enter_context(ddp.no_sync())
        if unseen:
            deferred.enter_context(others_unsynced(block.ddp_modules))
        reduces = self.reduces(block)
        outputs: list[Tensor] = []  # of all roots, see zeros_from
        block.outputs = outputs
        for root in block.fsdp_roots:
            fsdp.defer(root, not reduces)
            deferred.callback(fsdp.defer, root, False)
            if not reduces:
                self._warn_deferral(root)
            if block.kind is REAL and self._group.size > 1:
                deferred.enter_context(fsdp.recorded_outputs(root, outputs))
        for ddp in block.ddp_modules:
            deferred.enter_context(ddp.no_sync() if not block.overlaps else buffers_once(ddp))
            if block.by_hand:
                deferred.enter_context(buffers_once(ddp))
        return deferred

    def backward(
        self,
        block: BlockState,
        losses: Sequence[Tensor],
        factors: Sequence[Tensor],
        retain_graph: bool | None,
        create_graph: bool,
    ) -> None:
        """Run the backward, and raise if it has reduced or changed what it was not to."""
        others = block.others
        if not (others.parameters or block.ddp_modules) and self._checked:
            run_backward(losses, factors, retain_graph, create_graph)
            return
        foreign = [p for r in others.parameters if (p := r()) is not None and p.requires_grad]
        times, versions = reduction_times(block.ddp_modules), self._versions(block)
        for parameter in foreign:  # AccumulateGrad passes over what requires no gradient
            parameter.requires_grad_(False)
        try:
            with fsdp.untouched(r for ref in others.fsdp_roots if (r := ref()) is not None):
                run_backward(losses, factors, retain_graph, create_graph)
        finally:
            for parameter in foreign:
                parameter.requires_grad_(True)
        if not self.reduces(block):
            fsdp.check_deferred(block.fsdp_roots, self._gradients.parameters)
        block.reduced = reduction_times(block.ddp_modules) != times
        self._unfinished = self._unfinished and not block.reduced
        if block.reduced and not block.overlaps:
            raise RuntimeError(
                "DistributedDataParallel reduced in a micro-batch that was not to: its forward ran "
                "outside of the block, or an earlier forward had no backward. "
                "Run it inside of `with accum(model):`, or under torch.no_grad()"
            )
        if versions != self._versions(block):
            raise ValueError(
                "a parameter changed in the backward of a micro-batch that does not close: an "
                "optimizer steps inside of it, once for each micro-batch. Remove it, or use steps=1"
            )
        self._checked = True

    def abandon(self) -> None:
        """The window is thrown away: DDP expects nothing of it any more."""
        for ddp in self._gradients.ddp_modules(self._gradients.models):
            forget_marks(ddp, self._unfinished)
        self._unfinished = False

    def reduce(self, block: BlockState) -> bool:
        """Average the running sum over the ranks, where the backward has not; say if it was."""
        if not self.reduces(block) or (self._group.size == 1 and not self._gradients.distributed):
            return False
        if block.by_hand:
            self._reduce_by_hand(self._gradients.reducible)
            for ddp in block.ddp_modules:  # its marks of used parameters are of this window
                forget_marks(ddp)
                ddp.require_forward_param_sync = True
            return True
        unwrapped = self._gradients.unwrapped() if self._group.size > 1 else []
        if not (block.ddp_modules or block.fsdp_roots or unwrapped):
            return False
        if block.kind not in COUNTED and block.fsdp_roots:
            if self._every:
                return False  # each micro-batch was reduced, and a shard is nobody else's
            for root in block.fsdp_roots:
                fsdp.reduce_now(root)
        if self._casts:
            wrapped = [p for ddp in block.ddp_modules for p in reduced_parameters(ddp)]
            self._reduce_by_hand([*wrapped, *unwrapped])
            for ddp in block.ddp_modules:
                ddp.require_forward_param_sync = True
            return True
        for ddp in block.ddp_modules:
            if not block.reduced:
                reduce_now(ddp)
            check_reduced(ddp)
        for ddp in block.ddp_modules:  # now that all ranks are here; else the next forward does it
            rebuild_buckets(ddp)
        if unwrapped:
            self._reduce_by_hand(unwrapped)
        return True

    def _reduce_by_hand(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average `.grad` over the ranks in its own dtype, in flat buckets, one after the other.

        All ranks have to give the same `parameters` in the same order. One that no rank has used
        stays without a gradient.
        """
        group = self._group
        marks = group.sum([float(p.grad is not None) for p in parameters])
        used = [p for p, mark in zip(parameters, marks, strict=True) if mark]
        for bucket in _buckets(used):
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype(parameter))
            grads = [p.grad for p in bucket if p.grad is not None]
            flat = torch.cat([g.reshape(-1) for g in grads]).div_(group.size)
            if group.size > 1:
                dist.all_reduce(flat, group=group.group)
            for grad, part in zip(
                grads, torch.split(flat, [g.numel() for g in grads]), strict=True
            ):
                grad.copy_(part.view_as(grad))

    def _refuse_left_out(self, block: BlockState) -> None:
        """Raise RuntimeError if the window has sums in a DDP module that is not in this block."""
        own = {id(ddp) for ddp in block.ddp_modules}
        for ddp in self._gradients.ddp_modules(self._gradients.models):
            if id(ddp) not in own and any(p.grad is not None for p in ddp.parameters()):
                raise RuntimeError(
                    f"the micro-batch that closes the window leaves out a model that earlier ones "
                    f"used, {type(ddp.module).__name__}: its gradients would be reduced by nobody. "
                    f"Give each block the same models: accum(a, b)"
                )

    def _warn_deferral(self, root: FSDPModule) -> None:
        """Warn once about the memory that deferring the reduction of `root` takes."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"deferring the reduction keeps the gradients of the whole model on each rank, "
                f'{fsdp.deferred_bytes(root) / 2**20:,.1f} MiB beside the shards; sync="every" '
                f"keeps shards only and reduces in each micro-batch",
                stacklevel=6,
            )

    def _versions(self, block: BlockState) -> list[int] | None:
        """The parameter versions in the first micro-batch, which a backward must not change."""
        if self._checked or block.ends:
            return None
        return [p._version for p in self._gradients.parameters]


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split into runs of one dtype and device, of at most 25 MiB (or one parameter) each."""
    buckets: list[list[nn.Parameter]] = []
    kind, room = None, 0
    for parameter in parameters:
        size = parameter.numel() * 4
        if kind != (kind := (grad_dtype(parameter), parameter.device)) or size > room:
            buckets.append([])
            room = BUCKET
        buckets[-1].append(parameter)
        room -= size
    return buckets
