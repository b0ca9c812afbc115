"""One page of pictures of a run, drawn from its log.

Line style and marker tell everything apart, so grey print is enough.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from accumplug.analysis.plotting import GREY, INK, PALE, finish, need_matplotlib, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_run", "read_metrics", "report"]

Line: TypeAlias = dict[str, Any]  # a JSON object
MANY = 30  # skipped windows; more lines across a panel would hide its content
LONGEST = 80  # characters of a title
DRAWABLE = 1e100  # matplotlib overflows far above


def report(metrics: str | Path, png: str | Path | None = None) -> Path:
    """Draw the run that a metrics.jsonl file logged, and return the path of the PNG file.

    It has panels for loss, learning rate, gradient norm, noise scale and time per window, over the
    updates; skipped windows are marked. A panel without numbers is left out. Lines that are not
    JSON are skipped, like the last line of a run that was killed.

    >>> with open("metrics.jsonl", "a") as log:  # after each window
    ...     line = {"update": accum.updates, "skipped": accum.skipped, **asdict(accum.last)}
    ...     print(json.dumps({**line, "lr": scheduler.get_last_lr()[0]}), file=log)

    Args:
        metrics: a file with one JSON object per line. Each has `update` (the number of updates
            so far) and any of `loss`, `lr`, `grad_norm`, `noise_scale` (with the ends of its
            interval, `noise_low` and `noise_high`), `seconds`, `stepped` and `skipped` (the number
            of skipped windows so far, which separates those of one update). The texts
            `loss_unit` and `weight_unit` (of the noise scale) label the axes.
        png: the path of the picture; by default report.png beside the log.

    Raises:
        ValueError: no line of the file has an update and a number to draw.
        OSError: the log can't be read, or the picture can't be written.
        ImportError: matplotlib is not installed.
    """
    metrics = Path(metrics)
    lines = read_metrics(metrics)
    if not any(_number(line.get(panel[0])) is not None for line in lines for panel in _PANELS):
        raise ValueError(_nothing_to_draw(metrics))
    target = Path(png) if png is not None else metrics.with_name("report.png")
    return save(draw_run(lines, title=str(metrics)), target)


def read_metrics(metrics: str | Path) -> list[Line]:
    """Read the lines with an `update`, in its order; lines that are not JSON are skipped.

    If a resumed run logged an update again, the later line is kept.
    """
    found: dict[tuple[int, bool, int], Line] = {}
    for line in _json_objects(metrics):
        if _number(line.get("update")) is not None:
            stepped = bool(line.get("stepped", True))
            skipped = 0 if stepped else int(_number(line.get("skipped")) or 0)
            found[int(line["update"]), stepped, skipped] = line
    return sorted(found.values(), key=lambda line: float(line["update"]))


def _json_objects(metrics: str | Path) -> Iterator[Line]:
    with open(metrics, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield line


def _nothing_to_draw(metrics: Path) -> str:
    """Name the keys that a log needs, and those that it has."""
    keys = list(dict.fromkeys(key for line in _json_objects(metrics) for key in line))
    seen = f"its keys are {', '.join(keys[:12])}" if keys else "it has no JSON object in a line"
    drawn = ", ".join(panel[0] for panel in _PANELS)
    return (
        f"{metrics} has nothing to draw: a line must be a JSON object with a number for update "
        f"and for one of {drawn}; {seen}"
    )


def _number(value: object) -> float | None:
    """Return a finite number as a float, everything else as None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < DRAWABLE else None


def _placed(lines: Sequence[Line]) -> list[Line]:
    """Add each window's place `at` on the axis: its update, or between two if it was skipped."""
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
    """Return the places of the windows that have `field`, and its values."""
    pairs = [(float(line["at"]), _number(line.get(field))) for line in lines]
    kept = [(x, y) for x, y in pairs if y is not None]
    return [x for x, _ in kept], [y for _, y in kept]


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean around each value, over a twentieth of the run."""
    half = max(1, len(values) // 40)
    around = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(near) / len(near) for near in around]


def _scattered(field: str) -> Callable[[Axes, Sequence[Line]], None]:
    def draw(axes: Axes, lines: Sequence[Line]) -> None:
        updates, values = _series(lines, field)
        many = len(values) >= 40
        color, width = (GREY, 0.8) if many else (INK, 1.0)
        axes.plot(updates, values, _dots(values), color=color, lw=width, label="each window")
        if many:
            axes.plot(updates, _smooth(values), color=INK, linewidth=1.8, label="running mean")
        _wide_range(axes, values)

    return draw


def _dots(values: Sequence[float]) -> str:
    """Return the style of a line, with dots if it is too short to be visible."""
    return "-" if len(values) > 2 else ".-"


def _rate(axes: Axes, lines: Sequence[Line]) -> None:
    updates, values = _series(lines, "lr")
    axes.plot(updates, values, _dots(values), color=INK, linewidth=1.0)


def _noise(axes: Axes, lines: Sequence[Line]) -> None:
    updates, values = _series(lines, "noise_scale")
    axes.plot(updates, values, _dots(values), color=INK, linewidth=1.0, label="estimate")
    _wide_range(axes, values)
    bottom, top = axes.get_ylim()  # an early interval is so wide that it would flatten the curve
    known = [line for line in lines if _number(line.get("noise_high")) is not None]
    places, high = _series(known, "noise_high")
    if len(low := _series(known, "noise_low")[1]) == len(high) > 0:
        axes.fill_between(places, low, high, color=PALE, label="95 % interval")
    axes.set_ylim(0 if axes.get_yscale() == "linear" else bottom, top)


def _wide_range(axes: Axes, values: Sequence[float]) -> None:
    """Use a log scale if a linear one would make most of the curve flat."""
    if min(values) > 0 and max(values) > 30 * min(values):
        axes.set_yscale("log")


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
    ("loss", "loss\n({loss_unit})", _scattered("loss")),
    ("lr", "learning rate", _rate),
    ("grad_norm", "gradient norm\n(before clipping)", _scattered("grad_norm")),
    ("noise_scale", "gradient noise scale\n({weight_unit}, an estimate)", _noise),
    ("seconds", "time per window\n(seconds)", _seconds),
)
_UNITS = {"loss_unit": "mean over the window", "weight_unit": "items"}


def draw_run(lines: Sequence[Line], *, title: str) -> Figure:
    """Draw one panel for each logged quantity, over the updates of the run."""
    lines = _placed(lines)
    units = {n: str(next((li[n] for li in lines if li.get(n)), u)) for n, u in _UNITS.items()}
    panels = [panel for panel in _PANELS if _series(lines, panel[0])[0]]
    skipped = [float(line["at"]) for line in lines if line.get("stepped") is False]
    figure = need_matplotlib()(figsize=(8.3, 1.2 + 2.1 * len(panels)), layout="constrained")
    said = f"{_many(len(lines) - len(skipped), 'update')}, {_many(len(skipped), 'skipped window')}"
    title = title if len(title) <= LONGEST else f"...{title[3 - LONGEST :]}"
    figure.suptitle(f"{title}\n{said}", fontsize=10, parse_math=False)  # a path may have a $
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (_, label, draw) in zip(rows, panels, strict=True):
        draw(axes, lines)
        axes.set_ylabel(label.format(**units), fontsize=9, parse_math=False)
        across = axes.get_xaxis_transform()
        if skipped:
            high = 1.0 if len(skipped) <= MANY else 0.06
            axes.vlines(
                skipped, 0, high, INK, ":", label="skipped window", linewidth=0.9, transform=across
            )
        finish(axes)
    rows[-1].set_xlabel("optimizer updates")
    rows[-1].xaxis.get_major_locator().set_params(integer=True)
    return figure


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
