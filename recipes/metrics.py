"""What the training recipes write down: one JSON line per window."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TextIO

from torch.optim.lr_scheduler import LambdaLR

from accumplug import Accumulator

Line = dict[str, float | int | bool | None]
UNITS = {"loss_unit": "nats per character", "weight_unit": "characters"}  # for the report's axes


def describe(accum: Accumulator, scheduler: LambdaLR) -> Line:
    """The last closed window: `update` is the number of updates with it, `lr` the learning rate
    it was closed with; loss, weight (characters) and grad_norm are over all ranks,
    micro_batches and seconds of this rank. What is not finite becomes None."""
    updates = accum.updates - accum.last.stepped  # the scheduler has ticked since then
    line = {
        "update": accum.updates,
        **dataclasses.asdict(accum.last),
        "lr": scheduler.base_lrs[0] * scheduler.lr_lambdas[0](updates),
        "skipped": accum.skipped,
        "epoch": accum.epoch,
    }
    if accum.noise_scale is not None:  # None while it, or its upper end, can't be told
        now = accum.noise_scale.estimate
        line |= {"noise_scale": now.value, "noise_low": now.low, "noise_high": now.high}
    return {key: value if is_finite(value) else None for key, value in line.items()}


def place(accum: Accumulator) -> str:
    """Where a run is."""
    window = f" and {accum.pending} of {accum.steps} micro-batches" if accum.pending else ""
    return f"after {accum.updates} updates{window}"


def is_finite(value: float | None) -> bool:
    """Whether JSON has a number for `value`."""
    return value is not None and math.isfinite(value)


def open_log(path: Path, accum: Accumulator, scheduler: LambdaLR) -> TextIO:
    """Open a log that has a line for each window that `accum` has closed, and none behind them.

    A run that was killed may have logged windows that it is going to run again, and may have
    saved the last one just before its line was written."""
    log = open(path, "a+", encoding="ascii")  # noqa: SIM115
    log.seek(0)
    lines = [line for line in log.readlines()[: accum.windows] if line.endswith("\n")]
    log.truncate(sum(map(len, lines)))
    if len(lines) < accum.windows:
        append(log, describe(accum, scheduler))
    return log


def append(file: TextIO, line: Line) -> None:
    """Write `line` so that it is whole in the file even if the run is killed right after."""
    file.write(json.dumps({**line, **UNITS}) + "\n")
    file.flush()
