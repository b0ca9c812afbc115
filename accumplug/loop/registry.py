"""Several Accumulators in one process, as in a GAN: what belongs to whom."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import ClassVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from accumplug.core.gradients import GradientBuffer
from accumplug.core.options import Scaler
from accumplug.core.state import LoopState, OtherOwners


class Registry:
    """One entry in the registry of all live Accumulators.

    A class-wide weak set is the one piece of process-wide state: the loss of a generator must add
    nothing to the discriminator's window, and only the other Accumulator knows which parameters
    those are.
    """

    live: ClassVar[weakref.WeakSet[Registry]] = weakref.WeakSet()
    abandoned: ClassVar[list[RemovableHandle]] = []
    """Hooks whose owners are gone."""
    stepping: ClassVar[int] = 0
    """Accumulators that are stepping their optimizers now."""

    def __init__(self, state: LoopState, gradients: GradientBuffer, scaler: Scaler | None) -> None:
        self._state = state
        self._gradients = gradients
        self._scaler = scaler
        self._found = OtherOwners()
        Registry.live.add(self)

    @staticmethod
    def remove_with(owner: object, handle: RemovableHandle) -> None:
        """Remove a hook when `owner` is gone: not at once, as the garbage collector may run among
        the hooks of an optimizer that are being called, but when the next hook is registered."""
        while Registry.abandoned:
            Registry.abandoned.pop().remove()
        weakref.finalize(owner, Registry.abandoned.append, handle)

    @property
    def others(self) -> list[Registry]:
        """All other live Accumulators."""
        return [] if len(Registry.live) == 1 else [r for r in Registry.live if r is not self]

    def other_owners(self) -> OtherOwners:
        """What belongs to the other Accumulators and not to this one."""
        if self._found.changes != GradientBuffer.changes:
            self._found = self._find()
        return self._found

    def _find(self) -> OtherOwners:
        buffers = [other._gradients for other in self.others]
        own = {id(p) for p in self._gradients.parameters}
        mine = self._gradients.fsdp_roots(self._gradients.models)
        parameters = {id(p): p for b in buffers for p in b.parameters if id(p) not in own}
        ddps = {id(d): d for b in buffers for d in b.ddp_modules(b.models)}
        roots = {id(r): r for b in buffers for r in b.fsdp_roots(b.models) if r not in mine}
        return OtherOwners(
            GradientBuffer.changes,
            [weakref.ref(b) for b in buffers if not b.models],
            [weakref.ref(p) for p in parameters.values()],
            [weakref.ref(d) for d in ddps.values()],
            [weakref.ref(r) for r in roots.values()],
        )

    def shares_scaler(self) -> bool:
        """Whether another Accumulator may have updated the scaler while this window was open."""
        return self._scaler is not None and any(r._scaler is self._scaler for r in self.others)

    def others_in_pass(self) -> bool:
        """Whether another Accumulator goes through data now."""
        return any(other._state.data_pass is not None for other in self.others)

    def count_others(self) -> dict[int, int]:
        """Micro-batches that each other Accumulator has run, by id."""
        return {id(other): other._state.micro_batches for other in self.others}

    def ran_concurrently(self) -> bool:
        """Whether another Accumulator has run micro-batches in this pass."""
        data_pass = self._state.data_pass
        before = {} if data_pass is None else data_pass.others
        return any(count > before.get(other, 0) for other, count in self.count_others().items())

    def refuse_nested(self, models: tuple[nn.Module, ...]) -> None:
        """Raise RuntimeError inside of another Accumulator's block over one of `models`."""
        for other in self.others:
            if other._state.block is not None and (name := self._shared(other, models)):
                raise RuntimeError(
                    f"a block inside a block of another Accumulator over the same {name}: two "
                    f"windows can't share one gradient. Use one Accumulator for a model"
                )

    def explain_change(self) -> str:
        """Why the sum may have changed, if another Accumulator has a window over its models."""
        for other in self.others:
            is_open = other._state.window is not None
            if is_open and (name := self._shared(other, self._gradients.models)):
                return (
                    f" (another Accumulator has {other._state.pending} micro-batches pending in "
                    f"the same {name}: two windows can't share one gradient; use one Accumulator "
                    f"for a model)"
                )
        return ""

    def _shared(self, other: Registry, models: Iterable[nn.Module]) -> str:
        """The class of a module that `other` has too, or nothing."""
        found = [type(model).__name__ for model in models if other._gradients.has_model(model)]
        return found[0] if found else ""
