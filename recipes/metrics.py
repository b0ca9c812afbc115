"""What the training recipes write down: one JSON line per window."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TextIO

from accumplug import Accumulator

Line = dict[str, float | int | bool | None]


def describe(accum: Accumulator, lr: float) -> Line:
    """The last closed window: `update` is the number of updates with it, `lr` the learning rate
    it was closed with; loss, weight (characters) and grad_norm are over all ranks,
    micro_batches and seconds of this rank. What is not finite becomes None."""
    line = {
        "update": accum.updates,
        **dataclasses.asdict(accum.last),
        "lr": lr,
        "skipped": accum.skipped,
        "epoch": accum.epoch,
    }
    if accum.noise_scale is not None:
        line["noise_scale"] = accum.noise_scale.estimate.value  # None while it can't be told
    return {key: value if is_finite(value) else None for key, value in line.items()}


def is_finite(value: float | None) -> bool:
    """Whether JSON has a number for `value`."""
    return value is not None and math.isfinite(value)


def append(file: TextIO, line: Line) -> None:
    """Write `line` so that it is whole in the file even if the run is killed right after."""
    file.write(json.dumps(line) + "\n")
    file.flush()
