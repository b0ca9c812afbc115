"""The models of an Accumulator: which have been seen, and what can't be made right with them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from accumplug.core.gradients import GradientBuffer
from accumplug.core.options import Options
from accumplug.inplace import InplaceGradients
from accumplug.loop import unsupported
from accumplug.parallel import fsdp
from accumplug.parallel.ddp import find_ddp_modules
from accumplug.parallel.group import DataParallelGroup


class Models:
    """Looks at each model once, before its first block."""

    def __init__(
        self,
        running: GradientBuffer,
        ranks: DataParallelGroup,
        options: Options,
        loop: Any,
        inplace: bool,
    ) -> None:
        self.server: InplaceGradients | None = None
        """What adds gradients in place, once there is a model."""
        self._sum = running
        self._ranks = ranks
        self._options = options
        self._loop = loop
        self._inplace = inplace
        self._checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._warned = False

    def see(self, models: Iterable[nn.Module]) -> None:
        """Let new ones among `models` belong to the sum, or raise ValueError."""
        for model in models:
            if isinstance(model, nn.Module) and model in self._sum:
                continue
            unsupported.refuse_model(model, self._ranks)
            unsupported.warn_lonely_process()
            self._sum.clear_new(model)
            self._sum.add(model)
            self._check_sharded(model)
            self.serve()

    def serve(self) -> None:
        """Let what adds gradients in place know the parameters as they are now."""
        if self._inplace:
            self.server = InplaceGradients(*self._sum.models)

    def known(self) -> list[nn.Module]:
        """The models of the blocks so far; a rank that never had one has to find them."""
        if not self._sum.models and self._ranks.size > 1:
            prepared = self._loop.models() if self._loop is not None else []
            owned = [p for model in prepared for p in model.parameters()]
            self.see(find_ddp_modules(owned or self._sum.parameters) or prepared)
        return self._sum.models

    def check_windows(self) -> None:
        """Before a window of several micro-batches: what that would make wrong."""
        unsupported.refuse_fused_backward(self._sum.parameters)
        for model in self._sum.models:
            if model not in self._checked:
                unsupported.refuse_static_graph(model)
                unsupported.warn_batchnorm(model)
                self._checked.add(model)

    def warn_deferral(self, root: Any) -> None:
        """Say once what it costs to leave `root`, a fully_shard module, unreduced."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"deferring the reduction keeps the gradients of the whole model on each rank, "
                f'{fsdp.deferred_bytes(root) / 2**20:,.1f} MiB beside the shards; sync="every" '
                f"keeps shards only and reduces in each micro-batch",
                stacklevel=4,
            )

    def _check_sharded(self, model: nn.Module) -> None:
        """Options that a `fully_shard` model can't be made right with."""
        wide = self._options.accumulate_dtype
        for root in fsdp.roots(model):
            if self._options.nonfinite == "skip_micro_batch":
                raise ValueError(
                    'nonfinite="skip_micro_batch" can\'t take a micro-batch back that fully_shard '
                    'has reduced; use "skip_window"'
                )
            if wide is not None and not fsdp.adds_in(root, wide):
                raise ValueError(
                    "accumulate_dtype under fully_shard is its own reduce_dtype; give fully_shard "
                    "mp_policy=MixedPrecisionPolicy(..., reduce_dtype=torch.float32)"
                )
