"""The picture of a throughput curve: samples per second, the limit, and the parts of the time.

Everything is told apart by line style, marker and hatching, so grey print is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accumplug.analysis.plotting import GREY, INK, finish, need_matplotlib, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["curve_figure", "draw_curve"]

Row = dict[str, Any]


def draw_curve(curve: Row, png: str | Path) -> Path:
    """Draw samples per second against the effective batch, with the limit, from a curve's JSON.

    Below, what an update takes for each of its micro-batches: forward and backward, and the rest.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return save(curve_figure(curve), Path(png))


def curve_figure(curve: Row) -> Figure:
    """Give the picture of `draw_curve`."""
    figure: Figure = need_matplotlib()(figsize=(8.3, 7.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    rows = curve["rows"]
    batches = [row["effective_batch"] for row in rows]
    limit = f"limit: forward and backward alone, {curve['limit_samples_per_sec']:,.0f} samples/s"
    speeds = [row["samples_per_sec"] for row in rows]
    limits = [row["limit_samples_per_sec"] for row in rows]
    above.plot(batches, speeds, color=INK, marker="o", linewidth=1.6, label="measured")
    above.plot(batches, limits, color=INK, linestyle="--", linewidth=1.2, label=limit)
    above.set_ylim(0, max([*limits, *speeds]) * 1.1)
    above.set_ylabel("throughput (samples per second)")
    told = _far_apart(rows)
    for row in told:
        above.annotate(
            f"{row['share_of_limit']:.0%}\n{row['accum_steps']} x {row['micro_batch']}",
            (row["effective_batch"], row["samples_per_sec"]),
            xytext=(0, -8),
            textcoords="offset points",
            va="top",
            ha="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
        )
    _parts(below, told)
    below.set_xscale("log", base=2)
    below.set_xticks([r["effective_batch"] for r in told], [r["effective_batch"] for r in told])
    below.minorticks_off()
    below.set_xlabel(
        "effective batch (samples per update, log scale)\n"
        "labels: share of the limit; accumulation steps x micro-batch"
    )
    for axes in (above, below):
        finish(axes)
    return figure


def _parts(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw bars of the time of an update divided by its steps."""
    batches = [row["effective_batch"] for row in rows]
    inside, rest = (
        [row[part] / row["accum_steps"] for row in rows]
        for part in ("forward_backward_ms", "rest_ms")
    )
    width = [batch / 6 for batch in batches]
    axes.bar(batches, inside, width, color=GREY, label="forward and backward")
    axes.bar(
        batches,
        rest,
        width,
        inside,
        color="white",
        edgecolor=INK,
        hatch="///",
        linewidth=0.6,
        label="rest of the update",
    )
    axes.set_ylabel("time of an update\n(ms per micro-batch)")


def _far_apart(rows: Sequence[Row]) -> list[Row]:
    """Leave out rows whose labels or bars would touch the row before; the last one stays."""
    logs = [math.log2(row["effective_batch"]) for row in rows]
    gap = 0.08 * (logs[-1] - logs[0])
    kept: list[int] = []
    for i, log in enumerate(logs):
        if not kept or (log - logs[kept[-1]] >= gap and (logs[-1] - log >= gap or log == logs[-1])):
            kept.append(i)
    return [rows[i] for i in kept]
