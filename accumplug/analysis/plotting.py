"""Pictures with matplotlib: what they have in common, and the picture of a throughput curve.

Line style, marker and hatching tell everything apart, so grey print is enough. matplotlib is an
extra (`pip install "accumplug[plots]"`) and is imported when a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["GREY", "INK", "PALE", "curve_figure", "finish", "need_matplotlib", "save"]

INK, GREY, PALE = "#1f1f1f", "#8a8a8a", "#d9d9d9"
Row = dict[str, Any]  # a JSON object


def need_matplotlib() -> type[Figure]:
    """Import matplotlib's figure class, or raise an ImportError that says how to install it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'pictures need matplotlib, which is an extra: pip install "accumplug[plots]"'
        ) from error
    return Figure


def save(figure: Figure, path: Path) -> Path:
    """Write the picture as a PNG file, and make its directory if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    return path


def finish(axes: Axes) -> None:
    """Add the grid, and the legend above the axes, where it hides nothing."""
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.0,
            ncols=3,
            frameon=False,
            fontsize=8,
        )


def curve_figure(curve: Row) -> Figure:
    """Draw the content of accum-curve.json: throughput and its limit over the effective batch.

    The lower panel shows the time of an update per micro-batch, in two parts: forward and
    backward passes, and the rest.
    """
    figure = need_matplotlib()(figsize=(8.3, 7.2), layout="constrained")
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
    labelled = _spaced(rows)
    for row in labelled:
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
    _time_bars(below, labelled)
    ticks = [row["effective_batch"] for row in labelled]
    below.set_xscale("log", base=2)
    below.set_xticks(ticks, ticks)
    below.minorticks_off()
    below.set_xlabel(
        "effective batch (samples per update, log scale)\n"
        "labels: share of the limit; accumulation steps x micro-batch"
    )
    for axes in (above, below):
        finish(axes)
    return figure


def _time_bars(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a bar per row: the time of an update divided by its micro-batches."""
    batches = [row["effective_batch"] for row in rows]
    inside, rest = (
        [row[part] / row["accum_steps"] for row in rows]
        for part in ("forward_backward_ms", "rest_ms")
    )
    width = [batch / 6 for batch in batches]
    axes.bar(batches, inside, width, color=GREY, label="forward and backward")
    style: dict[str, Any] = {"edgecolor": INK, "hatch": "///", "linewidth": 0.6}
    axes.bar(batches, rest, width, inside, color="white", label="rest of the update", **style)
    axes.set_ylabel("time of an update\n(ms per micro-batch)")


def _spaced(rows: Sequence[Row]) -> list[Row]:
    """Leave out rows whose labels or bars would touch those before; keep the last row."""
    logs = [math.log2(row["effective_batch"]) for row in rows]
    gap = 0.08 * (logs[-1] - logs[0])
    kept: list[int] = []
    for i, log in enumerate(logs):
        if not kept or (log - logs[kept[-1]] >= gap and (logs[-1] - log >= gap or log == logs[-1])):
            kept.append(i)
    return [rows[i] for i in kept]
