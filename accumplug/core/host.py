"""Who takes the step at the end of a window: accum, a plain loop, or the loop of a framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from accumplug.core.options import Scheduler
from accumplug.core.state import BlockState
from accumplug.core.window import Window


class Host:
    """The loop around an Accumulator; as it stands here, one without a framework, where accum takes
    the step or the loop does and is not looked at. An integration is a subclass, and nothing else
    asks which it is.

    Attributes:
        takes_over: a rank without data can take the step that the loops of the others take.
        has_stepped: the loop has nothing left to do for a window that has closed.
    """

    def __init__(self, takes_step: bool) -> None:
        self.takes_step = self.takes_over = takes_step

    @property
    def has_stepped(self) -> bool:
        return self.takes_step

    def models(self) -> list[nn.Module]:
        """The models that the framework knows, as wrapped for the ranks."""
        return []

    def optimizers(self) -> list[Optimizer]:
        """Those that the loop has made known."""
        return []

    def schedulers(self) -> list[Scheduler]:
        """Those that the loop has made known."""
        return []

    def enter(self, block: BlockState, finish: Callable[[], None]) -> None:
        """A block of the loop begins. `finish` has to run before a step in one that closes."""

    def leave(self) -> None:
        """The block is over, with or without an exception."""

    def ends_pass(self, window: Window, ends_item: bool) -> bool:
        """Whether the loop's data end with the block that begins, as far as the host knows.

        `ends_item`: no other part of its item follows (`Accumulator.split`).
        """
        return False

    def count_block(self, ends_item: bool) -> None:
        """The block has ended well, in a loop that does not use `batches`."""

    def leave_empty(self) -> None:
        """The window has no weight: keep the loop from clipping and stepping."""

    def before_step(self, function: Callable[[], None]) -> None:
        """Run `function` before the loop steps in this block; at once where that is not known."""
        function()

    def step_values(self) -> list[float]:
        """How this rank's loop has clipped and stepped, to be summed over the ranks."""
        return []

    def observe_step(
        self, block: BlockState, values: Sequence[Tensor | float], ranks: int
    ) -> tuple[Tensor | float | None, bool]:
        """The window has closed: the norm that the loop has clipped by, and whether it stepped.

        `values`: the sums of `step_values`, for a rank that has to step like the others.
        """
        return None, True
