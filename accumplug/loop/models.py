"""The models of an Accumulator: which have been seen, and what can't be made right with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from accumplug.core.gradients import GradientBuffer
from accumplug.core.host import Host
from accumplug.core.options import Options
from accumplug.inplace import InplaceGradients
from accumplug.loop import unsupported
from accumplug.parallel import fsdp
from accumplug.parallel.ddp import ddp_modules
from accumplug.parallel.group import DataParallelGroup


class Models:
    """Looks at each model once, before its first block."""

    def __init__(
        self,
        gradients: GradientBuffer,
        group: DataParallelGroup,
        options: Options,
        host: Host,
        inplace: bool,
        declared: Sequence[nn.Module] = (),
    ) -> None:
        self.inplace: InplaceGradients | None = None
        """What adds gradients in place, once there is a model."""
        self._gradients = gradients
        self._group = group
        self._options = options
        self._host = host
        self._wants_inplace = inplace
        self._declared = [weakref.ref(model) for model in declared]
        self._checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.on_admit: list[Callable[[nn.Module], None]] = []
        """Called with each model that is new, on all ranks that run a block of it."""

    def admit(self, models: Iterable[nn.Module]) -> None:
        """Add new ones among `models` to the sum, or raise ValueError."""
        for model in models:
            if isinstance(model, nn.Module) and self._gradients.has_model(model):
                continue
            unsupported.refuse_model(model, self._group)
            unsupported.warn_lonely_process()
            self._gradients.clear_new(model)
            self._gradients.add(model)
            for function in self.on_admit:
                function(model)
            if self._options.sync == "last":  # else each block begins as a window does
                self._gradients.resume(model)
            self._check_sharded(model)
            self.refresh_inplace()

    def refresh_inplace(self) -> None:
        """Rebuild in-place accumulation for the current parameters."""
        if self._wants_inplace:
            self.inplace = InplaceGradients(*self._gradients.models)

    def known(self) -> list[nn.Module]:
        """The models of the blocks so far; without any, those that the user or the host named."""
        if not self._gradients.models and self._group.size > 1:
            self.admit(self._named())
        return self._gradients.models

    def _named(self) -> list[nn.Module]:
        """The wrapped modules among those that the user or the host has named."""
        named = [m for r in self._declared if (m := r()) is not None] or self._host.models()
        return [model for model in named if ddp_modules(model) or fsdp.roots(model)]

    def declare(self, models: Iterable[nn.Module]) -> None:
        """Remember modules that blocks will run, for a rank that has run none yet."""
        self._declared += [weakref.ref(model) for model in models]

    def are_known(self) -> bool:
        """Whether this rank knows the modules that the blocks of other ranks reduce."""
        return bool(self._gradients.models or self._named())

    def check_windows(self) -> None:
        """Refuse models that a window of several micro-batches would make wrong."""
        unsupported.refuse_fused_backward(self._gradients.parameters)
        for model in self._gradients.models:
            if model not in self._checked:
                unsupported.refuse_static_graph(model)
                unsupported.warn_batchnorm(model)
                self._checked.add(model)

    def _check_sharded(self, model: nn.Module) -> None:
        """Refuse options that are wrong with a `fully_shard` model."""
        dtype = self._options.accumulate_dtype
        for root in fsdp.roots(model):
            if self._options.nonfinite == "skip_micro_batch":
                raise ValueError(
                    'nonfinite="skip_micro_batch" can\'t take a micro-batch back that fully_shard '
                    'has reduced; use "skip_window"'
                )
            if dtype is not None and not fsdp.adds_in(root, dtype):
                raise ValueError(
                    "accumulate_dtype under fully_shard is its own reduce_dtype; give fully_shard "
                    "mp_policy=MixedPrecisionPolicy(..., reduce_dtype=torch.float32)"
                )
