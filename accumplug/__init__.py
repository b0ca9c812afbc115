"""Exact gradient accumulation for training loops that already exist.

    accum = Accumulator(steps=16, optimizer=optimizer, max_grad_norm=1.0)
    for x, y in accum.batches(loader):
        with accum(model):
            accum.backward(loss_fn(model(x), y))

The loop: `Accumulator` owns the window, the micro-batches of one update; `MicroBatch` is what its
block yields, `WindowResult` what a closed window tells (`accum.last`). `TornWindowError` and
`NonFiniteError` are raised where a window can't become an update. `Checkpointer` saves at any
micro-batch.

The proof: `equivalence_check` compares one large batch with its micro-batches on a model;
`train_one_optimizer_step` and `sync_counter` count reductions; `sweep_effective_batches`
measures the throughput.

The sizes: `plan` gives the steps; `NoiseScale` estimates how large a batch still pays, and
`NoiseSchedule` lets the steps follow it. `report` draws a run's log.

The command `accumplug` (or `python -m accumplug`) has plan, check, sweep, inspect and report.
"""

from accumplug._version import __version__ as __version__
from accumplug.accumulator import Accumulator as Accumulator
from accumplug.analysis.equivalence import equivalence_check as equivalence_check
from accumplug.analysis.plan import plan as plan
from accumplug.analysis.report import report as report
from accumplug.analysis.sweep import sweep_effective_batches as sweep_effective_batches
from accumplug.analysis.sync_counter import sync_counter as sync_counter
from accumplug.analysis.sync_counter import train_one_optimizer_step as train_one_optimizer_step
from accumplug.checkpoint.checkpointer import Checkpointer as Checkpointer
from accumplug.core.result import WindowResult as WindowResult
from accumplug.errors import NonFiniteError as NonFiniteError
from accumplug.errors import TornWindowError as TornWindowError
from accumplug.loop.micro_batch import MicroBatch as MicroBatch
from accumplug.noise.scale import NoiseScale as NoiseScale
from accumplug.noise.schedule import NoiseSchedule as NoiseSchedule

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
