"""The life of one micro-batch: enter, backward, leave."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accumplug.core.optimizer_step import unscaled
from accumplug.core.window import Weight, is_number
from accumplug.errors import TornWindowError
from accumplug.loop.checks import check_backward, one_weight
from accumplug.loop.reduction import back, defer, reduce, refuse_left_out
from accumplug.loop.rendezvous import settle
from accumplug.parallel.ddp import before_forward

if TYPE_CHECKING:
    from accumplug.accumulator import Accumulator


class MicroBatch:
    """One micro-batch, as `with accum(model) as micro` yields it; good for one block.

    `index` is its place in the window, from 0.
    """

    index = 0
    ends = False
    """Whether the window ends with this micro-batch."""
    void = False
    """Whether all weights of the window turned out to be 0: no update."""
    virtual = False
    """Whether it stands outside of the count: a flush, or a window of other ranks."""
    flushes = False
    """Whether it closes the window whatever `tail` says."""
    absent = False
    """Whether it stands for a rank without data."""
    at_end = False
    """Whether the loader of an Accelerate loop has handed out its last batch."""
    overlaps = False
    """Whether the reduction over the ranks runs inside of the backward."""
    closers = 0
    """Ranks whose own micro-batch closes the window (in an Accelerate loop)."""
    settled = False
    """Whether the total weight of the window is known."""
    finished = False
    """Whether the running sum has been rescaled and reduced as far as this block has to."""
    skipped = False
    began = False
    """Whether something may have been added to the running sum."""
    backwards = 0
    """How many it has had."""
    reduced = False
    """Whether the last one has reduced the gradient over the ranks."""
    ddp_modules: Sequence[Any] = ()
    """The DDP modules in the block."""
    roots: Sequence[Any] = ()
    """The fully_shard modules: every rank runs a forward and a backward of them."""
    _used = False
    _deferred: ExitStack | None = None

    def __init__(self, accum: Accumulator, models: tuple[nn.Module, ...], weight: Weight) -> None:
        self.models = models
        self.weight = weight
        self._accum = accum

    @property
    def closes(self) -> bool:
        """Whether the window becomes an update with this micro-batch.

        It turns false in the backward if all weights of the window turn out to be 0.
        """
        return self.ends and not self.void

    @property
    def reduces(self) -> bool:
        """Whether the gradient is reduced over the ranks in this micro-batch."""
        return self.ends or self._accum._options.sync == "every"

    def backward(
        self,
        loss: Tensor,
        weight: Weight | None = None,
        reduction: str = "mean",
        *,
        extra: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """The same as `Accumulator.backward`."""
        accum = self._accum
        if accum._micro is not self:
            raise RuntimeError("backward outside of its block; it belongs into `with accum(...):`")
        plan = accum._plan()
        if weight is not None or plan is not None:
            self.weight = one_weight(self, weight, plan)
        check_backward(accum, self, loss, extra, reduction)
        self._refuse_touched()
        first, self.backwards = not self.backwards, self.backwards + 1
        absent = is_number(self.weight) and self.weight == 0
        if absent and extra is None and not self.roots:
            self._stand_in()
            return
        self.began = True
        window = accum._open_window()
        keeps = accum._options.nonfinite == "skip_micro_batch"
        accum._weights.refer(window, self.weight, plan)
        if not keeps:
            if first:
                window.add_weight(self.weight)
            if self.ends:
                settle(accum, self)
        roots, grads = [], []
        if not absent:
            divisor = window.divisor(self.weight, reduction)
            roots, grads = [loss], [accum._update.root_gradient(loss, divisor)]
        elif self.roots:
            roots, grads = [loss], [_nothing(loss)]
        if extra is not None and plan is not None:
            roots.append(extra)
            divisor = plan.micro_batches / accum._ranks.size
            grads.append(accum._update.root_gradient(extra, divisor))
        kept = accum._sum.take() if keeps else None
        back(accum, self, roots, grads, retain_graph, create_graph)
        if kept is None or accum._update.keep(kept, loss):
            if keeps:
                window.add_weight(self.weight)
            if not absent:
                accum._losses.add(loss, self.weight, reduction)
        if not self.finished:
            self._finish()
        if accum._probe is not None:
            if self.index == 0 and not self.ends:
                accum._probe.first(window, self.weight)
            elif self.ends and not accum.takes_step:
                accum._probe.finished()
        accum._sum.mark()

    def skip(self) -> None:
        """Let this micro-batch count with weight 0 and without a backward, e.g. for bad data."""
        accum = self._accum
        if accum._micro is not self:
            raise RuntimeError("skip outside of its block; it belongs into `with accum(...):`")
        if self.backwards:
            raise RuntimeError("skip after a backward; what was added can't be taken back")
        plan = accum._plan()
        promised = plan is not None and not self.virtual and self.index < len(plan.weights)
        if plan is not None and promised and plan.weights[self.index] != 0:
            raise RuntimeError(
                f"weigh= has counted {plan.weights[self.index]} items for this micro-batch "
                f"already; let weigh return 0 for what is to be skipped"
            )
        if self.roots and not self.virtual and accum._ranks.size > 1:
            raise RuntimeError(
                "skip under fully_shard would leave the other ranks waiting, as each of them runs "
                "forward and backward together with this one; run both and give weight=0"
            )
        self.skipped, self.weight = True, 0.0
        self._stand_in()

    def __enter__(self) -> MicroBatch:
        accum = self._accum
        if self._used:
            raise RuntimeError("a context is good for one block; call accum(model) for each")
        self._used = True
        if accum._micro is not None:
            raise RuntimeError(
                "a block inside a block of the same Accumulator; one micro-batch has one block "
                "(several models: accum(a, b))"
            )
        accum._admit(self.models)
        window = accum._open_window()
        self.index = window.index
        if not self.virtual:
            self.at_end = accum._loop is not None and accum._at_end()
            self.ends = accum._ends(window, self.at_end)
        if accum._sum.distributed:
            self.ddp_modules = accum._sum.ddp_modules(self.models)
            self.roots = accum._sum.roots(self.models)
            may_overlap = accum._may_overlap(self.ddp_modules)
            self.overlaps = self.reduces and not self.virtual and may_overlap
            if self.index == 0 or accum._options.sync == "every":
                for ddp in self.ddp_modules:
                    before_forward(ddp)
            if self.ends:
                refuse_left_out(accum, self)
        if self.ddp_modules or self.roots or accum._foreign().ddp_modules:
            self._deferred = defer(accum, self)
        if (server := accum._serves(self)) is not None:
            self._deferred = self._deferred or ExitStack()
            self._deferred.enter_context(server.micro_batch())
        accum._micro = self
        if accum._loop is not None and not self.virtual:
            try:
                accum._loop.enter(self.ends, self._before_step)
            except BaseException as error:
                self.__exit__(type(error), error, None)
                raise
        if self.ends and not (self.ddp_modules or self.roots):
            self._stand_in_early()  # a plain loop may step in a block that has no backward
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        accum = self._accum
        try:
            if error is None:
                self._complete()
        except BaseException as late:
            error = late
            raise
        finally:
            if self._deferred is not None:
                self._deferred.close()
            if accum._loop is not None and not self.virtual:
                accum._loop.exit()
            accum._micro = None
            if error is not None:
                accum._fail(self, error)
        if error is None:
            accum._leave(self)
        self.models = self.ddp_modules = self.roots = ()  # a loop keeps its last micro-batch

    def _before_step(self) -> None:
        """A loop clips or steps in a closing block: the sum has to be finished."""
        self._stand_in_early()
        if not self.finished:
            raise RuntimeError(
                "the loop clips or steps before the backward of the micro-batch that closes the "
                "window; forward and backward come first"
            )

    def _stand_in_early(self) -> None:
        """Finish the sum before a loop steps in a block of weight 0, which needs no backward."""
        if is_number(self.weight) and self.weight == 0 and not self.backwards and self.ends:
            self._stand_in()

    def _refuse_touched(self, gone: bool = False) -> None:
        """Raise TornWindowError if the sum is not what this Accumulator left."""
        if (what := self._accum._sum.touched(gone)) is not None:
            self._accum._tear(what)
            raise TornWindowError(self._accum._torn_message())

    def _stand_in(self) -> None:
        """Add nothing, but take part in what the other ranks do in this micro-batch."""
        self._refuse_touched()
        if self.reduces or self.virtual:
            self._accum._refer(0.0)
        if not self.finished:
            self._finish()
        self._accum._sum.mark()

    def _finish(self) -> None:
        """Make the running sum what it has to be when this block ends."""
        if self.ends or self.virtual:
            settle(self._accum, self)
        self.finished = True
        if self.reduces and (self.ddp_modules or self.roots):
            self._accum.syncs += reduce(self._accum, self)
        if self.ends and not self._accum.takes_step:
            self._accum._update.hand_over()
        if self.void and self._accum._loop is not None:
            self._accum._loop.void()

    def _complete(self) -> None:
        """The block ended: see that it has done what a micro-batch has to."""
        accum = self._accum
        if not self.backwards and not self.skipped:
            if not (is_number(self.weight) and self.weight == 0):
                raise RuntimeError(
                    f"block {self.index} of the window ended without a backward; call "
                    f"accum.backward(loss) in it (accelerator.backward in an Accelerate loop, "
                    f"never loss.backward()), or micro.skip() to leave the micro-batch out"
                )
            if not self.finished:
                self._stand_in()
        if not self.finished:
            self._finish()
        if not self.ends and accum._scaler is not None and unscaled(accum._scaler):
            accum._tear("the scaler has unscaled the gradients")
            raise TornWindowError(accum._torn_message())
        if not self.ends or accum.takes_step:
            self._refuse_touched(gone=self.ends)


def _nothing(loss: Tensor) -> Tensor:
    """What a backward that adds nothing starts with, for ranks that need its collectives."""
    if not torch.isfinite(loss.detach()).all():
        raise ValueError(
            f"a loss of {loss.item()} with weight 0 under fully_shard: its backward has to run "
            f"with the other ranks', and 0 times NaN is NaN. Make it finite, e.g. a sum of nothing"
        )
    return torch.zeros_like(loss)
