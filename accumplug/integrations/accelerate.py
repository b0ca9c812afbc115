"""Loops that have an Accelerator. The only file that knows Accelerate.

Read from accelerate 1.15: what the rest of such a loop looks at is
`gradient_state.sync_gradients` (optimizer, scheduler and zero_grad of prepared objects are
no-ops without it), and it divides the loss in `accelerator.backward`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer

from accumplug.core.host import Host
from accumplug.core.options import Options, Scheduler, unprepared
from accumplug.core.state import COUNTED, BlockKind, BlockState
from accumplug.core.window import Window
from accumplug.integrations.accelerate_loaders import ADVICE, LoaderPass, LoaderWatch
from accumplug.loop.registry import Registry
from accumplug.loop.unsupported import ENGINE
from accumplug.parallel.fsdp import whole
from accumplug.parallel.private import require

_MISSING = object()
PURPOSE = "who steps, and when"
PREPARED = ("_models", "_optimizers", "_schedulers", "step", "_save_model_state_pre_hook")
STATE = (
    *("_set_sync_gradients", "sync_gradients", "sync_with_dataloader"),
    *("_add_dataloader", "dataloader_references"),
)
WRAPPED = ("gradient_state", "optimizer", "step_was_skipped")
"""Names of Accelerator, of its gradient state, and of an optimizer that it has prepared."""


def check_accelerate(accelerator: Accelerator, options: Options) -> None:
    """Raise MovedError if this Accelerate has not all that is read here, before it is used."""
    require(accelerator, PREPARED, PURPOSE, "accelerate")
    require(accelerator.gradient_state, STATE, PURPOSE, "accelerate")
    for optimizer in (*accelerator._optimizers, *options.optimizers):
        _check_prepared(optimizer)


def _check_prepared(optimizer: Any) -> None:
    # without these names it would be taken for an optimizer of torch, whose step is not seen
    if isinstance(optimizer, AcceleratedOptimizer):
        require(optimizer, WRAPPED, PURPOSE, "accelerate")


class AccelerateHost(Host):
    """Makes an Accelerator follow a window for the length of a block."""

    def __init__(
        self,
        accelerator: Accelerator,
        backward: Callable[..., None],
        options: Options,
        steps: int | Callable[[int], int] | None,
    ) -> None:
        check_accelerate(accelerator, options)
        _refuse_late(accelerator)
        _refuse(accelerator, options, steps)
        self.accelerator = accelerator
        super().__init__(bool(options.optimizers))
        self.takes_over = True
        self.grad_norm: Tensor | None = None
        """What the loop's clip in the closing block returned."""
        self.stepped = False
        """Whether an optimizer of the loop has stepped in the closing block."""
        self._clipped: tuple[float, float] | None = None
        self._clipped_value: float | None = None
        self._state = accelerator.gradient_state
        self._finish: Callable[[], None] = _nothing
        self._kept: dict[str, Any] = {}
        self._sync_before = True
        self._step_seen: int | None = accelerator.step
        self._tail = options.tail
        self._watch = LoaderWatch(accelerator.gradient_state, partial(_trains, accelerator))
        self._pass: LoaderPass | None = None
        self._hooks: list[Any] = []
        self._warned = False
        common = {"backward": backward, "accumulate": _refuse_accumulate}
        quiet = {
            "clip_grad_norm_": _no_norm,
            "clip_grad_value_": _nothing,
            "unscale_gradients": _nothing,
        }
        self._open = common | quiet
        self._closing: dict[str, Any] = common | {
            "clip_grad_norm_": self._clip,
            "clip_grad_value_": self._clip_value,
        }
        if self.takes_step:
            taken = _nothing if options.max_grad_norm is not None else _refuse_clip
            self._closing = self._open | {"clip_grad_norm_": taken, "clip_grad_value_": taken}
        self._forget_step_on_load()

    @property
    def has_stepped(self) -> bool:
        """Whether the loop has nothing left to do for a window that has closed."""
        return self.takes_step or self.stepped or self.was_skipped()

    def models(self) -> list[nn.Module]:
        """The models that were prepared."""
        return list(self.accelerator._models)

    def optimizers(self) -> list[Optimizer]:
        """The optimizers that were prepared."""
        return [unprepared(optimizer) for optimizer in self.accelerator._optimizers]

    def schedulers(self) -> list[Scheduler]:
        """The schedulers that were prepared."""
        return [unprepared(scheduler) for scheduler in self.accelerator._schedulers]

    def enter(self, block: BlockState, finish: Callable[[], None]) -> None:
        """Put the Accelerator into the state of a micro-batch.

        `finish` runs before the loop clips or steps in one that closes.
        """
        closes = block.ends
        self._finish = finish
        if self.accelerator.step < 0:  # a mark of accelerate_state
            self.accelerator.step = self._step_seen or 0
        if self._step_seen is not None and self.accelerator.step != self._step_seen:
            raise RuntimeError(
                f"accelerator.accumulate was used beside accum (accelerator.step went from "
                f"{self._step_seen} to {self.accelerator.step}): two counters can't own one "
                f"window. Use `with accum(model):` in its place"
            )
        self._step_seen = self.accelerator.step
        if closes and not self.takes_step:
            self._refuse_shared_scaler()
            self.grad_norm, self.stepped = None, False
            self._clipped = self._clipped_value = None
            self._watch_steps()
            self.before_step(finish)
        attributes = vars(self.accelerator)
        patches = self._closing if closes else self._open
        self._kept = {name: attributes.get(name, _MISSING) for name in patches}
        self._sync_before = self._state.sync_gradients
        attributes.update(patches)
        self._state._set_sync_gradients(closes and not self.takes_step)

    def leave(self) -> None:
        """Give the Accelerator back what it had, if anything is still to be given back."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if not self._kept:
            return
        attributes = vars(self.accelerator)
        for name, value in self._kept.items():
            if value is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = value
        nested = self._kept.get("backward", _MISSING) is not _MISSING
        if nested or self.takes_step:  # else it stays, for a step after the block
            self._state._set_sync_gradients(self._sync_before)
        self._kept = {}

    def leave_empty(self) -> None:
        """The window has no weight: what the loop does when it closes must not happen."""
        vars(self.accelerator).update(self._open)
        self._state._set_sync_gradients(False)

    def ends_pass(self, window: Window, ends_item: bool) -> bool:
        """Whether the block that begins is the last one of the loader that feeds the loop.

        That is the innermost one that is being iterated at the first micro-batch of a pass, and
        stays it while its pass lasts.
        """
        one = self._pass
        if one is None or not (one.counted and one.running):
            self._follow(window)
        elif one.is_in_doubt and (new := self._watch.next_to(one)) is not None:
            self._leave(one, window, one.items.outstanding)
            self._pass = new
        return self._pass is not None and self._pass.open_block(window, ends_item)

    def _follow(self, window: Window) -> None:
        """Find the pass that feeds the loop."""
        running = self._watch.running() if self._watch.passes else []
        if not running and (running := self._watch.read_whole()):
            self._follow_whole(running)
        elif not running:
            self._say_uncounted()
        one = self._pass
        if any(one is other for other in running):
            return
        if one is not None and one.ended_unseen:
            self._leave(one, window, window.index)
        self._pass = running[-1] if running else None
        if len(running) > 1:
            self._warn(
                f"{len(running)} prepared loaders are being iterated over; windows follow the "
                f"innermost. `for batch in accum.batches(loader)` says which one it is"
            )

    def _leave(self, one: LoaderPass, window: Window, open_ones: int) -> None:
        """A new pass begins, and no block of `one` was known to be its last one."""
        if self._tail == "carry" or window.steps == 1 or not open_ones:
            return
        raise RuntimeError(
            f"a prepared loader has ended where no block was known to be its last one "
            f"({one.items.outstanding} of {one.items.handed_out} batches had no block, or one had "
            f"several), so its tail would run into the next pass ({window.index} micro-batches "
            f"are pending). Call micro.skip() in a block for what is left out, accum.split for "
            f'what is cut, or say tail="carry" to go on with the window. {ADVICE} and none of '
            f"this is needed"
        )

    def _follow_whole(self, passes: list[LoaderPass]) -> None:
        """These passes were read whole before this block."""
        if len(passes) > 1:
            raise RuntimeError(
                f"{len(passes)} prepared loaders were read to their ends before this block, and it "
                f"can't be seen which of them the loop trains on. {ADVICE}"
            )
        passes[0].guessed = not passes[0].is_kept and self._tail != "carry"
        self._warn(
            f"a prepared loader was read to its end before this block, and its "
            f"{passes[0].items.outstanding} batches are taken for those that the loop trains on. "
            f"{ADVICE}, which says so"
        )

    def _say_uncounted(self) -> None:
        """No prepared loader is being iterated over: say it if one was read to its end first."""
        one = self._pass
        if one is not None and not one.counted and one.blocks and not one.closed:
            raise RuntimeError(
                f"a prepared loader has ended after {one.blocks} of its batches had a block, and "
                f"blocks go on: the loop reads ahead, and this pass can't be counted. {ADVICE}"
            )
        uncounted = any(not p.blocks for p in self._watch.passes)
        if uncounted or (one is not None and not one.counted):
            self._warn(
                f"a prepared loader was read to its end before this block. If the loop trains on "
                f"its batches, the end of the data can't be seen: windows go on over it. {ADVICE}"
            )

    def _warn(self, text: str) -> None:
        """Once for each Accumulator."""
        if not self._warned:
            self._warned = True
            warnings.warn(text, stacklevel=9)

    def count_block(self, ends_item: bool) -> None:
        """The block has ended well."""
        if self._pass is not None and ends_item:
            self._pass.end_block()

    def was_skipped(self) -> bool:
        """Whether the scaler kept the loop's optimizers from stepping in the block that closed."""
        return not self.stepped and any(o.step_was_skipped for o in self.accelerator._optimizers)

    def step_values(self) -> list[float]:
        """How this rank's loop clipped, to be summed over the ranks."""
        if self.takes_step:
            return []
        norm = [0.0, 0.0, 0.0] if self._clipped is None else [1.0, *self._clipped]
        value = [0.0, 0.0] if self._clipped_value is None else [1.0, self._clipped_value]
        return [*norm, *value, float(self.stepped or self.was_skipped())]

    def _take_step(
        self,
        clips: float,
        max_norms: float,
        norm_types: float,
        value_clips: float,
        values: float,
        _: float,
    ) -> None:
        """Do for a rank without data what the loop does on the others.

        `clips` of them have clipped by norm, `value_clips` by value; the sums of what they have
        clipped by say how.
        """
        self._state._set_sync_gradients(True)
        if (count := float(value_clips)) > 0:
            parameters = [p for model in self.models() for p in model.parameters()]
            self.accelerator.clip_grad_value_(parameters, float(values) / count)
        if (count := float(clips)) > 0:
            parameters = [p for model in self.models() for p in model.parameters()]
            self.grad_norm = self.accelerator.clip_grad_norm_(
                parameters, float(max_norms) / count, float(norm_types) / count
            )
        for prepared in (*self.accelerator._optimizers, *self.accelerator._schedulers):
            prepared.step()
        for optimizer in self.accelerator._optimizers:
            optimizer.zero_grad()
        self._state._set_sync_gradients(False)

    def before_step(self, function: Callable[[], None]) -> None:
        """Let `function` run when the loop steps its first optimizer in this block."""

        def run(*_: Any) -> None:
            function()

        for optimizer in self.accelerator._optimizers:
            self._hooks.append(unprepared(optimizer).register_step_pre_hook(run))

    def observe_step(
        self, block: BlockState, values: Sequence[Tensor | float], ranks: int
    ) -> tuple[Tensor | float | None, bool]:
        """The window has closed: the norm that the loop has clipped by, and whether it stepped."""
        flushes = block.kind is BlockKind.FLUSH
        if not flushes and 0 < block.closers < ranks and float(values[-1]) < block.closers:
            raise RuntimeError(
                "a rank without data has to take the step that the others take, and their loop has "
                "not taken it inside of the closing block; step there, or give optimizer="
            )
        if flushes:  # the loop takes the step outside of a block
            self.grad_norm, self.stepped = None, False
            self._state._set_sync_gradients(True)
        elif block.kind not in COUNTED or (block.skipped and not self.stepped):
            self._take_step(*map(float, values))
        return self.grad_norm, not self.was_skipped()

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        self._finish()
        self._clipped = (float(max_norm), float(norm_type))
        norm = Accelerator.clip_grad_norm_(self.accelerator, parameters, max_norm, norm_type)
        self.grad_norm = whole(norm.detach()).clone() if isinstance(norm, Tensor) else norm
        return norm

    def _clip_value(self, parameters: Any, clip_value: float) -> None:
        self._finish()
        self._clipped_value = float(clip_value)
        Accelerator.clip_grad_value_(self.accelerator, parameters, clip_value)

    def _watch_steps(self) -> None:
        def saw(*_: Any) -> None:
            self.stepped = True

        for optimizer in self.accelerator._optimizers:
            _check_prepared(optimizer)  # it may be new
            self._hooks.append(unprepared(optimizer).register_step_post_hook(saw))

    def _forget_step_on_load(self) -> None:
        # load_state brings back the `step` of the run that saved, which is not a use of accumulate
        this = weakref.ref(self)

        def forget(models: Any, directory: Any) -> None:
            if (loop := this()) is not None:
                loop._step_seen = None

        handle = self.accelerator.register_load_state_pre_hook(forget)
        Registry.remove_with(self, handle)

    def _refuse_shared_scaler(self) -> None:
        scaler = self.accelerator.scaler
        if scaler is not None and scaler.is_enabled() and len(self.accelerator._optimizers) > 1:
            raise ValueError(
                f"{len(self.accelerator._optimizers)} prepared optimizers share one GradScaler: "
                f"each optimizer.step() of Accelerate updates it, so the second one is unscaled "
                f"twice. Let accum take the step: Accumulator(..., optimizer=[...])"
            )


def _refuse(
    accelerator: Accelerator, options: Options, steps: int | Callable[[int], int] | None
) -> None:
    """Raise ValueError for an Accelerator that a window can't be made right with."""
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(ENGINE)
    own = accelerator.gradient_accumulation_steps
    if own not in (1, steps):
        raise ValueError(
            f"the Accelerator was built with gradient_accumulation_steps={own}, the Accumulator "
            f"with steps={steps}; leave it at 1 in the Accelerator"
        )
    if options.tail == "flush" and not accelerator.gradient_state.sync_with_dataloader:
        raise ValueError(
            "the Accelerator was built with sync_with_dataloader=False, which carries a window "
            'over the end of the data; say tail="carry" (or "drop"), or leave it at True'
        )
    if options.scaler is not None and not options.optimizers:
        raise ValueError(
            "scaler= beside an Accelerator, whose optimizers would not use it; let accum take the "
            "step (optimizer=...), or let the Accelerator make its own scaler"
        )
    fp16 = accelerator.mixed_precision == "fp16"
    if fp16 and accelerator.scaler is None and options.scaler is None:
        raise ValueError(
            'mixed_precision="fp16" on this device trains in fp32 without saying so (Accelerate '
            'makes no scaler and no autocast here). Use "bf16", or "no" with your own '
            'torch.autocast("cpu", torch.float16) and scaler=torch.amp.GradScaler("cpu")'
        )
    optimizers = map(unprepared, accelerator._optimizers)
    fused = any(hasattr(optimizer, "_step_supports_amp_scaling") for optimizer in optimizers)
    if fused and accelerator.scaler is not None and not options.optimizers:
        warnings.warn(
            "a fused optimizer under a GradScaler hides from Accelerate that an update was "
            "skipped: the scheduler would tick. Let accum take the step: "
            "Accumulator(..., optimizer=...)",
            stacklevel=4,
        )


def _refuse_late(accelerator: Accelerator) -> None:
    """Raise RuntimeError if load_state has brought back a window before there was an Accumulator.

    `save_state` inside of a window leaves its size, negative, in Accelerate's own counter, which
    nothing else makes negative; AccelerateHost sets it right in the next block.
    """
    if accelerator.step < 0:
        raise RuntimeError(
            f"load_state has brought back a run inside of a window, after {-accelerator.step} "
            f"micro-batches, and there was no Accumulator to take its gradients. Make the "
            f"Accumulator before accelerator.load_state"
        )


def _trains(accelerator: Accelerator) -> bool:
    """Whether a loop that begins here is one that trains, as far as can be known."""
    models = accelerator._models
    return torch.is_grad_enabled() and (not models or any(model.training for model in models))


def _refuse_accumulate(*models: Any) -> Any:
    raise RuntimeError(
        "accelerator.accumulate inside of accum: two counters can't own one window. "
        "`with accum(model):` takes its place"
    )


def _refuse_clip(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "accum takes the step (optimizer= was given), so the loop can't clip before it; give the "
        "Accumulator max_grad_norm= instead"
    )


def _no_norm(*args: Any, **kwargs: Any) -> Tensor:
    """Clip nothing: the sum is not finished. nan, as there is no norm yet."""
    return torch.tensor(float("nan"))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the sum is not finished."""
