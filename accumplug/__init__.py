"""Exact gradient accumulation for training loops that already exist.

`Accumulator` owns the window; `Checkpointer` saves inside of one. `equivalence_check`,
`train_one_optimizer_step`, `sync_counter` and `sweep_effective_batches` are the proof;
`plan` and `NoiseScale` help to choose the sizes.
"""

from accumplug._version import __version__ as __version__
from accumplug.accumulator import Accumulator as Accumulator
from accumplug.checkpoint.checkpointer import Checkpointer as Checkpointer
from accumplug.close import NonFiniteError as NonFiniteError
from accumplug.counting import sync_counter as sync_counter
from accumplug.counting import train_one_optimizer_step as train_one_optimizer_step
from accumplug.micro import MicroBatch as MicroBatch
from accumplug.noise import NoiseScale as NoiseScale
from accumplug.plan import plan as plan
from accumplug.proof import equivalence_check as equivalence_check
from accumplug.report import report as report
from accumplug.result import WindowResult as WindowResult
from accumplug.schedule import NoiseSchedule as NoiseSchedule
from accumplug.sweep import sweep_effective_batches as sweep_effective_batches
from accumplug.window import TornWindowError as TornWindowError

__all__ = [
    "Accumulator",
    "Checkpointer",
    "MicroBatch",
    "NoiseScale",
    "NoiseSchedule",
    "NonFiniteError",
    "TornWindowError",
    "WindowResult",
    "equivalence_check",
    "plan",
    "report",
    "sweep_effective_batches",
    "sync_counter",
    "train_one_optimizer_step",
]
