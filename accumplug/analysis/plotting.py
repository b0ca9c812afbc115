"""What the pictures share: matplotlib, if it is there, the grid and the legend, and the file.

matplotlib is an extra (`pip install "accumplug[recipes]"`) and is imported when a picture is
asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["GREY", "INK", "PALE", "finish", "need_matplotlib", "save"]

INK, GREY, PALE = "#1f1f1f", "#8a8a8a", "#d9d9d9"


def need_matplotlib() -> Any:
    """Import matplotlib's figure class, or raise an ImportError that says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'pictures need matplotlib, which is an extra: pip install "accumplug[recipes]"'
        ) from error
    return Figure


def save(figure: Figure, target: Path) -> Path:
    """Write the PNG, making its directory."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120, format="png")
    return target


def finish(axes: Axes) -> None:
    """Add the grid and, above the axes where it covers nothing, the legend."""
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
