"""Pictures: the throughput curve of a sweep, and one page that shows how a run went.

Everything is told apart by line style, marker and hatching, so grey print is enough.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accumplug.picture import GREY, INK, finish, need_matplotlib, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["curve_figure", "draw_curve", "draw_run", "read_metrics", "report"]

Line = dict[str, Any]


def report(metrics: str | Path, png: str | Path | None = None) -> Path:
    """Draw the run logged in a metrics.jsonl and give the PNG's path.

    A panel each for loss, learning rate, gradient norm, noise scale and time per window, over the
    updates; skipped windows are marked. A panel without a number is left out, and so is what is
    no JSON, like the last line of a run that was killed.

    ```python
    with open("metrics.jsonl", "a") as log:  # when a window has closed
        line = {"update": accum.updates, **dataclasses.asdict(accum.last), "skipped": accum.skipped}
        log.write(json.dumps({**line, "lr": scheduler.get_last_lr()[0]}) + "\\n")
    ```

    Args:
        metrics: a JSON object a line, with `update` (updates so far) and any of `loss`, `lr`,
            `grad_norm`, `noise_scale`, `seconds`, `stepped` and `skipped` (windows so far, which
            tells skipped windows of one update apart). `loss_unit` and `weight_unit` (of the noise
            scale), two texts, go on the axes.
        png: where the picture goes; by default report.png beside the log.

    Raises:
        ValueError: no line of the file tells of an update.
        OSError: the log can't be read, or the picture not be written.
        ImportError: matplotlib is not installed.
    """
    metrics = Path(metrics)
    lines = read_metrics(metrics)
    if not lines:
        raise ValueError(f"{metrics} holds no line with an update to draw")
    target = Path(png) if png is not None else metrics.with_name("report.png")
    return save(draw_run(lines, title=str(metrics)), target)


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
    return float(value) if abs(value) < 1e300 else None


def _placed(lines: Sequence[Line]) -> list[Line]:
    """Give each window its place `at` on the axis: its update; skipped ones lie between those."""
    skips = Counter(float(line["update"]) for line in lines if line.get("stepped") is False)
    seen: Counter[float] = Counter()
    placed = []
    for line in lines:
        at = float(line["update"])
        if line.get("stepped") is False:
            seen[at] += 1
            at += seen[at] / (skips[at] + 1)
        placed.append({**line, "at": at})
    return sorted(placed, key=lambda line: float(line["at"]))


def _series(lines: Sequence[Line], field: str) -> tuple[list[float], list[float]]:
    """Give the places of the windows that have `field`, and its values."""
    pairs = [(float(line["at"]), _number(line.get(field))) for line in lines]
    kept = [(x, y) for x, y in pairs if y is not None]
    return [x for x, _ in kept], [y for _, y in kept]


def _smooth(values: Sequence[float]) -> list[float]:
    """Give the mean around each value, over a twentieth of the run."""
    half = max(1, len(values) // 40)
    around = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(near) / len(near) for near in around]


def _loss(axes: Axes, lines: Sequence[Line]) -> None:
    updates, losses = _series(lines, "loss")
    axes.plot(updates, losses, _dots(losses), color=GREY, linewidth=0.8, label="each window")
    if len(losses) >= 40:
        axes.plot(updates, _smooth(losses), color=INK, linewidth=1.8, label="running mean")


def _dots(values: Sequence[float]) -> str:
    """Give the style of a line, with dots if it is too short to be seen."""
    return "-" if len(values) > 2 else ".-"


def _plain(field: str) -> Callable[[Axes, Sequence[Line]], None]:
    def draw(axes: Axes, lines: Sequence[Line]) -> None:
        updates, values = _series(lines, field)
        axes.plot(updates, values, _dots(values), color=INK, linewidth=1.0)
        if values and min(values) > 0 and max(values) > 30 * min(values) and field != "lr":
            axes.set_yscale("log")

    return draw


def _seconds(axes: Axes, lines: Sequence[Line]) -> None:
    updates, values = _series(lines, "seconds")
    middle = sorted(values)[len(values) // 2]
    top = min(max(values), 5 * middle) * 1.1 or 1
    higher = sum(value > top for value in values)
    label = f"each window ({higher} higher than this)" if higher else "each window"
    axes.plot(updates, values, ".", markersize=3, color=GREY, label=label)
    axes.axhline(middle, color=INK, linestyle="--", linewidth=1.2, label=f"median {middle:.3g} s")
    axes.set_ylim(0, top)


_PANELS: tuple[tuple[str, str, Callable[[Axes, Sequence[Line]], None]], ...] = (
    ("loss", "loss\n({loss_unit})", _loss),
    ("lr", "learning rate", _plain("lr")),
    ("grad_norm", "gradient norm\n(before clipping)", _plain("grad_norm")),
    ("noise_scale", "gradient noise scale\n({weight_unit}, an estimate)", _plain("noise_scale")),
    ("seconds", "time per window\n(seconds)", _seconds),
)
_UNITS = {"loss_unit": "mean over the window", "weight_unit": "items"}


def draw_run(lines: Sequence[Line], *, title: str) -> Figure:
    """Draw one panel for each thing that was logged, over the updates of the run.

    A log may say what its loss and its weights are counted in: `loss_unit`, `weight_unit`.
    """
    lines = _placed(lines)
    units = {n: str(next((li[n] for li in lines if li.get(n)), u)) for n, u in _UNITS.items()}
    panels = [panel for panel in _PANELS if _series(lines, panel[0])[0]]
    skipped = [float(line["at"]) for line in lines if line.get("stepped") is False]
    figure: Figure = need_matplotlib()(
        figsize=(8.3, 1.2 + 2.1 * max(1, len(panels))), layout="constrained"
    )
    said = f"{_many(len(lines) - len(skipped), 'update')}, {_many(len(skipped), 'skipped window')}"
    title = title if len(title) <= 80 else f"...{title[-77:]}"
    figure.suptitle(f"{title}\n{said}", fontsize=10)
    rows = figure.subplots(max(1, len(panels)), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (_, label, draw) in zip(rows, panels, strict=False):
        draw(axes, lines)
        axes.set_ylabel(label.format(**units), fontsize=9)
        across = axes.get_xaxis_transform()
        if skipped:
            axes.vlines(
                skipped, 0, 1, INK, ":", label="skipped window", linewidth=0.9, transform=across
            )
        finish(axes)
    rows[-1].set_xlabel("optimizer updates")
    rows[-1].xaxis.get_major_locator().set_params(integer=True)
    return figure


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def draw_curve(curve: Line, png: str | Path) -> Path:
    """Draw samples per second against the effective batch, with the limit, from a curve's JSON.

    Below, what an update takes for each of its micro-batches: forward and backward, and the rest.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return save(curve_figure(curve), Path(png))


def curve_figure(curve: Line) -> Figure:
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


def _parts(axes: Axes, rows: Sequence[Line]) -> None:
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


def _far_apart(rows: Sequence[Line]) -> list[Line]:
    """Leave out rows whose labels or bars would touch the row before; the last one stays."""
    logs = [math.log2(row["effective_batch"]) for row in rows]
    gap = 0.08 * (logs[-1] - logs[0])
    kept: list[int] = []
    for i, log in enumerate(logs):
        if not kept or (log - logs[kept[-1]] >= gap and (logs[-1] - log >= gap or log == logs[-1])):
            kept.append(i)
    return [rows[i] for i in kept]
