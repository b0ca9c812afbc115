"""Who turns a finished sum into an update, accum or the loop, and at which scale."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from accumplug.core.gradients import GradientBuffer
from accumplug.core.host import Host
from accumplug.core.optimizer_step import Outcome, scale_state, take_update, unscaled
from accumplug.core.options import Options, Scaler
from accumplug.core.state import BlockState, LoopState
from accumplug.core.window import Weight, Window
from accumplug.errors import NonFiniteError
from accumplug.loop.registry import Registry
from accumplug.parallel.ddp import forget_marks


class Stepper:
    """Turns the finished sum into an update, or hands it to the loop.

    The scale of a window is the scaler's when its first loss is back-propagated, and stays it
    even if the scaler is shared with another Accumulator that updates it meanwhile.
    """

    def __init__(
        self,
        state: LoopState,
        gradients: GradientBuffer,
        options: Options,
        scaler: Scaler | None,
        host: Host,
    ) -> None:
        self.scale: Tensor | None = None
        """The scaler's scale in the open window, 0-dim; None before its first loss."""
        self.overflows = 0.0
        """Micro-batches left out although their loss was finite: the scale is too large."""
        self.scaler = scaler
        self._gradients = gradients
        self._options = options
        self._host = host
        self._scaled_by: object = None
        self._kind: tuple[float, torch.dtype, torch.device, torch.Size] | None = None
        self._factor = torch.empty(0)  # the root gradient of that kind
        self._refuse_other_steps(state)

    def root_gradient(self, loss: Tensor, divisor: Weight) -> Tensor:
        """The root gradient of a backward from `loss`: 1 / divisor, times the scaler's scale.

        The same bits as dividing the loss by a number and scaling the quotient.
        """
        if self.scaler is None and isinstance(divisor, float):
            kind = (divisor, loss.dtype, loss.device, loss.shape)
            if self._kind != kind:
                self._kind, self._factor = kind, loss.detach().new_full(loss.shape, 1.0 / divisor)
            return self._factor
        one = torch.ones((), device=loss.device)
        if self.scaler is not None and self.scale is None:
            self.scale = self.scaler.scale(one)
            self._scaled_by = scale_state(self.scaler)
        wide = loss.dtype if loss.dtype is torch.float64 else torch.float32
        if isinstance(divisor, Tensor):
            divisor = divisor.to(loss.device, non_blocking=True)
        scale = one if self.scale is None else self.scale.to(loss.device, non_blocking=True)
        scaled: Tensor = scale.to(wide) / divisor
        return scaled.to(loss.dtype).reshape(loss.shape)

    def keep_if_finite(self, kept: list[Tensor | None], loss: Tensor) -> bool:
        """Add the micro-batch that has just run to the `kept` sum if it is finite; say whether."""
        gradients = self._gradients
        finite_loss = torch.isfinite(loss.detach()).all().to(gradients.device)
        both = torch.stack([gradients.finite(), finite_loss]).tolist()
        gradients.put(kept, added=all(both))
        if not all(both):
            for ddp in gradients.ddp_modules(gradients.models):
                forget_marks(ddp)
        if both[1] and not both[0] and self.scaler is not None:
            self.overflows += 1.0
        return all(both)

    def release(self) -> None:
        """The sum is finished: a loop that steps gets it in a form that its optimizer takes."""
        self._follow_scale()
        self._host.before_step(self._gradients.cast_down)

    def step(
        self, window: Window, total: Weight, shared: bool, unread: Sequence[float | Tensor]
    ) -> Outcome:
        """Step the optimizers; return what was read for it, with the one wait for the device.

        `shared`: the scaler is another Accumulator's, too, so its scale may have changed.
        `unread`: values to read with the others.
        """
        self._follow_scale(shared)
        Registry.stepping += 1
        try:
            return take_update(
                self._gradients.stepped_parameters,
                self._options.optimizers,
                self._options.schedulers,
                self.scaler,
                self._options.max_grad_norm,
                self._options.nonfinite,
                total,
                self._gradients.cast_down,
                unread,
            )
        except NonFiniteError as error:
            window.torn = str(error)
            raise
        finally:
            Registry.stepping -= 1

    def observe_step(
        self, block: BlockState, values: Sequence[Tensor | float], ranks: int
    ) -> tuple[Tensor | float | None, bool]:
        """The loop steps: return the norm that it has clipped by, and whether it has stepped.

        `values`: how the loops of all ranks have stepped, for one that has nothing to step on.
        """
        norm, stepped = self._host.observe_step(block, values, ranks)
        return norm, stepped and not self._backed_off()

    def back_off(self, overflows: float) -> None:
        """Lower the scale if micro-batches were left out because of it, on any rank."""
        if overflows > 0 and self.scaler is not None:
            self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())

    def is_unscaled(self) -> bool:
        """Whether the scaler stands between unscale_ and update."""
        return self.scaler is not None and unscaled(self.scaler)

    def forget_window(self) -> None:
        """Forget the open window."""
        self.scale, self.overflows = None, 0.0

    def _follow_scale(self, shared: bool = False) -> None:
        """Bring the sum to the scaler's scale, if that was changed while the window was open."""
        if self.scaler is None:
            return
        if self.scale is None:  # a rank that has had no data yet
            self.scale = self.scaler.scale(torch.ones((), device=self._gradients.device))
        elif shared or scale_state(self.scaler) != self._scaled_by:
            now = self.scaler.scale(torch.ones_like(self.scale))
            self._gradients.scale(now / self.scale)
            self.scale = now

    def _backed_off(self) -> bool:
        """Whether the scaler has skipped the loop's step in the closing block."""
        if self.scaler is None or self.scale is None:
            return False
        return bool(self.scaler.scale(torch.ones_like(self.scale)) < self.scale)

    def _refuse_other_steps(self, state: LoopState) -> None:
        """Let the optimizers raise if the loop steps them on a sum that is not finished."""
        owner = weakref.ref(state)

        def refuse_step(*_: object) -> None:
            now = None if Registry.stepping else owner()
            if now is not None and (now.block is not None or now.pending):
                raise RuntimeError(
                    "accum takes the step (optimizer= was given); leave optimizer.step() out of "
                    "the loop"
                )

        for optimizer in self._options.optimizers:
            Registry.remove_with(self, optimizer.register_step_pre_hook(refuse_step))
