"""The life of a block, from enter to update: which part acts at which moment."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any  # of state_dicts, which are JSON

from torch import Tensor

from accumplug.core.gradients import GradientBuffer
from accumplug.core.host import Host
from accumplug.core.noise_probe import NoiseProbe
from accumplug.core.normalization import Normalizer
from accumplug.core.optimizer_step import forget_unscaled
from accumplug.core.options import Options, Reduction, Scaler
from accumplug.core.result import ClosedWindow, LossSum, WindowResult, zero
from accumplug.core.state import (
    AGREED,
    COUNTED,
    COUNTERS,
    NEW,
    OPEN,
    REAL,
    REDUCED,
    BlockKind,
    BlockState,
    LoopState,
)
from accumplug.core.window import Weight, Window
from accumplug.errors import TornWindowError
from accumplug.loop.checks import check_backward, one_weight, refuse_skip
from accumplug.loop.data_pass import DataPass
from accumplug.loop.models import Models
from accumplug.loop.reduction import Reducer
from accumplug.loop.registry import Registry
from accumplug.loop.rendezvous import Rendezvous
from accumplug.loop.stepper import Stepper
from accumplug.parallel.group import DataParallelGroup


class Lifecycle:
    """Runs the blocks of one Accumulator. The parts do not know each other; this class does."""

    def __init__(
        self,
        state: LoopState,
        options: Options,
        group: DataParallelGroup,
        host: Host,
        gradients: GradientBuffer,
        models: Models,
        scaler: Scaler | None,
    ) -> None:
        registry = Registry(state, gradients, scaler)
        self.state = state
        self.options = options
        self.group = group
        self.host = host
        self.gradients = gradients
        self.models = models
        self.registry = registry
        self.normalizer = Normalizer(group, gradients, options.sync == "every")
        self.reducer = Reducer(group, gradients, options, registry)
        self.rendezvous = Rendezvous(group, gradients, self.normalizer, options, host, registry)
        self.stepper = Stepper(state, gradients, options, scaler, host)
        own = weakref.proxy(self)  # without a circle, what is dropped is gone from the registry
        join, end = lambda kind: own.run_empty(kind), lambda: own._end_pass()
        known = models.are_known
        self.data_pass = DataPass(
            state, group, options, host, registry, known, gradients, join, end
        )
        self.noise_probe: NoiseProbe | None = None
        self.before_block: list[Callable[[], None]] = []
        self.after_block: list[Callable[[], None]] = []
        self.after_window: list[Callable[[WindowResult], None]] = []
        self.after_update: list[Callable[[], object]] = []
        self._takes_step = bool(options.optimizers)
        self._keeps = options.nonfinite == "skip_micro_batch"

    # -- enter -----------------------------------------------------------------------------------

    def enter(self, block: BlockState) -> None:
        """A block begins. Raise for what can't be made right, before anything is done."""
        state = self.state
        if block.phase is not NEW:
            raise RuntimeError("a context is good for one block; call accum(model) for each")
        block.phase = OPEN
        if state.block is not None:
            raise RuntimeError(
                "a block inside a block of the same Accumulator; one micro-batch has one block "
                "(several models: accum(a, b))"
            )
        if not self.group.compared:
            self._compare_options()
        for function in tuple(self.before_block):
            function()
        if (window := state.window) is not None:
            self._check_sum(window)
        self.models.admit(block.models)
        if len(Registry.live) > 1:
            self.registry.refuse_nested(block.models)
        if window is not None and self.options.accumulate_dtype is not None:
            self.gradients.cast_up(self.options.accumulate_dtype)  # a model that is new in it
        try:
            state.block = block
            self._prepare(block, window or self._open_window())
        except BaseException as error:
            self._end(block, error)
            raise

    def _prepare(self, block: BlockState, window: Window) -> None:
        block.index = window.index
        if block.kind is REAL:
            block.ends = self._ends(window, block)
        elif block.kind is BlockKind.PADDING:
            block.ends = self._is_full(window) or self._pads_tail()
        absent = False
        if (data_pass := self.state.data_pass) is not None:
            block.by_hand = data_pass.by_hand
            if absent := self.rendezvous.is_absent(self.state):
                self.rendezvous.refuse_absent()
        self.reducer.enter(block, absent)
        server = self.models.inplace
        seen_by_ddp = block.ddp_modules and self.reducer.reduces(block)  # each gradient
        if server is not None and not block.fsdp_roots and not seen_by_ddp:
            block.deferred = block.deferred or ExitStack()
            block.deferred.enter_context(server.micro_batch())
        if block.kind in COUNTED:
            self.host.enter(block, self._before_step)
        if block.ends and not (block.ddp_modules or block.fsdp_roots):
            self._finish_early(block)  # a plain loop may step in a block that has no backward

    def _ends(self, window: Window, block: BlockState) -> bool:
        """Whether the window ends with this block of the loop."""
        data_pass, parts = self.state.data_pass, self.state.parts
        if data_pass is not None:
            last = self.data_pass.open_block(block, data_pass)
        else:
            last = block.ends_pass = self.host.ends_pass(window, parts is None or parts.is_last)
        if data_pass is not None and data_pass.plans:
            return block.closes_early or self._is_full(window)
        if block.closes_early or (window.index + 1 >= window.steps and not window.is_open):
            return True
        ends_open = window.is_open and parts is not None and parts.is_last
        return ends_open or (last and self.options.tail == "flush")

    def _pads_tail(self) -> bool:
        """Whether no rank has more data after the micro-batch that this rank has none for."""
        data_pass = self.state.data_pass
        known = data_pass is not None and data_pass.last and data_pass.plan is None
        return known and self.options.tail == "flush"

    def _is_full(self, window: Window) -> bool:
        """Whether one more micro-batch fills the window."""
        if window.is_open:
            return False
        plan, parts = self.state.plan, self.state.parts
        if plan is None:
            return window.index + 1 >= window.steps
        return plan.done + 1 >= len(plan.weights) and (parts is None or parts.is_last)

    def _open_window(self) -> Window:
        state, plan = self.state, self.state.plan
        steps = state.next_steps() if plan is None else max(len(plan.weights), 1)
        if self.gradients.refresh():
            self.models.refresh_inplace()
        if self.options.accumulate_dtype is not None:
            self.gradients.cast_up(self.options.accumulate_dtype)
        is_open = state.steps is None and plan is None
        if steps > 1 or is_open:
            self.models.check_windows()
        state.window = Window(steps, is_open=is_open)
        state.opened = time.perf_counter()
        if self._takes_step:
            self.gradients.clear()  # e.g. what another model's loss has left since the last close
        return state.window

    # -- backward --------------------------------------------------------------------------------

    def backward(
        self,
        block: BlockState,
        loss: Tensor,
        weight: Weight | None,
        reduction: Reduction,
        extra: Tensor | None,
        retain_graph: bool | None,
        create_graph: bool,
    ) -> None:
        """Back-propagate `loss`, weighted, into the running sum."""
        state, window = self.state, self.state.window
        if state.block is not block or window is None:
            raise RuntimeError("backward outside of its block; it belongs into `with accum(...):`")
        plan = None if state.data_pass is None else state.data_pass.plan
        if weight is not None or plan is not None:
            block.weight = one_weight(state, block, weight)
        check_backward(state, block, self.options, loss, extra, reduction)
        self._check_sum(window)
        first = not block.backwards
        if first and block.index == 0:
            self._refuse_unstepped()
        block.backwards += 1
        if isinstance(block.weight, Tensor):
            block.weight = self.gradients.at_home(block.weight)
        nothing = block.adds_nothing
        if nothing and extra is None and not block.fsdp_roots:
            self._finish_empty(block, window)
            return
        block.began = True
        self.normalizer.refer(window, block.weight, plan)
        if not self._keeps:
            if first:
                window.add_weight(block.weight)
            if not nothing:
                state.losses.add(loss, block.weight, reduction)
            if block.ends:
                self._agree(block, window)
        losses: list[Tensor] = []
        factors: list[Tensor] = []
        if not nothing:
            losses.append(loss)
            divisor = window.divisor(block.weight, reduction)
            factors.append(self.stepper.root_gradient(loss, divisor))
        elif block.fsdp_roots:
            losses, factors = zeros_from(block, loss)
        if extra is not None and plan is not None:
            losses.append(extra)
            divisor = plan.micro_batches / self.group.size
            factors.append(self.stepper.root_gradient(extra, divisor))
        kept = self.gradients.take() if self._keeps else None
        self.reducer.backward(block, losses, factors, retain_graph, create_graph)
        if kept is not None and self.stepper.keep_if_finite(kept, loss):
            window.add_weight(block.weight)
            if not nothing:
                state.losses.add(loss, block.weight, reduction)
        if block.phase < REDUCED:
            self._finish(block, window)
        if self.noise_probe is not None:
            if block.index == 0 and not block.ends:
                self.noise_probe.observe_first(window, block.weight)
            elif block.ends and not self._takes_step:
                self.noise_probe.observe_last(self.stepper.scale)
        self.gradients.watch()

    def skip(self, block: BlockState) -> None:
        """Let the block count with weight 0 and without a backward."""
        window = self.state.window
        if self.state.block is not block or window is None:
            raise RuntimeError("skip outside of its block; it belongs into `with accum(...):`")
        refuse_skip(self.state, block, self.group.size)
        block.skipped, block.weight = True, 0.0
        self._finish_empty(block, window)

    def _finish_empty(self, block: BlockState, window: Window) -> None:
        """Add nothing, but take part in what the other ranks do in this micro-batch."""
        self._check_sum(window)
        if block.kind not in COUNTED or self.reducer.reduces(block):
            self.normalizer.refer(window, 0.0, self.state.plan)
        if block.phase < REDUCED:
            self._finish(block, window)
        self.gradients.watch()

    def _finish_early(self, block: BlockState) -> None:
        """Finish the sum before a loop steps in a block of weight 0, which needs no backward."""
        window = self.state.window
        if block.adds_nothing and not block.backwards and block.ends and window is not None:
            self._finish_empty(block, window)

    def _finish(self, block: BlockState, window: Window) -> None:
        """Agree on the total weight and reduce, where this block has to."""
        if block.ends or block.kind not in COUNTED:
            self._agree(block, window)
        block.phase = REDUCED
        if block.ends or self.options.sync == "every":
            self.state.syncs += self.reducer.reduce(block)
        if block.ends and not self._takes_step:
            self.stepper.release()
        if block.empty:
            self.host.leave_empty()

    def _agree(self, block: BlockState, window: Window) -> None:
        """In a block that ends the window: agree with the other ranks."""
        if self.group.size > 1 and block.phase < AGREED:
            self._tell(block)
        self.rendezvous.agree(self.state, block, window)

    def _tell(self, block: BlockState) -> None:
        """Let the block have this rank's part of what its window tells."""
        value, probe = self.state.losses.value, self.noise_probe
        noise = [] if probe is None else probe.values(self.stepper.scale)
        block.sums = [zero(self.gradients.device) if value is None else value, *noise]
        block.overflows = self.stepper.overflows

    def _before_step(self) -> None:
        """A loop clips or steps in a closing block: the sum has to be finished."""
        if (block := self.state.block) is None:
            return
        self._finish_early(block)
        if block.phase < REDUCED:
            raise RuntimeError(
                "the loop clips or steps before the backward of the micro-batch that closes the "
                "window; forward and backward come first"
            )

    # -- leave -----------------------------------------------------------------------------------

    def leave(self, block: BlockState, error: BaseException | None) -> None:
        """A block ends, well or by `error`."""
        try:
            if error is None:
                self._complete(block)
        except BaseException as late:
            error = late
            raise
        finally:
            self._end(block, error)
        if error is None:
            self._count(block)

    def _complete(self, block: BlockState) -> None:
        """Check that the block has done what a micro-batch has to do."""
        window = self.state.window
        if window is None:
            raise RuntimeError("the window was thrown away inside of its block")
        if not block.backwards and not block.skipped:
            if not block.adds_nothing:
                raise RuntimeError(
                    f"block {block.index} of the window ended without a backward; call "
                    f"accum.backward(loss) in it (accelerator.backward in an Accelerate loop, "
                    f"never loss.backward()), or micro.skip() to leave the micro-batch out"
                )
            if block.phase < REDUCED:
                self._finish_empty(block, window)
        if block.phase < REDUCED:
            self._finish(block, window)
        if not block.ends and self.stepper.scaler is not None and self.stepper.is_unscaled():
            tear(window, "the scaler has unscaled the gradients")
            raise TornWindowError(torn_message(window))
        if block.ends and not self._takes_step:
            return
        self._check_sum(window, block.ends)

    def _end(self, block: BlockState, error: BaseException | None) -> None:
        """Undo what the block has changed, whether or not it ended well."""
        try:
            if block.deferred is not None:
                block.deferred.close()
            if block.kind in COUNTED:
                self.host.leave()
        finally:
            self.state.block = None
            if error is not None:
                self._fail(block, error)
            block.models, block.deferred = (), None  # a loop keeps its last micro-batch
            block.ddp_modules = block.fsdp_roots = block.outputs = ()

    def _fail(self, block: BlockState, error: BaseException) -> None:
        """A block ended by an exception: its micro-batch does not count."""
        window = self.state.window
        if window is None:
            return
        agreed = block.phase >= AGREED and (block.ends or block.kind not in COUNTED)
        if block.began or agreed:
            window.torn = window.torn or (
                f"{type(error).__name__} in micro-batch {block.index} after its backward began"
            )
        elif window.index == 0:
            self.state.window = None

    def _count(self, block: BlockState) -> None:
        """A block ended well: count it, and close the window if it ends."""
        state, window, data_pass = self.state, self.state.window, self.state.data_pass
        if window is None:
            return
        if block.kind in COUNTED:
            window.index += 1
            if block.kind is REAL:
                state.micro_batches += 1
                if state.parts is not None:
                    state.parts.done = state.parts.index + 1
            if data_pass is not None:
                self.data_pass.count_block(block, data_pass)
        if block.ends:
            try:
                self._close(block, window)
            except BaseException as error:
                window.torn = window.torn or f"{type(error).__name__} in its close"
                raise
        elif window.index == 0:
            state.window = None
        if data_pass is not None and data_pass.ended:
            self.data_pass.end_behind(data_pass)
        if block.kind is REAL and data_pass is None:
            self.host.count_block(ends_item=state.parts is None or state.parts.is_last)
            if block.ends_pass:
                self._end_pass()
        for function in tuple(self.after_block):
            function()

    # -- close -----------------------------------------------------------------------------------

    def _close(self, block: BlockState, window: Window) -> None:
        """The window becomes an update, or is skipped."""
        state, stepper, probe = self.state, self.stepper, self.noise_probe
        if self.group.size == 1:
            self._tell(block)
        loss_sum, *noise = block.sums
        scale, total = stepper.scale, self.normalizer.total
        norm: float | Tensor | None = None
        stepped = False
        if not block.empty and self._takes_step:
            shared = self.registry.shares_scaler()
            outcome = stepper.step(window, total, shared, noise)
            norm, stepped = outcome.grad_norm, outcome.stepped
            total, noise = outcome.total, [*outcome.read]
        elif not block.empty:
            own = self.host.step_values()
            told = self.group.sum(own) if own and not block.all_own else own
            norm, stepped = stepper.observe_step(block, told, self.group.size)
        if self._keeps:
            stepper.back_off(block.overflows)
        if probe is not None and stepped:
            probe.record(norm, total, noise)
        state.result = None
        state.closed = ClosedWindow(
            index=state.windows,
            micro_batches=window.index,
            weight=total,
            loss_sum=loss_sum,
            grad_norm=norm,
            stepped=stepped,
            scale=1.0 if scale is None else scale,
            seconds=time.perf_counter() - state.opened,
        )
        state.windows += 1
        state.updates += stepped
        state.skipped += not stepped
        if (data_pass := state.data_pass) is not None and data_pass.plans:
            data_pass.plans.pop(0)
        self.forget_window()
        try:
            self._call_back(stepped)
        finally:
            self.gradients.unwatch()
            if self._takes_step or block.empty:
                self.gradients.clear()
            elif stepped:
                self.gradients.watch_closed()
            self.gradients.cast_down()

    def _call_back(self, stepped: bool) -> None:
        """Run the callbacks for a closed window."""
        for function in tuple(self.after_update) if stepped else ():
            function()
        for report in tuple(self.after_window):
            result = self.state.last
            if result is not None:
                report(result)

    def forget_window(self) -> None:
        """The window is over; its gradients are not touched."""
        self.state.window, self.state.losses = None, LossSum()
        self.stepper.forget_window()
        if self.noise_probe is not None:
            self.noise_probe.reset()

    # -- outside of the loop's blocks ------------------------------------------------------------

    def run_empty(self, kind: BlockKind) -> BlockState:
        """Run a block of `kind` that adds nothing: it closes what is pending here, or takes part in
        a window of the other ranks."""
        block = BlockState(tuple(self.models.known()), 0.0, kind)
        self.enter(block)
        try:
            self.skip(block)
        except BaseException as error:
            self.leave(block, error)
            raise
        self.leave(block, None)
        return block

    def flush(self) -> bool:
        """Close a started window now; return whether there was one on any rank."""
        state = self.state
        if state.block is None:
            self.data_pass.finish_previous()
        if state.pending and state.plan is not None:
            raise RuntimeError(
                f"flush after {state.pending} micro-batches of a window whose total weight weigh= "
                f"has promised; finish the window, or discard() it"
            )
        block = self.run_empty(BlockKind.FLUSH)
        return block.ends and not block.empty

    def discard(self) -> None:
        """Throw the open window away, torn or not: its micro-batches, its gradients.

        A block that is still open ends here: an exception may have kept it from its end.
        """
        state = self.state
        self.host.leave()
        if state.block is not None:
            self._end(state.block, None)
        if state.pending and (plan := state.plan) is not None:
            plan.discarded = True
            if state.data_pass is not None:
                state.data_pass.plans.remove(plan)
        self.forget_window()
        if self.stepper.scaler is not None:
            forget_unscaled(self.stepper.scaler, self.options.optimizers)
        self.reducer.abandon()
        self.gradients.unwatch()
        self.gradients.clear()
        self.gradients.cast_down()

    def close(self) -> None:
        """Throw an open window away and let go of all callbacks."""
        self.discard()
        self.state.data_pass = self.state.observer = None
        for functions in (self.before_block, self.after_block, self.after_window):
            functions.clear()
        self.after_update.clear()

    def _compare_options(self) -> None:
        """Compare options where ranks first meet; in a pass of another Accumulator some may not."""
        steps = {"steps": "None" if self.state.steps is None else "a number"}
        self.group.compare(self.options.shared() | steps, wait=not self.registry.others_in_pass())

    def before_pass(self) -> None:
        """Compare the options, and say it if a rank whose data end early could not take the
        others' steps."""
        if not self.group.compared:
            self._compare_options()
        if self.group.size > 1 and not self.host.takes_over:
            warnings.warn(
                "without optimizer= or accelerator= a rank whose data end early can't take the "
                "others' steps; if the ranks' data end at different times, batches will raise",
                stacklevel=3,
            )

    def _end_pass(self) -> None:
        """The data ended."""
        state = self.state
        if state.pending and self.options.tail == "drop":
            self.discard()
        if state.pending and self.options.tail == "flush":
            in_step = state.data_pass is not None and state.data_pass.in_step
            self.run_empty(BlockKind.PADDING if in_step else BlockKind.JOIN)
        state.epoch += 1
        state.position = 0

    # -- saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counters and the open window; see `Accumulator.state_dict`."""
        state, stepper = self.state, self.stepper
        if state.block is not None:
            raise RuntimeError("state_dict inside of a block; a micro-batch is saved when it ends")
        if state.window is not None and state.window.torn is not None:
            raise TornWindowError(torn_message(state.window))
        if stepper.is_unscaled():
            raise RuntimeError(
                "state_dict between the GradScaler's unscale_ and update: a resumed run would "
                "unscale the gradients again. Save after scaler.update()"
            )
        saved: dict[str, Any] = dict(state.counters())
        saved["mean_weight"] = self.normalizer.mean
        saved["last"] = None if state.last is None else asdict(state.last)
        saved["window"] = None
        if state.window is not None:
            saved["window"] = asdict(state.window)
            losses = state.losses.value
            saved["loss_sum"] = None if losses is None else losses.clone()
            saved["overflows"] = stepper.overflows
            saved["elapsed"] = time.perf_counter() - state.opened
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        state, stepper = self.state, self.stepper
        self.discard()
        for name in COUNTERS:
            setattr(state, name, saved[name])
        self.normalizer.mean = saved["mean_weight"]
        state.closed = None
        state.result = None if saved["last"] is None else WindowResult(**saved["last"])
        if saved["window"] is not None:
            state.window = Window(**saved["window"])
            state.losses.value, stepper.overflows = saved["loss_sum"], saved["overflows"]
            state.opened = time.perf_counter() - saved["elapsed"]

    # -- what tears a window ---------------------------------------------------------------------

    def _check_sum(self, window: Window, closes: bool = False) -> None:
        """Raise TornWindowError if the window is torn, or if the sum is not what accum has left."""
        if window.torn is None and (what := self.gradients.what_changed(closes)) is not None:
            tear(window, what + self.registry.explain_change())
        if window.torn is not None:
            raise TornWindowError(torn_message(window))

    def _refuse_unstepped(self) -> None:
        """The loop steps, and a window begins: the gradients of the last one have to be gone."""
        if (what := self.gradients.still_there()) is not None:
            closed = self.state.windows
            raise RuntimeError(
                f"window {closed - 1} has closed, and {what} is still there: the loop has not "
                f"stepped or not zeroed it, and this window would add to it. Call "
                f"optimizer.step() and optimizer.zero_grad() after each block whose micro.closes "
                f"is true, or accum.discard() to throw the gradient away"
            )


def tear(window: Window, why: str) -> None:
    """Mark `window` as torn, with the reason."""
    window.torn = (
        f"{why} while the window was open (zero_grad, clip and unscale belong after the "
        f"micro-batch that closes)"
    )


def torn_message(window: Window) -> str:
    """The message for a torn window: what is wrong, and what to do."""
    planned = "" if window.is_open else f" of {window.steps}"
    return (
        f"the window is torn after {window.index}{planned} micro-batches: {window.torn}. "
        f"accum.discard() throws it away and the next block starts a new one"
    )


def zeros_from(block: BlockState, loss: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Where a backward that adds nothing starts, for ranks that need its collectives.

    Not at the loss, whose NaN (a mean over no targets) times zero is NaN, but at what the
    sharded modules have given.
    """
    outputs = [output for output in block.outputs if output.requires_grad]
    outputs = outputs or [loss]
    return outputs, [output.new_zeros(()).expand_as(output) for output in outputs]
