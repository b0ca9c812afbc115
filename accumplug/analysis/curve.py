"""The throughput curve that a sweep measured: numbers, a table, a sentence, a file, a picture."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accumplug.analysis.plotting import curve_figure, save
from accumplug.noise.scale import NoiseEstimate

__all__ = ["Curve", "CurveRow"]

SCHEMA = "accum-curve.v1"
SATURATED = 0.95
SCATTER = 0.1  # a share this far above 1, or that falls this far as the batch grows, is noise


@dataclass(frozen=True)
class CurveRow:
    """The measurement for one number of accumulation steps. Times are medians over windows.

    Attributes:
        accum_steps: micro-batches per window on one rank.
        micro_batch: items in a micro-batch.
        effective_batch: items per update over all ranks.
        world_size: ranks.
        samples_per_sec: effective_batch / median_step_ms.
        median_step_ms: time of one update: its micro-batches, the reduction, the optimizer step.
        forward_backward_ms: the part of it inside forward and backward passes.
        rest_ms: the remaining part: optimizer, zeroing, bookkeeping.
        share_of_limit: time of the same number of forward and backward passes alone / time of
            the window. "Alone" means the bare model, with gradients added to an existing `.grad`.
            It is measured right after each window, so that a slow machine slows both.
        limit_samples_per_sec: samples_per_sec / share_of_limit.
        updates: measured windows.
        sync_calls: gradient reductions per update, counted in a DDP communication hook. With
            several ranks they are counted in the measured windows; in a single process in the
            first window, which runs in DDP for this purpose.
        avg_loss: mean loss over the measured windows.
        peak_memory_mib: peak memory during the row.
    """

    accum_steps: int
    micro_batch: int
    effective_batch: int
    world_size: int
    samples_per_sec: float
    median_step_ms: float
    forward_backward_ms: float
    rest_ms: float
    limit_samples_per_sec: float
    share_of_limit: float
    updates: int
    sync_calls: float
    avg_loss: float
    peak_memory_mib: float


@dataclass(frozen=True)
class Curve:
    """The result of `sweep_effective_batches`.

    Attributes:
        rows: one row for each number of accumulation steps.
        device: the device, and on a CPU its number of threads.
        memory_is: the meaning of `peak_memory_mib`.
        noise: the gradient noise scale at the model's weights; None if it was not estimated.
    """

    rows: tuple[CurveRow, ...]
    device: str
    memory_is: str
    noise: NoiseEstimate | None = None

    @property
    def limit_samples_per_sec(self) -> float:
        """Items per second of forward and backward passes alone: the median over the rows."""
        return statistics.median(row.limit_samples_per_sec for row in self.rows)

    @property
    def sentence(self) -> str:
        """The meaning of the curve: where it saturates, and the cost of an update."""
        first, last = self.rows[0], self.rows[-1]
        reached = next((row for row in self.rows if row.share_of_limit >= SATURATED), None)
        shares = [row.share_of_limit for row in self.rows]
        falls = any(b < a - SCATTER for a, b in itertools.combinations(shares, 2))
        if falls or max(shares) > 1 + SCATTER:
            where = (
                "The times scatter too much to say where samples per second saturate: let the "
                "machine rest, or measure more micro-batches (--num-steps)"
            )
        elif reached is not None:
            where = (
                f"Samples per second reach {reached.share_of_limit:.0%} of the limit "
                f"({self.limit_samples_per_sec:,.0f} per second) at an effective batch of "
                f"{reached.effective_batch}; larger ones gain little"
            )
        else:
            where = (
                f"Samples per second still rise at an effective batch of {last.effective_batch}, "
                f"the largest here, with {last.share_of_limit:.0%} of the limit "
                f"({self.limit_samples_per_sec:,.0f} per second)"
            )
        alone = first.median_step_ms * first.share_of_limit / first.accum_steps
        cost = max(0.0, first.median_step_ms * (1 - first.share_of_limit))
        text = (
            f"{where}. An update costs {_brief(cost)} ms besides its forward and backward passes, "
            f"as much as {_brief(cost / alone)} micro-batches of {first.micro_batch}."
        )
        if self.noise is not None:
            text += f" {self.noise.sentence((reached or last).effective_batch)}"
        return text

    def table(self) -> str:
        """Format the rows as text."""
        head = (
            f"{'steps':>5} {'effective':>9} {'samples/s':>10} {'of limit':>8} {'update ms':>10} "
            f"{'fwd+bwd':>8} {'rest':>7} {'updates':>7} {'syncs/update':>12} {'loss':>8} {'MiB':>6}"
        )
        lines = [
            f"{r.accum_steps:>5} {r.effective_batch:>9} {r.samples_per_sec:>10,.0f} "
            f"{r.share_of_limit:>8.0%} {r.median_step_ms:>10.2f} {r.forward_backward_ms:>8.2f} "
            f"{r.rest_ms:>7.2f} {r.updates:>7} {r.sync_calls:>12g} {r.avg_loss:>8.4f} "
            f"{r.peak_memory_mib:>6.0f}"
            for r in self.rows
        ]
        return "\n".join([head, *lines])

    def as_json(self) -> dict[str, Any]:
        """Return the content of accum-curve.json; a number that is not finite becomes None."""
        return {
            "schema": SCHEMA,
            "limit_samples_per_sec": self.limit_samples_per_sec,
            "sentence": self.sentence,
            "device": self.device,
            "memory_is": self.memory_is,
            "noise_scale": None if self.noise is None else _finite(asdict(self.noise)),
            "rows": [_finite(asdict(row)) for row in self.rows],
        }

    def write(self, path: str | Path) -> Path:
        """Write accum-curve.json, and make its directory if there is none."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        return path

    def draw(self, png: str | Path) -> Path:
        """Draw samples per second and their limit against the effective batch, as a PNG file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return save(curve_figure(self.as_json()), Path(png))


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity."""
    bad = (name for name, v in fields.items() if isinstance(v, float) and not math.isfinite(v))
    return fields | dict.fromkeys(bad)


def _brief(number: float) -> str:
    """Format with two digits, or with all digits before the point."""
    return f"{number:.2g}" if number < 10 else f"{number:,.0f}"
