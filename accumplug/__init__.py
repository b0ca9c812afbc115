"""Exact gradient accumulation for training loops that already exist.

>>> accum = Accumulator(steps=16, optimizer=optimizer, max_grad_norm=1.0)
>>> for x, y in accum.batches(loader):
...     with accum(model):
...         accum.backward(loss_fn(model(x), y))

Training: an `Accumulator` owns the window, the micro-batches of one update. Its blocks yield a
`MicroBatch`, `accum.batches` returns `Batches`, and callbacks are registered by a `Handle`;
`accum.last` is the `WindowResult` of the last closed window, and `accum.inplace_report()` an
`InplaceReport`. A `Checkpointer` saves at any micro-batch and resumes
at a `Position`; `save(wait=False)` returns a `SaveHandle`. The errors are `TornWindowError`,
`NonFiniteError`, `CheckpointError` with `DamagedCheckpointError`, `LeaseHeldError`,
`OverwrittenError`, `OptionTypeError`, and `MovedError` where a version of torch is unknown.

Proof: `equivalence_check` compares one large batch with its micro-batches on any model and
returns an `EquivalenceResult` of `Difference` values. `train_one_optimizer_step` returns a
`StepResult`, and `sync_counter` yields a `SyncCounter` of gradient reductions.

Sizes: `plan` computes the steps. `sweep_effective_batches` measures the throughput as a `Curve`
of `CurveRow` values. `NoiseScale` makes a `NoiseEstimate` of the batch above which more items gain
little, and a `NoiseSchedule` lets the steps follow it. `report` draws the log of a run.

The command `accumplug` (or `python -m accumplug`) has plan, check, sweep, inspect and report.
"""

from accumplug._version import __version__ as __version__
from accumplug.accumulator import Accumulator as Accumulator
from accumplug.accumulator import Handle as Handle
from accumplug.analysis.comparison import Difference as Difference
from accumplug.analysis.curve import Curve as Curve
from accumplug.analysis.curve import CurveRow as CurveRow
from accumplug.analysis.equivalence import EquivalenceResult as EquivalenceResult
from accumplug.analysis.equivalence import equivalence_check as equivalence_check
from accumplug.analysis.plan import plan as plan
from accumplug.analysis.report import report as report
from accumplug.analysis.sweep import sweep_effective_batches as sweep_effective_batches
from accumplug.analysis.sync_counter import StepResult as StepResult
from accumplug.analysis.sync_counter import SyncCounter as SyncCounter
from accumplug.analysis.sync_counter import sync_counter as sync_counter
from accumplug.analysis.sync_counter import train_one_optimizer_step as train_one_optimizer_step
from accumplug.checkpoint.checkpointer import Checkpointer as Checkpointer
from accumplug.checkpoint.load import Position as Position
from accumplug.checkpoint.save_handle import SaveHandle as SaveHandle
from accumplug.core.result import WindowResult as WindowResult
from accumplug.dataloading.batches import Batches as Batches
from accumplug.errors import CheckpointError as CheckpointError
from accumplug.errors import DamagedCheckpointError as DamagedCheckpointError
from accumplug.errors import LeaseHeldError as LeaseHeldError
from accumplug.errors import MovedError as MovedError
from accumplug.errors import NonFiniteError as NonFiniteError
from accumplug.errors import OptionTypeError as OptionTypeError
from accumplug.errors import OverwrittenError as OverwrittenError
from accumplug.errors import TornWindowError as TornWindowError
from accumplug.inplace import InplaceReport as InplaceReport
from accumplug.loop.micro_batch import MicroBatch as MicroBatch
from accumplug.noise.scale import NoiseEstimate as NoiseEstimate
from accumplug.noise.scale import NoiseScale as NoiseScale
from accumplug.noise.schedule import NoiseSchedule as NoiseSchedule

__all__ = [
    "Accumulator",
    "Batches",
    "CheckpointError",
    "Checkpointer",
    "Curve",
    "CurveRow",
    "DamagedCheckpointError",
    "Difference",
    "EquivalenceResult",
    "Handle",
    "InplaceReport",
    "LeaseHeldError",
    "MicroBatch",
    "MovedError",
    "NoiseEstimate",
    "NoiseScale",
    "NoiseSchedule",
    "NonFiniteError",
    "OptionTypeError",
    "OverwrittenError",
    "Position",
    "SaveHandle",
    "StepResult",
    "SyncCounter",
    "TornWindowError",
    "WindowResult",
    "equivalence_check",
    "plan",
    "report",
    "sweep_effective_batches",
    "sync_counter",
    "train_one_optimizer_step",
]
