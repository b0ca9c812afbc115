"""Where the ranks agree: the block that ends a window, and ranks that have no data for it."""

from __future__ import annotations

from dataclasses import dataclass

from accumplug.core.gradients import GradientBuffer
from accumplug.core.host import Host
from accumplug.core.normalization import Normalizer
from accumplug.core.options import Options
from accumplug.core.state import AGREED, COUNTED, REAL, BlockKind, BlockState, LoopState
from accumplug.core.window import Weight, Window
from accumplug.loop.registry import Registry
from accumplug.parallel.ddp import has_sparse_gradients
from accumplug.parallel.group import DataParallelGroup

_ENDED = "the data of some ranks have ended and others go on"


@dataclass(eq=False)
class Rendezvous:
    """Brings the ranks together once in each window, and refuses what they can't make right."""

    group: DataParallelGroup
    gradients: GradientBuffer
    normalizer: Normalizer
    options: Options
    host: Host
    registry: Registry

    def agree(self, state: LoopState, block: BlockState, window: Window) -> None:
        """In a block that ends the window: learn the total weight, and rescale the sum to it.

        The block's `sums` and `overflows` are summed over the ranks as well.
        """
        if block.phase >= AGREED or not (block.ends or block.kind not in COUNTED):
            return
        block.phase = AGREED
        data_pass = state.data_pass
        if data_pass is not None and (plan := data_pass.plan) is not None:
            block.ends = True  # the ranks agreed when the window opened
            block.empty = isinstance(plan.total, float) and plan.total == 0
            self.normalizer.total = plan.total
            self.normalizer.micro_batches = plan.micro_batches
            block.sums = self.group.sum_tensors(block.sums, self.gradients.device)
            return
        counted = block.kind in COUNTED
        count = float(window.index + counted)
        closing = float(counted or block.kind is BlockKind.FLUSH)
        more = float(data_pass is not None and not data_pass.last)
        total, sums = window.total, [count, more, closing]
        if self.group.size > 1:
            total, sums = self._sum(state, block, total, sums)
        counts, alive, closers = sums
        if data_pass is not None and not data_pass.in_step:
            data_pass.alive = alive
        if block.kind not in COUNTED:
            flushes = closers > 0 or self.options.tail == "flush"
            block.ends = flushes and counts > 0
            if not block.ends:
                return
            self._refuse_unstepped(block, window)
        block.closers = int(closers)
        block.empty = self.normalizer.rescale(window, total, counts)

    def _sum(
        self, state: LoopState, block: BlockState, total: Weight, own: list[float]
    ) -> tuple[Weight, list[float]]:
        """The weight and what this rank tells the others of the window, summed over the ranks.

        `own`: its micro-batches in the window, whether it has more data, whether it closes.
        """
        size = self.group.size
        concurrent = float(self.registry.ran_concurrently())
        elements = self.gradients.elements() if concurrent else 0.0
        unknown = float(not (block.by_hand or block.models))
        steps = float(block.kind is REAL and not block.skipped)
        numbers = [*own, concurrent, elements, unknown, steps, block.overflows]
        total, block.sums, sums = self.group.agree(
            total, block.sums, numbers, self.gradients.device
        )
        *sums, all_concurrent, all_elements, all_unknown, all_steps, block.overflows = sums
        block.all_own = all_steps == size
        counts, alive, closers = sums
        if all_unknown:
            self._reduce_by_hand(block, closers)
        if all_concurrent:
            differ = all_concurrent == size and all_elements != size * elements
            self._refuse_concurrent(state, alive, counts != size * own[0] or differ)
        return total, sums

    def is_absent(self, state: LoopState) -> bool:
        """Whether some ranks, but not all, have no data left."""
        data_pass = state.data_pass
        return data_pass is not None and 0 < data_pass.alive < self.group.size

    def refuse_absent(self) -> None:
        """Some ranks have no data left: raise RuntimeError where they can't take part without."""
        gradients = self.gradients
        if gradients.fsdp_roots(gradients.models):
            raise RuntimeError(
                f"{_ENDED}; under fully_shard every rank runs each forward. Even out the data "
                f"(e.g. drop_last=True)"
            )
        if any(has_sparse_gradients(ddp) for ddp in gradients.ddp_modules(gradients.models)):
            raise RuntimeError(
                f"{_ENDED}; a rank without data can't stand in for an embedding with sparse=True. "
                f"Even out the data, or use sparse=False"
            )
        if not self.host.takes_over:
            raise RuntimeError(
                f"{_ENDED}; without optimizer= or accelerator= accum can't take their steps. Give "
                f"one, or even out the data"
            )

    def _reduce_by_hand(self, block: BlockState, closers: float) -> None:
        """A rank has run no block yet, and knows no DDP module: no rank can reduce through DDP."""
        if closers and block.kind is not BlockKind.FLUSH:  # the others' reducers run already
            raise RuntimeError(
                "a rank has run no block yet, and does not know the modules that the other ranks "
                "reduce; give them to the Accumulator: models=[...]"
            )
        block.by_hand = True

    def _refuse_concurrent(self, state: LoopState, alive: float, uneven: bool) -> None:
        """Another Accumulator runs in this pass, whose windows a rank without data can't join.

        `uneven`: the ranks have run different numbers of micro-batches, or close the windows of
        different Accumulators, whose sums differ in size. All of them raise together.
        """
        ended = state.data_pass is not None and 0 < alive < self.group.size
        if ended or uneven or self.is_absent(state):
            raise RuntimeError(
                f"{_ENDED}, and another Accumulator runs in the same pass: a rank without data can "
                f"join the windows of one Accumulator only. Even out the data (e.g. "
                f"drop_last=True, or a DistributedSampler)"
            )

    def _refuse_unstepped(self, block: BlockState, window: Window) -> None:
        """A window that ends outside of a block, where a plain loop would not step."""
        if block.kind is not BlockKind.FLUSH and not self.host.takes_over:
            raise RuntimeError(
                f"the loop left out the last item of the pass, so {window.index} micro-batches "
                f"wait for a close that the loop would not step on; call micro.skip() in its "
                f"block, or give optimizer="
            )
