"""The throughput curve as numbers, a table, a sentence and a file; measured in sweep.py."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accumplug.noise.scale import NoiseEstimate

__all__ = ["Curve", "CurveRow"]

SCHEMA = "accum-curve.v1"
SATURATED = 0.95
SCATTER = 0.1  # a share above 1, or one that falls with the batch, by more than this is noise


@dataclass(frozen=True)
class CurveRow:
    """One number of accumulation steps. Times are medians over the measured windows.

    Attributes:
        accum_steps: micro-batches per window on one rank.
        micro_batch: items in a micro-batch.
        effective_batch: items per update over all ranks.
        world_size: ranks.
        samples_per_sec: effective_batch / median_step_ms.
        median_step_ms: one whole update: its micro-batches, the reduction, the optimizer.
        forward_backward_ms: the part of it inside forward and backward passes.
        rest_ms: the other part: optimizer, zeroing, accounting.
        share_of_limit: time of as many forward and backward passes alone / time of the window.
            Alone means of the bare model, into a `.grad` that is there already; measured right
            after each window and compared with it, so that a machine that slows down slows both.
        limit_samples_per_sec: samples_per_sec / share_of_limit.
        updates: windows that were measured.
        sync_calls: gradient reductions per update, counted in a communication hook of DDP: with
            several ranks in the measured windows, in a single process in the first window,
            which runs in DDP for that.
        avg_loss: mean loss of these windows.
        peak_memory_mib: highest memory while the row ran.
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
    """What `sweep_effective_batches` measured.

    Attributes:
        rows: one for each number of accumulation steps.
        device: what it ran on, with the number of CPU threads.
        memory_is: what peak_memory_mib of a row is.
        noise: the gradient noise scale at the model's weights; None if not asked for.
    """

    rows: tuple[CurveRow, ...]
    device: str
    memory_is: str
    noise: NoiseEstimate | None = None

    @property
    def limit_samples_per_sec(self) -> float:
        """Items per second of forward and backward alone: the median of the rows' limits."""
        return statistics.median(row.limit_samples_per_sec for row in self.rows)

    @property
    def sentence(self) -> str:
        """What the curve means: where it saturates, what an update costs, which batch pays."""
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
            f"{where}. An update costs {_brief(cost)} ms beside its forward and backward passes, "
            f"as much as {_brief(cost / alone)} micro-batches of {first.micro_batch}."
        )
        if self.noise is not None:
            text += f" {self.noise.sentence((reached or last).effective_batch)}"
        return text

    def table(self) -> str:
        """Give the rows as text."""
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
        """Give the content of accum-curve.json."""
        noise = None if self.noise is None else asdict(self.noise)
        if noise is not None and not math.isfinite(noise["high"]):
            noise["high"] = None
        return {
            "schema": SCHEMA,
            "limit_samples_per_sec": self.limit_samples_per_sec,
            "sentence": self.sentence,
            "device": self.device,
            "memory_is": self.memory_is,
            "noise_scale": noise,
            "rows": [asdict(row) for row in self.rows],
        }

    def write(self, path: str | Path) -> Path:
        """Write accum-curve.json, making its directory."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        return path


def _brief(number: float) -> str:
    """Give two digits, or all before the point."""
    return f"{number:.2g}" if number < 10 else f"{number:,.0f}"
