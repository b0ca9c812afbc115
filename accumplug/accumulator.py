"""One object that owns the window: what each block finds, and what becomes of it."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from accumplug.core.gradients import GradientBuffer, OtherOwners
from accumplug.core.noise_probe import NoiseProbe
from accumplug.core.normalization import Normalizer, Plan
from accumplug.core.optimizer_step import forget_unscaled, unscaled
from accumplug.core.options import Options
from accumplug.core.result import Closed, LossSum, WindowResult, zero
from accumplug.core.window import Weight, Window, check_steps, check_weight
from accumplug.errors import TornWindowError
from accumplug.inplace import InplaceGradients, InplaceReport
from accumplug.loop.data_pass import DataPassState, Pass, PassObserver, iterate
from accumplug.loop.micro_batch import MicroBatch
from accumplug.loop.models import Models
from accumplug.loop.registry import find_foreign, shares_scaler
from accumplug.loop.rendezvous import refuse_absent
from accumplug.loop.stepper import Stepper
from accumplug.noise.scale import NoiseScale
from accumplug.parallel.ddp import forget_marks
from accumplug.parallel.group import DataParallelGroup

T = TypeVar("T")
F = TypeVar("F", bound=Callable[[], Any])
COUNTERS = ("windows", "updates", "skipped", "micro_batches", "epoch", "position", "syncs")


class Accumulator:
    """Exact gradient accumulation for a training loop that already exists.

    Each window becomes one update with the gradient of ``sum(w * l) / sum(w)`` over its
    micro-batches on all ranks, where ``l`` is a loss that is a mean over ``w`` items.

    >>> accum = Accumulator(steps=4, optimizer=optimizer)
    >>> for x, y in accum.batches(loader):
    ...     with accum(model):
    ...         accum.backward(loss_fn(model(x), y))

    Args:
        steps: micro-batches in a window on one rank, or a function of the number of updates
            so far. Settable; a new value holds from the next window on.
        accelerator: an `accelerate.Accelerator`, for a loop that has one. Every other line of
            the loop stays; `with accum(model)` takes the place of `accelerator.accumulate`.
        optimizer: one or several. If given, accum takes the step when the closing block ends:
            unscale, clip, step, scaler, scheduler, zero. If not, the loop does, in or after
            the block whose `micro.closes` is true.
        scheduler: one or several; ticks once for each update that really happened.
        scaler: a `torch.amp.GradScaler` (or one like it). Its scale is constant in a window.
        max_grad_norm: clip the finished gradient to this 2-norm.
        tail: what becomes of a window that the data ends before it is full: "flush" (an
            update on what is there), "drop", or "carry" (into the next pass).
        sync: "last" (one reduction over the ranks in a window) or "every" (one in each
            micro-batch).
        accumulate_dtype: torch.float32: the running sum, its reduction and the clip are in fp32
            where parameters are bf16 or fp16; the optimizer gets it rounded once.
        inplace: add the gradient of large Linear and Embedding weights straight into `.grad`;
            `inplace_report()` says which ones.
        nonfinite: "skip_window" (no update on a non-finite gradient; with a scaler, its own
            rule), "skip_micro_batch" (leave out the micro-batch and its weight; waits for the
            device in each), or "raise".
        process_group: the data-parallel ranks; all of them by default.

    Attributes:
        windows: closed so far, updates or not.
        updates: windows that became an update.
        skipped: windows closed without one: a gradient that was not finite, or no weight at all.
        micro_batches: that counted on this rank.
        epoch: finished passes through the data.
        position: items that `batches` has handed out in this pass.
        syncs: gradient reductions over the ranks that really ran on this rank.

    Raises:
        ValueError: options that are unknown, contradict each other or would be ignored.
    """

    _live: ClassVar[weakref.WeakSet[Accumulator]] = weakref.WeakSet()
    """All Accumulators: the backward of one must add nothing to the sums of the others."""

    def __init__(
        self,
        steps: int | Callable[[int], int],
        *,
        accelerator: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        max_grad_norm: float | None = None,
        tail: str = "flush",
        sync: str = "last",
        accumulate_dtype: torch.dtype | None = None,
        inplace: bool = False,
        nonfinite: str = "skip_window",
        process_group: Any = None,
    ) -> None:
        self.steps = steps
        self._options = options = Options.check(
            optimizer,
            scheduler,
            scaler,
            max_grad_norm,
            tail,
            sync,
            nonfinite,
            accumulate_dtype,
        )
        self._wide = accumulate_dtype
        self._ranks = DataParallelGroup(process_group)
        self._loop: Any = None
        if accelerator is not None:
            from accumplug.integrations.accelerate import AccelerateHost

            self._loop = AccelerateHost(accelerator, self.backward, options, self._steps)
            scaler = accelerator.scaler if scaler is None else scaler
        self._scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None
        self._sum = GradientBuffer(options.optimizers, self._loop)
        self._models = Models(self._sum, self._ranks, options, self._loop, inplace)
        self._weights = Normalizer(self._ranks, self._sum, sync == "every")
        self._update = Stepper(self, options, self._sum, self._scaler, self._loop)
        self._probe: NoiseProbe | None = None
        self._losses = LossSum()
        self._others = OtherOwners()
        self._window: Window | None = None
        self._micro: MicroBatch | None = None
        self._feed: DataPassState | None = None
        self._keeper: PassObserver | None = None
        self._callbacks: list[Callable[[], Any]] = []
        self._before_block: list[Callable[[], Any]] = []
        self._after_block: list[Callable[[], Any]] = []
        self._opened = 0.0
        self._closed: Closed | None = None
        self._last: WindowResult | None = None
        self.windows = self.updates = self.skipped = self.micro_batches = 0
        self.epoch = self.position = self.syncs = 0
        Accumulator._live.add(self)
        if accelerator is not None:
            from accumplug.integrations.accelerate_state import follow

            follow(self, accelerator)

    def __repr__(self) -> str:
        torn = ", torn" if self._window is not None and self._window.torn is not None else ""
        return f"<Accumulator: {self.updates} updates, {self.pending} pending{torn}>"

    @property
    def steps(self) -> int:
        """Micro-batches in the next window."""
        return check_steps(self._steps(self.updates) if callable(self._steps) else self._steps)

    @steps.setter
    def steps(self, steps: int | Callable[[int], int]) -> None:
        self._steps = steps if callable(steps) else check_steps(steps)

    @property
    def takes_step(self) -> bool:
        """Whether accum steps the optimizers; else the loop does."""
        return bool(self._options.optimizers)

    @property
    def pending(self) -> int:
        """Micro-batches in the open window; 0 between windows."""
        return self._window.index if self._window is not None else 0

    @property
    def last(self) -> WindowResult | None:
        """The last closed window, or None. Reading it may wait for the device."""
        if self._last is None and self._closed is not None:
            self._last = self._closed.read()
        return self._last

    @property
    def noise_scale(self) -> NoiseScale | None:
        """Set it to a `NoiseScale()` to have each window tell it two norms; None by default.

        The small batch is the window's first micro-batch, the large one its sum. Needs windows of
        two micro-batches or more, and sync="last". Each window then waits once more for the device.
        """
        return None if self._probe is None else self._probe.noise

    @noise_scale.setter
    def noise_scale(self, noise: NoiseScale | None) -> None:
        if noise is not None and self._options.sync == "every":
            raise ValueError(
                'the noise scale compares one micro-batch with the window; under sync="every" the '
                "sum is over the ranks from the first micro-batch on"
            )
        self._probe = None if noise is None else NoiseProbe(noise, self._sum)

    def __call__(self, model: nn.Module, *models: nn.Module, weight: Weight = 1) -> MicroBatch:
        """The context of one micro-batch.

        Args:
            model: what runs forward in it, as wrapped for the ranks; several are given one by one.
            weight: how many items (tokens, samples) the loss is a mean over: a number, or a
                0-dim tensor, which costs no wait for the device. The number 0 adds nothing at
                all, even if the loss is NaN.

        Raises:
            ValueError: a weight or a model that can't be made right.
            TornWindowError, RuntimeError: on entry, if the window is torn or a block is open.
        """
        return MicroBatch(self, (model, *models), check_weight(weight))

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
        """Back-propagate `loss`, weighted, into the running sum.

        Args:
            loss: one element, divided by nothing but its own number of items.
            weight: that of the block if not given. A micro-batch has one weight: two backwards
                in one block add two terms of the same objective.
            reduction: "mean", or "sum" if `loss` is a sum over `weight` items.
            extra: a second term, one element, to be averaged over micro-batches instead of items.
                Only under `batches(loader, weigh=...)`, where the size of the window is known.
            retain_graph, create_graph: as in `torch.Tensor.backward`.

        Raises:
            RuntimeError: outside of a block, or a second one where the first was reduced.
            ValueError: a loss of several elements, or without a graph.
        """
        if self._micro is None:
            raise RuntimeError("backward outside of a block; it belongs into `with accum(...):`")
        self._micro.backward(
            loss,
            weight,
            reduction,
            extra=extra,
            retain_graph=retain_graph,
            create_graph=create_graph,
        )

    def batches(
        self, loader: Iterable[T], weigh: Callable[[T], Weight] | None = None
    ) -> Iterator[T]:
        """One pass through `loader`, of whatever kind; it yields the loader's items.

        It knows the last item (one item of look-ahead, never `len`), so that a tail can be
        flushed, and counts the position. Ranks whose data end early take part with weight 0
        until all have ended. With `weigh`, a function from an item to its weight, it looks one
        window ahead instead of one item, so that the total weight is known from the window's
        first micro-batch on.

        Raises:
            RuntimeError: ranks have different numbers of items and this one can't take the steps
                of the loop (neither `optimizer` nor `accelerator` was given).
        """
        if self._ranks.size > 1 and not self.takes_step and self._loop is None:
            warnings.warn(
                "without optimizer= or accelerator= a rank whose data end early can't take the "
                "others' steps; if the ranks' data end at different times, batches will raise",
                stacklevel=2,
            )
        return Pass(self, iterate(self, loader, weigh))

    def flush(self) -> bool:
        """Close a started window now, reducing over the ranks; all of them have to call it.

        Returns whether there was one on any rank. If the loop takes the steps, it has to take
        one then.
        """
        if self.pending and self._plan() is not None:
            raise RuntimeError(
                f"flush after {self.pending} micro-batches of a window whose total weight weigh= "
                f"has promised; finish the window, or discard() it"
            )
        micro = MicroBatch(self, tuple(self._models.known()), 0.0)
        micro.virtual = micro.flushes = True
        with micro:
            micro.skip()
        return micro.closes

    def discard(self) -> None:
        """Throw the open window away, torn or not: its micro-batches, its gradients.

        Under `weigh=`, which has counted the window as a whole, `batches` goes on with the next.
        """
        if self._micro is not None:
            raise RuntimeError("discard inside of a block; leave it first")
        if self.pending and (plan := self._plan()) is not None:
            plan.discarded = True
        self._forget_window()
        if self._scaler is not None:
            forget_unscaled(self._scaler, self._options.optimizers)
        for ddp in self._sum.ddp_modules(self._sum.models):
            forget_marks(ddp)
        self._sum.clear()
        self._sum.narrow()

    def inplace_report(self) -> InplaceReport:
        """Which modules `inplace=True` has served so far, and why it has not served the others."""
        return InplaceReport() if self._models.server is None else self._models.server.report()

    def on_update(self, function: F) -> F:
        """Let `function()` run after each real update, never after a skipped one.

        The gradients are still there. In a loop that takes the steps itself it runs when the
        closing block ends, so step inside of the block.
        """
        self._callbacks.append(function)
        return function

    def state_dict(self) -> dict[str, Any]:
        """The counters and the open window, as JSON scalars and 0-dim tensors.

        The running sum itself is in the gradients; a `Checkpointer` saves both.

        Raises:
            RuntimeError: inside of a block, in a torn window, or between the scaler's unscale_
                and update, where a save could not be gone on from.
        """
        if self._micro is not None:
            raise RuntimeError("state_dict inside of a block; a micro-batch is saved when it ends")
        if self._window is not None and self._window.torn is not None:
            raise TornWindowError(self._torn_message())
        if self._scaler is not None and unscaled(self._scaler):
            raise RuntimeError(
                "state_dict between the GradScaler's unscale_ and update: the gradients would be "
                "unscaled again by who goes on from it. Save after scaler.update()"
            )
        state: dict[str, Any] = {name: getattr(self, name) for name in COUNTERS}
        state["mean_weight"], state["last"] = self._weights.mean, None
        if self.last is not None:
            state["last"] = asdict(self.last)
        state["window"] = None
        if self._window is not None:
            state["window"] = self._window.state_dict()
            losses = self._losses.value
            state["loss_sum"] = None if losses is None else losses.clone()
            state["overflows"] = self._update.overflows
            state["elapsed"] = time.perf_counter() - self._opened
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; an open window of this object is thrown away."""
        self.discard()
        for name in COUNTERS:
            setattr(self, name, state[name])
        self._weights.mean = state["mean_weight"]
        self._closed = None
        self._last = None if state["last"] is None else WindowResult(**state["last"])
        if state["window"] is not None:
            self._window = Window(**state["window"])
            self._losses.value, self._update.overflows = state["loss_sum"], state["overflows"]
            self._opened = time.perf_counter() - state["elapsed"]

    # -- what a block asks -------------------------------------------------------------------

    def _admit(self, models: Sequence[nn.Module]) -> None:
        """Refuse what can't be made right, before anything is done."""
        for function in tuple(self._before_block):
            function()
        if (window := self._window) is not None:
            if window.torn is None and (what := self._sum.touched()) is not None:
                self._tear(what)
            if window.torn is not None:
                raise TornWindowError(self._torn_message())
        self._models.see(models)
        if self._wide is not None and window is not None:
            self._sum.widen(self._wide)  # a model that is new in it
        if self._absent():
            refuse_absent(self)

    def _open_window(self) -> Window:
        if self._window is None:
            steps = self.steps if (plan := self._plan()) is None else max(len(plan.weights), 1)
            if self._sum.refresh():
                self._models.serve()
            if self._wide is not None:
                self._sum.widen(self._wide)
            if steps > 1:
                self._models.check_windows()
            self._window = Window(steps)
            self._opened = time.perf_counter()
            if self.takes_step:
                self._sum.clear()  # e.g. what another model's loss has left since the last close
        return self._window

    def _at_end(self) -> bool:
        """Whether an Accelerate loop that runs without `batches` has got its last batch."""
        return self._loop is not None and self._feed is None and self._loop.at_end()

    def _ends(self, window: Window, at_end: bool) -> bool:
        if window.index + 1 >= window.steps:
            return True
        last = at_end if self._feed is None else self._feed.last
        return last and self._options.tail == "flush"

    def _plan(self) -> Plan | None:
        return self._feed.plan if self._feed is not None else None

    def _absent(self) -> bool:
        """Whether some ranks, but not all, have no data left."""
        return self._feed is not None and 0 < self._feed.alive < self._ranks.size

    def _may_overlap(self, ddps: Sequence[Any]) -> bool:
        """Whether the closing backward itself may reduce; all ranks find the same.

        Not with several DDP modules (ranks that use them in another order would mix them up),
        nor while a rank is without data, nor if the micro-batch may have to be taken back or the
        sum has another dtype than DDP's buckets.
        """
        return (
            len(ddps) == 1
            and not self._absent()
            and self._options.nonfinite != "skip_micro_batch"
            and self._wide is None
        )

    def _serves(self, micro: MicroBatch) -> InplaceGradients | None:
        """What adds gradients in place in this micro-batch: not where DDP has to see each one."""
        reducing = micro.reduces and micro.ddp_modules
        return None if reducing or micro.roots else self._models.server

    def _foreign(self) -> OtherOwners:
        """What belongs to the other Accumulators and not to this one."""
        if self._others.changes != GradientBuffer.changes:
            self._others = find_foreign(self)
        return self._others

    def _refer(self, weight: Weight) -> None:
        """See to the window's reference weight before a micro-batch of `weight` is added."""
        self._weights.refer(self._open_window(), weight, self._plan())

    # -- the end of a block ------------------------------------------------------------------

    def _leave(self, micro: MicroBatch) -> None:
        """A block ended well: count it, and close the window if it ends."""
        window = self._open_window()
        if not micro.virtual:
            window.index += 1
            self.micro_batches += not micro.absent
        if micro.ends:
            try:
                self._close(micro, window)
            except BaseException as error:
                window.torn = window.torn or f"{type(error).__name__} in its close"
                raise
        elif window.index == 0:
            self._window = None
        if micro.at_end:
            self._end_pass()
        for function in tuple(self._after_block):
            function()

    def _close(self, micro: MicroBatch, window: Window) -> None:
        """The window becomes an update, or is skipped."""
        clips = self._loop.clip_values() if self._loop is not None else []
        noise = self._probe.values(self._update.scale) if self._probe is not None else []
        loss = zero(self._sum.device) if self._losses.value is None else self._losses.value
        sums = self._ranks.sum([loss, self._update.overflows, *clips, *noise])
        scale, total = self._update.scale, self._weights.total
        norm, stepped = None, False
        if not micro.void and self.takes_step:
            norm, stepped = self._update.take(window, total, shares_scaler(self))
        elif not micro.void:
            norm, stepped = self._update.see(micro, sums[2 : 2 + len(clips)], self._ranks.size)
        if self._options.nonfinite == "skip_micro_batch":
            self._update.back_off(float(sums[1]))
        if self._probe is not None and stepped:
            self._probe.tell(norm, total, sums[-3:])
        self._last, self._closed = (
            None,
            Closed(
                index=self.windows,
                micro_batches=window.index,
                weight=total,
                loss_sum=sums[0],
                grad_norm=norm,
                stepped=stepped,
                scale=1.0 if scale is None else scale,
                seconds=time.perf_counter() - self._opened,
            ),
        )
        self.windows += 1
        self.updates += stepped
        self.skipped += not stepped
        self._forget_window()
        try:
            for function in self._callbacks if stepped else ():
                function()
        finally:
            self._sum.forget_mark()
            if self.takes_step or micro.void:
                self._sum.clear()
            self._sum.narrow()

    def _forget_window(self) -> None:
        self._window, self._losses = None, LossSum()
        self._update.forget()
        if self._probe is not None:
            self._probe.forget()

    def _join(self) -> None:
        """Take part in a window of the other ranks, with what is pending here or with nothing."""
        in_step = self._feed is not None and self._feed.in_step
        micro = MicroBatch(self, tuple(self._models.known()), 0.0)
        micro.virtual, micro.absent = not in_step, True
        with micro:
            micro.skip()

    def _end_pass(self) -> None:
        """The data ended."""
        if self.pending and self._options.tail == "drop":
            self.discard()
        if self.pending and self._options.tail == "flush":
            self._join()  # the loop left the last item out
        self.epoch += 1
        self.position = 0

    def _fail(self, micro: MicroBatch, error: BaseException) -> None:
        """A block ended by an exception: its micro-batch does not count."""
        window = self._window
        if window is not None and (micro.began or micro.settled):
            window.torn = window.torn or (
                f"{type(error).__name__} in micro-batch {micro.index} after its backward began"
            )
        elif window is not None and window.index == 0:
            self._window = None

    def _tear(self, why: str) -> None:
        if self._window is not None:
            self._window.torn = (
                f"{why} while the window was open (zero_grad, clip and unscale belong after the "
                f"micro-batch that closes)"
            )

    def _torn_message(self) -> str:
        window = self._open_window()
        return (
            f"the window is torn after {window.index} of {window.steps} micro-batches: "
            f"{window.torn}. accum.discard() throws it away and the next block starts a new one"
        )
