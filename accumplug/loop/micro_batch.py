"""One micro-batch, as the loop sees it."""

from __future__ import annotations

from types import TracebackType

from torch import Tensor

from accumplug.core.options import Reduction
from accumplug.core.state import BlockState
from accumplug.core.window import Weight
from accumplug.loop.lifecycle import Lifecycle


class MicroBatch:
    """One micro-batch, as `with accum(model) as micro` yields it; good for one block."""

    __slots__ = ("_block", "_lifecycle")

    def __init__(self, lifecycle: Lifecycle, block: BlockState) -> None:
        self._lifecycle = lifecycle
        self._block = block

    @property
    def index(self) -> int:
        """Its place in the window, from 0."""
        return self._block.index

    @property
    def weight(self) -> Weight:
        """How many items its loss is a mean over."""
        return self._block.weight

    @property
    def closes(self) -> bool:
        """Whether the window becomes an update with this micro-batch.

        It turns false in the backward if all weights of the window turn out to be 0.
        """
        return self._block.ends and not self._block.empty

    def backward(
        self,
        loss: Tensor,
        weight: Weight | None = None,
        reduction: Reduction = "mean",
        *,
        extra: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """The same as `Accumulator.backward`."""
        self._lifecycle.backward(
            self._block, loss, weight, reduction, extra, retain_graph, create_graph
        )

    def skip(self) -> None:
        """Let this micro-batch count with weight 0 and without a backward, e.g. for bad data."""
        self._lifecycle.skip(self._block)

    def __enter__(self) -> MicroBatch:
        self._lifecycle.enter(self._block)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lifecycle.leave(self._block, error)
