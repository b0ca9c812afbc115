"""Who turns a finished sum into an update, accum or the loop, and at which scale."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accumplug.core.gradients import GradientBuffer
from accumplug.core.optimizer_step import scale_state, take_update
from accumplug.core.window import Weight, Window, is_number
from accumplug.errors import NonFiniteError
from accumplug.parallel.ddp import forget_marks

if TYPE_CHECKING:
    from accumplug.accumulator import Accumulator
    from accumplug.core.options import Options
    from accumplug.loop.micro_batch import MicroBatch


class Stepper:
    """The end of a window for the optimizers.

    The scale of a window is the scaler's when its first loss is back-propagated, and stays it
    even if the scaler is shared with another Accumulator that updates it meanwhile.
    """

    def __init__(
        self, accum: Accumulator, options: Options, running: GradientBuffer, scaler: Any, loop: Any
    ) -> None:
        self.scale: Tensor | None = None
        """The scaler's scale in the open window, 0-dim; None before its first loss."""
        self.overflows = 0.0
        """Micro-batches left out although their loss was finite: the scale is too large."""
        self._stepping = False
        self._scaled_by: object = None
        self._options = options
        self._sum = running
        self._scaler = scaler
        self._loop = loop
        self._root: tuple[Any, Tensor] | None = None
        self._refuse_other_steps(accum)

    def root_gradient(self, loss: Tensor, divisor: Weight) -> Tensor:
        """What a backward from `loss` starts with: 1 / divisor, times the scaler's scale.

        The same bits as dividing the loss by a number and scaling the quotient.
        """
        if self._scaler is None and is_number(divisor):
            kind = (divisor, loss.dtype, loss.device, loss.shape)
            if self._root is None or self._root[0] != kind:
                self._root = (kind, loss.detach().new_full(loss.shape, 1.0 / divisor))
            return self._root[1]
        one = torch.ones((), device=loss.device)
        if self._scaler is not None and self.scale is None:
            self.scale = self._scaler.scale(one)
            self._scaled_by = scale_state(self._scaler)
        wide = loss.dtype if loss.dtype is torch.float64 else torch.float32
        scaled: Tensor = (one if self.scale is None else self.scale).to(wide) / divisor
        return scaled.to(loss.dtype).reshape(loss.shape)

    def keep(self, kept: list[Tensor | None], loss: Tensor) -> bool:
        """Add the micro-batch that has just run to the `kept` sum if it is finite; say whether."""
        finite_loss = torch.isfinite(loss.detach()).all().to(self._sum.device)
        both = torch.stack([self._sum.finite(), finite_loss]).tolist()
        self._sum.put(kept, added=all(both))
        if not all(both):
            for ddp in self._sum.ddp_modules(self._sum.models):
                forget_marks(ddp)
        if both[1] and not both[0] and self._scaler is not None:
            self.overflows += 1.0
        return all(both)

    def hand_over(self) -> None:
        """The sum is finished: a loop that steps gets it in a form that its optimizer takes."""
        self._follow_scale()
        if self._loop is None:
            self._sum.narrow()
        else:
            self._loop.before_step(self._sum.narrow)

    def take(
        self, window: Window, total: Weight, shared: bool
    ) -> tuple[Tensor | float | None, bool]:
        """Step the optimizers; return the norm of the gradient and whether one has stepped.

        `shared`: the scaler is another Accumulator's, too, so its scale may have changed.
        """
        self._follow_scale(shared)
        self._stepping = True
        try:
            outcome = take_update(
                self._sum.stepped_parameters,
                self._options.optimizers,
                self._options.schedulers,
                self._scaler,
                self._options.max_grad_norm,
                self._options.nonfinite,
                None if is_number(total) else total,
                self._sum.narrow,
            )
        except NonFiniteError as error:
            window.torn = str(error)
            raise
        finally:
            self._stepping = False
        return outcome.grad_norm, outcome.stepped

    def see(self, micro: MicroBatch, clips: Any, ranks: int) -> tuple[Tensor | float | None, bool]:
        """The loop steps: return the norm that it has clipped by, and whether it has stepped.

        `clips`: how the loops of all ranks have clipped, for one that has nothing to step on.
        """
        if self._loop is None:
            return None, not self._backed_off()
        if not micro.flushes and 0 < micro.closers < ranks and float(clips[-1]) < micro.closers:
            raise RuntimeError(
                "a rank without data has to take the step that the others take, and their loop has "
                "not taken it inside of the closing block; step there, or give optimizer="
            )
        if micro.flushes:
            self._loop.let_step()
        elif micro.virtual or (micro.skipped and not self._loop.stepped):
            self._loop.take_step(*clips)
        return self._loop.grad_norm, not (self._loop.was_skipped() or self._backed_off())

    def back_off(self, overflows: float) -> None:
        """Lower the scale if micro-batches were left out because of it, on any rank."""
        if overflows > 0:
            self._scaler.update(self._scaler.get_scale() * self._scaler.get_backoff_factor())

    def forget(self) -> None:
        """The window is over."""
        self.scale, self.overflows = None, 0.0

    def _follow_scale(self, shared: bool = False) -> None:
        """Bring the sum to the scaler's scale, if that was changed while the window was open."""
        if self._scaler is not None and self.scale is None:  # a rank that has had no data yet
            self.scale = self._scaler.scale(torch.ones((), device=self._sum.device))
        elif self.scale is not None and (shared or scale_state(self._scaler) != self._scaled_by):
            now = self._scaler.scale(torch.ones_like(self.scale))
            self._sum.scale(now / self.scale)
            self.scale = now

    def _backed_off(self) -> bool:
        """Whether the scaler has skipped the loop's step in the closing block."""
        if self._scaler is None or self.scale is None:
            return False
        return bool(self._scaler.scale(torch.ones_like(self.scale)) < self.scale)

    def _refuse_other_steps(self, accum: Accumulator) -> None:
        """Let the optimizers raise if the loop steps them on a sum that is not finished."""
        this, owner = weakref.ref(self), weakref.ref(accum)

        def refuse_step(*_: Any) -> None:
            update, accum = this(), owner()
            if update is None or accum is None or any(a._update._stepping for a in accum._live):
                return
            if accum._micro is not None or accum.pending:
                raise RuntimeError(
                    "accum takes the step (optimizer= was given); leave optimizer.step() out of "
                    "the loop"
                )

        for optimizer in self._options.optimizers:
            weakref.finalize(self, optimizer.register_step_pre_hook(refuse_step).remove)
