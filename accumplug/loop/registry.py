"""Several Accumulators in one process, as in a GAN: what belongs to whom."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from accumplug.core.gradients import GradientBuffer, OtherOwners
from accumplug.parallel.ddp import find_ddp_modules

if TYPE_CHECKING:
    from accumplug.accumulator import Accumulator


def others(accum: Accumulator) -> list[Accumulator]:
    """All other Accumulators that are alive."""
    return [] if len(accum._live) == 1 else [a for a in accum._live if a is not accum]


def find_foreign(accum: Accumulator) -> OtherOwners:
    """What belongs to the other Accumulators and not to this one."""
    sums = [other._sum for other in others(accum)]
    own = {id(p) for p in accum._sum.parameters}
    mine = accum._sum.roots(accum._sum.models)
    parameters = [weakref.ref(p) for s in sums for p in s.parameters if id(p) not in own]
    found = [ddp for s in sums for ddp in s.ddp_modules(s.models)]
    if accum._ranks.size > 1:  # also those that their Accumulators have not seen yet
        found += find_ddp_modules([p for s in sums for p in s.stepped_parameters])
    ddps = [weakref.ref(ddp) for ddp in {id(ddp): ddp for ddp in found}.values()]
    roots = [weakref.ref(root) for s in sums for root in s.roots(s.models) if root not in mine]
    return OtherOwners(GradientBuffer.changes, parameters, ddps, roots)


def shares_scaler(accum: Accumulator) -> bool:
    """Whether another Accumulator may have updated the scaler while this window was open."""
    return accum._scaler is not None and any(a._scaler is accum._scaler for a in others(accum))


def count_micro_batches(accum: Accumulator) -> dict[int, int]:
    """How many each other Accumulator has run, by id."""
    return {id(other): other.micro_batches for other in others(accum)}


def ran_beside(accum: Accumulator) -> bool:
    """Whether another Accumulator has run micro-batches in this pass."""
    before = {} if accum._feed is None else accum._feed.others
    return any(count > before.get(a, 0) for a, count in count_micro_batches(accum).items())
