"""Pictures: the throughput curve of a sweep, and one page that shows how a run went.

matplotlib is an extra (`pip install "accumplug[recipes]"`) and is imported when a picture is
asked for. Everything is told apart by line style and marker, so grey print is enough.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_curve", "draw_run", "read_metrics", "report"]

_INK, _GREY = "#1f1f1f", "#8a8a8a"
Line = dict[str, Any]


def report(metrics: str | Path, png: str | Path | None = None) -> Path:
    """Draw the run logged in a metrics.jsonl and give the PNG's path.

    The PNG lies beside the log, as report.png, unless `png` says otherwise. Fields that a line
    lacks are left out, a torn last line (a run that was killed) is passed over.

    Raises:
        ValueError: no line of the file tells of an update.
        ImportError: matplotlib is not installed.
    """
    metrics = Path(metrics)
    lines = read_metrics(metrics)
    if not lines:
        raise ValueError(f"{metrics} holds no line with an update to draw")
    target = Path(png) if png is not None else metrics.with_name("report.png")
    return _save(draw_run(lines, title=str(metrics)), target)


def read_metrics(metrics: str | Path) -> list[Line]:
    """Read the lines that tell of a window, in order; what isn't JSON is passed over.

    Where a resumed run logged an update again, the later line is kept.
    """
    found: dict[tuple[int, bool, int], Line] = {}
    with open(metrics, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and _number(line.get("update")) is not None:
                stepped = bool(line.get("stepped", True))
                skipped = 0 if stepped else int(_number(line.get("skipped")) or 0)
                found[int(line["update"]), stepped, skipped] = line
    return sorted(found.values(), key=lambda line: float(line["update"]))


def _number(value: Any) -> float | None:
    """Give a finite number as a float, everything else as None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _series(lines: Sequence[Line], field: str) -> tuple[list[float], list[float]]:
    """Give the updates that have `field`, and its values."""
    pairs = [(float(line["update"]), _number(line.get(field))) for line in lines]
    kept = [(x, y) for x, y in pairs if y is not None]
    return [x for x, _ in kept], [y for _, y in kept]


def need_matplotlib() -> Any:
    """Import matplotlib's figure class, or raise an ImportError that says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'pictures need matplotlib, which is an extra: pip install "accumplug[recipes]"'
        ) from error
    return Figure


def _save(figure: Figure, target: Path) -> Path:
    """Write the PNG, making its directory."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120, format="png")
    return target


def _smooth(values: Sequence[float]) -> list[float]:
    """Give the mean around each value, over a twentieth of the run."""
    half = max(1, len(values) // 40)
    around = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(near) / len(near) for near in around]


def _loss(axes: Axes, lines: Sequence[Line]) -> None:
    updates, losses = _series(lines, "loss")
    axes.plot(updates, losses, color=_GREY, linewidth=0.8, label="each window")
    if len(losses) >= 40:
        axes.plot(updates, _smooth(losses), color=_INK, linewidth=1.8, label="running mean")
    axes.legend(loc="upper right", frameon=False)


def _plain(field: str) -> Callable[[Axes, Sequence[Line]], None]:
    def draw(axes: Axes, lines: Sequence[Line]) -> None:
        updates, values = _series(lines, field)
        axes.plot(updates, values, color=_INK, linewidth=1.0)
        if values and min(values) > 0 and max(values) > 30 * min(values) and field != "lr":
            axes.set_yscale("log")

    return draw


def _seconds(axes: Axes, lines: Sequence[Line]) -> None:
    updates, values = _series(lines, "seconds")
    axes.plot(updates, values, ".", markersize=3, color=_GREY, label="each window")
    middle = sorted(values)[len(values) // 2]
    axes.axhline(middle, color=_INK, linestyle="--", linewidth=1.2, label=f"median {middle:.3g} s")
    axes.set_ylim(0, min(max(values), 5 * middle) * 1.5 or 1)  # room for the legend
    axes.legend(loc="upper right", frameon=False)


_PANELS: tuple[tuple[str, str, Callable[[Axes, Sequence[Line]], None]], ...] = (
    ("loss", "loss (weighted mean\nof the window)", _loss),
    ("lr", "learning rate", _plain("lr")),
    ("grad_norm", "gradient norm\n(before clipping)", _plain("grad_norm")),
    ("noise_scale", "gradient noise scale\n(items, an estimate)", _plain("noise_scale")),
    ("seconds", "time per window\n(seconds)", _seconds),
)


def draw_run(lines: Sequence[Line], *, title: str) -> Figure:
    """Draw one panel for each thing that was logged, over the updates of the run."""
    panels = [panel for panel in _PANELS if _series(lines, panel[0])[0]]
    skipped = [float(line["update"]) for line in lines if line.get("stepped") is False]
    figure: Figure = need_matplotlib()(
        figsize=(8.3, 1.2 + 2.1 * max(1, len(panels))), layout="constrained"
    )
    updates = sum(line.get("stepped", True) is not False for line in lines)
    figure.suptitle(f"{title}\n{updates} updates, {len(skipped)} skipped windows", fontsize=10)
    rows = figure.subplots(max(1, len(panels)), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (_, label, draw) in zip(rows, panels, strict=False):
        draw(axes, lines)
        axes.set_ylabel(label, fontsize=9)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        for update in skipped:
            axes.axvline(update, color=_INK, linestyle=":", linewidth=0.9)
    if skipped:
        rows[0].plot([], [], color=_INK, linestyle=":", linewidth=0.9, label="skipped window")
        rows[0].legend(loc="upper right", frameon=False)
    rows[-1].set_xlabel("optimizer updates")
    return figure


def draw_curve(curve: Line, png: str | Path) -> Path:
    """Draw samples per second against the effective batch, with the limit, from a curve's JSON.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure: Figure = need_matplotlib()(figsize=(8.3, 5.4), layout="constrained")
    axes = figure.subplots()
    batches = [row["effective_batch"] for row in curve["rows"]]
    speeds = [row["samples_per_sec"] for row in curve["rows"]]
    limits = [row["limit_samples_per_sec"] for row in curve["rows"]]
    axes.plot(batches, speeds, color=_INK, marker="o", linewidth=1.6)
    axes.plot(batches, limits, color=_INK, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"limit: forward and backward alone, {curve['limit_samples_per_sec']:,.0f} samples/s",
        (batches[0], limits[0]),
        xytext=(0, 6),
        textcoords="offset points",
    )
    for row, x, y in zip(curve["rows"], batches, speeds, strict=True):
        text = f"{row['share_of_limit']:.0%}\n{row['accum_steps']} x {row['micro_batch']}"
        axes.annotate(
            text, (x, y), xytext=(0, -8), textcoords="offset points", va="top", fontsize=9
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.margins(x=0.08)
    axes.set_ylim(0, max([*limits, *speeds]) * 1.15)
    axes.set_xlabel("effective batch (samples per update, log scale)")
    axes.set_ylabel("throughput (samples per second)")
    axes.set_title("Samples per second against the effective batch", fontsize=11)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("labels: share of the limit; accumulation steps x micro-batch", fontsize=9)
    return _save(figure, Path(png))
