"""The buckets of DistributedDataParallel around prepared models, from one process to the next.

Accelerate keeps the modules that it was given, and not the wrappers that it has made around them.
So a wrapper is known from its first block on, and gets the buckets of the process that saved there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accumplug.loop.lifecycle import Lifecycle
from accumplug.parallel.ddp import bucket_order, ddp_modules, settle_buckets

Order = list[str] | None
"""The names of a model's parameters in the order of its buckets; None before they are final."""


class PreparedBuckets:
    """The buckets of the prepared models of one Accumulator."""

    def __init__(self, own: Lifecycle) -> None:
        self._state, self._gradients = own.state, own.gradients
        self._found: weakref.WeakKeyDictionary[nn.Module, Order] = weakref.WeakKeyDictionary()
        self._waiting: dict[int, list[str]] = {}
        self.agreed = False
        """All ranks that go through `batches` have said that they run the first block together."""
        own.models.on_admit.append(self._settle)

    def orders(self, models: Sequence[nn.Module]) -> list[Order]:
        """Of each of `models`, unwrapped."""
        wrappers = [ddp for model in self._gradients.models for ddp in ddp_modules(model)]
        by_module = {id(ddp.module): ddp for ddp in wrappers}
        return [self._order(by_module.get(id(model))) for model in models]

    def _order(self, ddp: DistributedDataParallel | None) -> Order:
        if ddp is None or ddp.find_unused_parameters or not self._state.syncs:
            return None
        if ddp not in self._found:
            self._found[ddp] = bucket_order(ddp)
        return self._found[ddp]

    def restore(self, models: Sequence[nn.Module], orders: Sequence[Order]) -> None:
        """Give the wrappers of `models` these buckets, once they are known."""
        pairs = zip(models, orders, strict=False)
        self._waiting = {id(model): order for model, order in pairs if order is not None}

    @property
    def waits(self) -> bool:
        """Whether the first block of a wrapper gives it other buckets, together with all ranks."""
        return bool(self._waiting)

    def _settle(self, model: nn.Module) -> None:
        """`model` is in a block for the first time; in a pass perhaps not on all ranks."""
        if self._state.data_pass is not None and not self.agreed:
            self._waiting.clear()  # none may wait in a collective for a rank that does not come
        for ddp in ddp_modules(model) if self._waiting else ():
            order = self._waiting.pop(id(ddp.module), None)
            if order is not None:
                settle_buckets(ddp, order)
