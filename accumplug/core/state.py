"""What an Accumulator knows at any moment: window, block, pass and counters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from accumplug.core.gradients import GradientBuffer
from accumplug.core.normalization import WindowPlan
from accumplug.core.result import ClosedWindow, LossSum, WindowResult
from accumplug.core.window import Weight, Window, check_steps

T = TypeVar("T")
COUNTERS = ("windows", "updates", "skipped", "micro_batches", "epoch", "position", "syncs")


class BlockKind(Enum):
    """Why a block runs."""

    REAL = auto()
    """The loop has opened it: a micro-batch."""
    FLUSH = auto()
    """It closes a started window and adds nothing to it."""
    JOIN = auto()
    """This rank has no data for a window of the other ranks, and takes part in its close."""
    PADDING = auto()
    """This rank has no data for one micro-batch of the other ranks, which all reduce it."""


REAL = BlockKind.REAL
COUNTED = (BlockKind.REAL, BlockKind.PADDING)
"""Blocks that take a place in the window."""


class Phase(IntEnum):
    """How far a block has come."""

    NEW = auto()
    OPEN = auto()
    AGREED = auto()
    """The total weight of the window is known, and the running sum is rescaled to it."""
    REDUCED = auto()
    """The running sum is what it has to be when the block ends."""


NEW, OPEN, AGREED, REDUCED = Phase  # up to Python 3.11, `Phase.NEW` takes 50 ns


@dataclass(slots=True, eq=False)
class OtherOwners:
    """What other Accumulators own, which a backward must neither add to nor reduce."""

    changes: int = -1
    unseen: list[weakref.ref[GradientBuffer]] = field(default_factory=list)
    """Sums of Accumulators that have run no block yet, so that their modules are not known."""
    parameters: list[weakref.ref[nn.Parameter]] = field(default_factory=list)
    ddp_modules: list[weakref.ref[DistributedDataParallel]] = field(default_factory=list)
    fsdp_roots: list[weakref.ref[FSDPModule]] = field(default_factory=list)


NOBODY = OtherOwners()


class BlockState:
    """One block, from enter to leave. Nothing of it survives in the Accumulator.

    No dataclass: there is one for each micro-batch, and most of these keep their defaults.
    """

    phase: Phase = NEW
    closes_early: bool = False
    """The loop has said that the window ends here."""
    index: int = 0
    """Its place in the window, from 0."""
    ends: bool = False
    """The window ends with this block."""
    empty: bool = False
    """All weights of the window turned out to be 0: no update."""
    ends_pass: bool = False
    """The loader of an Accelerate loop that runs without `batches` ends with this block."""
    by_hand: bool = False
    """DDP's own reducers can't be used: a rank does not know its DDP modules."""
    overlaps: bool = False
    """The reduction over the ranks runs inside of the backward."""
    closers: int = 0
    """Ranks whose own micro-batch closes the window."""
    all_own: bool = False
    """All ranks close it in a block of their loop that they have not skipped."""
    sums: Sequence[Weight] = ()
    """Of the losses, and of what the noise scale asks: on this rank, on all once they agree."""
    overflows: float = 0.0
    """Likewise: micro-batches that were left out although their loss was finite."""
    skipped: bool = False
    began: bool = False
    """Something may have been added to the running sum."""
    backwards: int = 0
    reduced: bool = False
    """The last backward has reduced the gradient over the ranks."""
    ddp_modules: Sequence[DistributedDataParallel] = ()
    fsdp_roots: Sequence[FSDPModule] = ()
    """Every rank runs a forward and a backward of them."""
    outputs: Sequence[Tensor] = ()
    """Of the fully_shard modules: where a backward that adds nothing begins."""
    others: OtherOwners = NOBODY
    deferred: ExitStack | None = None
    """Ends what keeps wrappers from reducing in this block."""

    def __init__(
        self, models: tuple[nn.Module, ...], weight: Weight, kind: BlockKind = REAL
    ) -> None:
        self.models = models
        self.weight = weight
        self.kind = kind

    @property
    def adds_nothing(self) -> bool:
        """Whether the host knows that its weight is 0."""
        return isinstance(self.weight, float) and self.weight == 0


class SyncPoint(Enum):
    """Whether the ranks agree on something right after a pause, and what one may have missed."""

    NONE = auto()
    """They don't."""
    FULL = auto()
    """This rank has run as many micro-batches since the last sync point as any other."""
    SHORT = auto()
    """It may have run fewer than others, as its data end (or did, in the same window)."""
    PASS = auto()
    """A pass begins, perhaps inside of a window (tail="carry")."""
    STEP = auto()
    """They agree before each micro-batch (sync="every")."""


@dataclass
class ItemCount:
    """Items that a loader has handed out, against the blocks that were run on them.

    A block is the last one of a pass if it leaves no item without a block, and never because the
    loader is exhausted: a loop may read ahead, by `islice`, by a prefetcher, by `next` in a block.
    """

    handed_out: int = 0
    done: int = 0
    """Items that were trained on, or left out by the loop."""
    exhausted: bool = False
    """The item that was handed out last is the last one."""
    reads_ahead: bool | None = None
    """The loop had more than one item before its first block; None before that block."""
    cut: bool = False
    """An item has had several blocks, so no block is known to be the last one of its item."""

    @property
    def outstanding(self) -> int:
        """Items that are waiting for a block."""
        return self.handed_out - self.done

    def open_block(self) -> bool:
        """A block begins; return whether it is the last one of the pass."""
        if self.reads_ahead is None:
            self.reads_ahead = self.outstanding > 1
        return self.exhausted and not self.cut and self.outstanding == 1

    def end_block(self) -> None:
        """A block of the loop has ended well."""
        if self.outstanding:
            self.done += 1
        else:
            self.cut = True

    def came_back(self) -> None:
        """The loop, in no block, asks for another item: unless it reads ahead, it has finished
        the earlier ones, and an item without a block was left out."""
        if self.reads_ahead is False:
            self.done = self.handed_out


@dataclass
class Parts:
    """An item that is being cut into several blocks (`Accumulator.split`)."""

    size: int
    """Rows of a part."""
    count: int
    index: int = 0
    """The part that the loop has."""
    done: int = 0
    """Parts that have had their block."""
    weights: list[Weight] | None = None
    """Of each part, under `weigh=`."""

    @property
    def is_last(self) -> bool:
        """Whether the loop has the last part."""
        return self.index == self.count - 1


@dataclass
class DataPassState:
    """The state of the current pass through the data."""

    items: ItemCount = field(default_factory=ItemCount)
    last: bool = False
    """No block of this rank (under sync="every": of any rank) follows the one that runs."""
    alive: float = 1.0
    """Ranks that had data left when they last told each other."""
    by_hand: bool = False
    """A rank has no data and has never run a block: the others can't reduce through DDP."""
    begins: bool = False
    """The pass begins, and the ranks have not told each other yet."""
    in_step: bool = False
    """All ranks go from micro-batch to micro-batch together (sync="every")."""
    plans: list[WindowPlan] = field(default_factory=list)
    """Of the windows that `weigh=` has looked ahead to, the open one first."""
    weigh: Callable[[Any], Weight] | None = None  # of whatever the loader's items are
    resumed: bool = False
    """Another process began this pass; what the ranks told each other then is known."""
    ended: bool = False
    """The loop has asked for an item after the last one, with blocks still to run."""
    others: dict[int, int] = field(default_factory=dict)
    """Micro-batches that each other Accumulator had run when the pass began."""
    resumed_parts: Parts | None = None
    """Another process has run a part of the first item."""
    met: int = -1
    """The window before whose last block the ranks have met last."""

    @property
    def plan(self) -> WindowPlan | None:
        """Of the open window."""
        return self.plans[0] if self.plans else None

    @property
    def planned_updates(self) -> int:
        """Updates that will have been made when the windows of `plans` are closed."""
        return sum(not isinstance(plan.total, float) or plan.total > 0 for plan in self.plans)


class PassObserver(Protocol):
    """What a `Checkpointer` does in a pass."""

    def open_pass(self, state: DataPassState, loader: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """The items of a pass, each with whether it is the last; from where another process was
        in it, if `state.resumed` says so then."""

    def must_stop(self, sync_point: SyncPoint) -> bool:
        """Whether the pass is to end here, between two blocks."""

    def after_body(self) -> bool:
        """The loop has come back for another item; whether the pass is to end."""


@dataclass
class LoopState:
    """The state of one Accumulator that changes from block to block, except the gradients."""

    steps: int | Callable[[int], int] | None = 1
    window: Window | None = None
    block: BlockState | None = None
    data_pass: DataPassState | None = None
    parts: Parts | None = None
    observer: PassObserver | None = None
    losses: LossSum = field(default_factory=LossSum)
    opened: float = 0.0
    """When the window was opened (`time.perf_counter`)."""
    closed: ClosedWindow | None = None
    result: WindowResult | None = None
    """`closed`, once it was read."""
    windows: int = 0
    updates: int = 0
    skipped: int = 0
    micro_batches: int = 0
    epoch: int = 0
    position: int = 0
    syncs: int = 0

    def next_steps(self, planned: int = 0) -> int:
        """Micro-batches in the window after `planned` more updates; 1 if their number is open."""
        if self.steps is None:
            return 1
        steps = self.steps(self.updates + planned) if callable(self.steps) else self.steps
        return check_steps(steps)

    @property
    def plan(self) -> WindowPlan | None:
        """The look-ahead of the open window, under `weigh=`."""
        return self.data_pass.plan if self.data_pass is not None else None

    @property
    def pending(self) -> int:
        """Micro-batches in the open window."""
        return self.window.index if self.window is not None else 0

    @property
    def last(self) -> WindowResult | None:
        """The last closed window. Reading it may wait for the device."""
        if self.result is None and self.closed is not None:
            self.result = self.closed.read()
        return self.result

    @property
    def is_between_passes(self) -> bool:
        """Whether the data of a pass have ended, and no block has been run on any of them."""
        return self.data_pass is not None and (
            self.data_pass.ended and self.data_pass.items.reads_ahead is None
        )

    def counters(self) -> dict[str, int]:
        """The public counters, by name."""
        return {name: getattr(self, name) for name in COUNTERS}
