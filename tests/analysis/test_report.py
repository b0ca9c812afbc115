"""What the pictures promise: the numbers of the log, and no trouble with a log that is torn."""

import builtins
import itertools
import json
import sys
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from accumplug.analysis.curve import Curve, CurveRow
from accumplug.analysis.plotting import curve_figure
from accumplug.analysis.report import draw_run, read_metrics, report

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

from metrics import append

PNG = b"\x89PNG\r\n\x1a\n"


def log(path, lines, torn=""):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return path


def full_line(update, **changes):
    line = {"update": update, "loss": 3.0 / update, "lr": 1e-3, "grad_norm": 1.5 + update}
    return {**line, "seconds": 0.1 * update, "stepped": True, "skipped": 0, **changes}


def test_the_panels_show_the_numbers_of_the_log(tmp_path):
    """Each panel's first line is a field of the file, over the updates."""
    lines = [full_line(update, noise_scale=10.0 * update) for update in range(1, 6)]
    figure = draw_run(read_metrics(log(tmp_path / "metrics.jsonl", lines)), title="run")
    fields = ("loss", "lr", "grad_norm", "noise_scale", "seconds")
    labels = ("loss", "learning rate", "gradient norm", "gradient noise", "time per window")
    for axes, field, label in zip(figure.axes, fields, labels, strict=True):
        assert axes.get_ylabel().startswith(label)
        assert list(axes.lines[0].get_xdata()) == [1, 2, 3, 4, 5]
        assert list(axes.lines[0].get_ydata()) == [line[field] for line in lines]
    assert figure.axes[-1].get_xlabel() == "optimizer updates"


def test_skipped_windows_are_marked_and_counted(tmp_path):
    """A line with `stepped: false` is a mark in every panel and a number in the title.

    Each is seen: those between the same two updates lie side by side.
    """
    skips = [full_line(1, stepped=False, skipped=n, loss=7.0 + n) for n in (1, 2, 3)]
    lines = [full_line(1), *skips, full_line(2, skipped=3)]
    figure = draw_run(read_metrics(log(tmp_path / "metrics.jsonl", lines)), title="run")
    assert "2 updates, 3 skipped windows" in figure.get_suptitle()
    for axes in figure.axes:
        (marks,) = axes.collections
        assert [float(path[0, 0]) for path in marks.get_segments()] == [1.25, 1.5, 1.75]
    assert list(figure.axes[0].lines[0].get_xdata()) == [1.0, 1.25, 1.5, 1.75, 2.0]
    assert list(figure.axes[0].lines[0].get_ydata()) == [3.0, 8.0, 9.0, 10.0, 1.5]
    figure = draw_run(read_metrics(log(tmp_path / "metrics.jsonl", lines[:2])), title="run")
    assert figure.get_suptitle() == "run\n1 update, 1 skipped window"


def test_many_skipped_windows_do_not_cover_the_panels():
    """Their marks stay at the foot of the panel."""
    skips = [full_line(1, stepped=False, skipped=n) for n in range(1, 42)]
    for axes in draw_run([full_line(1), *skips], title="run").axes:
        (marks,) = axes.collections
        assert {float(path[1, 1]) for path in marks.get_segments()} == {0.06}


def test_what_is_out_of_sight_is_counted_and_a_single_window_is_seen():
    """One window took 1000 times as long as the others; a run of one window has dots."""
    lines = [full_line(n, seconds=1.0 if n != 3 else 1000.0) for n in range(1, 9)]
    seconds = draw_run(lines, title="run").axes[-1]
    assert seconds.get_legend().get_texts()[0].get_text() == "each window (1 higher than this)"
    assert seconds.get_ylim()[1] < 10
    first = draw_run(lines[:1], title="run")
    assert all(axes.lines[0].get_marker() == "." for axes in first.axes)


def test_units_come_from_the_log(tmp_path):
    """A run that says what its loss and its weights are counted in has them on the axes."""
    units = {"loss_unit": "nats per character", "weight_unit": "characters"}
    lines = [full_line(n, noise_scale=5.0, **units) for n in (1, 2)]
    figure = draw_run(read_metrics(log(tmp_path / "metrics.jsonl", lines)), title="run")
    assert figure.axes[0].get_ylabel() == "loss\n(nats per character)"
    assert figure.axes[3].get_ylabel() == "gradient noise scale\n(characters, an estimate)"
    with open(tmp_path / "recipe.jsonl", "w", encoding="utf-8") as file:
        append(file, full_line(1))
    (line,) = read_metrics(tmp_path / "recipe.jsonl")
    assert line == {**full_line(1), **units}, "as the training recipes write it"
    plain = draw_run([full_line(n, noise_scale=5.0) for n in (1, 2)], title="run")
    assert plain.axes[0].get_ylabel() == "loss\n(mean over the window)"
    assert plain.axes[3].get_ylabel() == "gradient noise scale\n(items, an estimate)"


def test_the_interval_of_the_noise_scale_is_a_band_that_flattens_nothing():
    """Drawn where both ends are known; an early one that is very wide leaves the scale as it is."""
    ends = [{}, {"noise_low": 1.0, "noise_high": 1e9}, {"noise_low": 80.0, "noise_high": 120.0}]
    lines = [full_line(n, noise_scale=100.0 + n, **more) for n, more in enumerate(ends, 1)]
    axes = draw_run(lines, title="run").axes[3]
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices.tolist()
    assert {(2.0, 1.0), (2.0, 1e9), (3.0, 80.0), (3.0, 120.0)} == set(map(tuple, corners))
    assert axes.get_ylim()[1] < 110
    lines[1]["noise_high"] = None
    assert not draw_run(lines[:2], title="run").axes[3].collections


def boxes(figure):
    """Draw it; give the box of each text that is there, legends whole."""
    FigureCanvasAgg(figure).draw()
    found = [] if figure._suptitle is None else [figure._suptitle]
    for axes in figure.axes:
        for axis, shown, n in ((axes.xaxis, axes.get_xlim(), 0), (axes.yaxis, axes.get_ylim(), 1)):
            labels = axis.get_ticklabels()  # of ticks out of sight, too
            found += [one for one in labels if shown[0] <= one.get_position()[n] <= shown[1]]
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        found += [legend] if (legend := axes.get_legend()) else []
    seen = [one for one in found if one.get_visible() and getattr(one, "get_text", str)()]
    return [(one, one.get_window_extent()) for one in seen]


def overlaps(figure):
    """Texts that cover each other, or leave the page."""
    drawn, page = boxes(figure), figure.bbox
    outside = [a for a, box in drawn if box.x0 < 0 or box.x1 > page.x1 or box.y0 < 0]
    return outside + [
        (a, b) for (a, one), (b, two) in itertools.combinations(drawn, 2) if one.overlaps(two)
    ]


@pytest.mark.parametrize("count", [1, 2, 60])
def test_no_text_of_a_report_covers_another(tmp_path, count):
    """Long paths, big numbers and short runs included."""
    lines = [full_line(n, noise_scale=1e7 / n, lr=1e-9 * n) for n in range(1, count + 1)]
    lines.append(full_line(count, stepped=False, skipped=1, seconds=1e5))
    assert not overlaps(draw_run(lines, title="a/very/long/path" * 20 + "/metrics.jsonl"))


@pytest.mark.parametrize("steps", [(1,), (1, 2), (1, 4, 16, 1024), range(1, 25), (7, 8, 1000)])
def test_no_text_of_a_curve_covers_another(steps):
    """Few rows and many, close together and far apart."""
    assert not overlaps(curve_figure(curve_of(steps).as_json()))


def test_the_curve_shows_the_rows_and_the_limit():
    """Measured and limit above; below, the parts of an update's time for each micro-batch."""
    above, below = curve_figure(CURVE.as_json()).axes
    measured, limit = above.lines
    assert list(measured.get_xdata()) == list(limit.get_xdata()) == [8, 16, 32]
    assert list(measured.get_ydata()) == [450.0, 600.0, 720.0]
    assert list(limit.get_ydata()) == [1000.0] * 3
    assert measured.get_linestyle() != limit.get_linestyle()
    inside, rest = below.containers
    assert [bar.get_height() for bar in inside] == pytest.approx([6.0, 6.0, 6.0])
    assert [bar.get_height() for bar in rest] == pytest.approx([2.0, 1.0, 0.5])
    assert [bar.get_y() for bar in rest] == pytest.approx([6.0, 6.0, 6.0])
    assert "(ms" in below.get_ylabel()
    assert "samples per second" in above.get_ylabel()


def test_missing_fields_nulls_and_a_torn_last_line_are_passed_over(tmp_path):
    """Only what is there and finite is drawn; a panel without any number is left out."""
    lines = [
        {"update": 1, "loss": 2.0},
        {"update": 2, "loss": None, "grad_norm": float("inf")},
        {"epoch": 1},
        ["not", "a", "window"],
        {"update": 3, "loss": 1.0, "lr": "high"},
    ]
    path = log(tmp_path / "metrics.jsonl", lines, torn='{"update": 4, "lo')
    figure = draw_run(read_metrics(path), title="run")
    (axes,) = figure.axes
    assert list(axes.lines[0].get_xdata()) == [1.0, 3.0]
    assert list(axes.lines[0].get_ydata()) == [2.0, 1.0]


def test_a_resumed_run_counts_each_update_once(tmp_path):
    """Updates logged twice, because the run went back to a checkpoint: the later line is kept."""
    lines = [full_line(1), full_line(2, loss=9.0), full_line(2, loss=5.0), full_line(3)]
    read = read_metrics(log(tmp_path / "metrics.jsonl", lines))
    assert [(line["update"], line["loss"]) for line in read] == [(1, 3.0), (2, 5.0), (3, 1.0)]


def test_the_report_lies_beside_the_log_or_where_it_is_asked_for(tmp_path):
    """A PNG is written, its directory made, and its path given back."""
    path = log(tmp_path / "metrics.jsonl", [full_line(update) for update in range(1, 60)])
    assert report(path) == tmp_path / "report.png"
    assert report(path, tmp_path / "new" / "page.png").read_bytes().startswith(PNG)
    assert (tmp_path / "report.png").read_bytes().startswith(PNG)


def test_a_log_without_updates_is_an_error_that_names_the_file(tmp_path):
    """Nothing to draw is said, not drawn."""
    path = log(tmp_path / "metrics.jsonl", [{"epoch": 1}])
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl has nothing to draw: .*number for update"
    ):
        report(path)


def curve_of(steps):
    """An update takes 6 ms for each micro-batch and 2 ms for itself."""
    rows = []
    for k in steps:
        share = 0.9 * k / (k + 1)
        times = (1000.0 * share, 6.0 * k + 2.0, 6.0 * k, 2.0)
        rows.append(CurveRow(k, 8, 8 * k, 1, *times, 1000.0, share, 5, 1.0, 2.0, 300.0))
    return Curve(tuple(rows), "cpu", "resident")


CURVE = curve_of((1, 2, 4))


def test_the_curve_is_drawn_from_its_json(tmp_path):
    """A PNG comes out of the fields that accum-curve.v1 names."""
    assert CURVE.draw(tmp_path / "new" / "curve.png").read_bytes().startswith(PNG)


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    """The extra is named; nothing half written is left."""
    true_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return true_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'pip install "accumplug\[plots\]"'):
        CURVE.draw(tmp_path / "curve.png")
    assert not list(tmp_path.iterdir())


HOSTILE = [
    '{"update": NaN, "loss": 1.0}',
    '{"update": Infinity, "loss": 1.0}',
    '{"update": true, "loss": 1.0}',
    '{"update": "2", "loss": 1.0}',
    '{"update": null}',
    "null",
    "1",
    "[]",
    "{}",
    "",
    "\x00\x01",
    "{" * 100_000,
    "[" * 100_000,
    '{"update": ' + "9" * 5000 + "}",
]


def test_lines_of_any_content_are_skipped(tmp_path):
    """Among them two lines that are drawn."""
    good = [json.dumps(full_line(n)) for n in (1, 2)]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("\n".join([*HOSTILE, good[0], *HOSTILE, good[1]]).encode() + b"\n\xff\xfe")
    assert [line["update"] for line in read_metrics(path)] == [1, 2]
    assert report(path).read_bytes().startswith(PNG)


@pytest.mark.parametrize("content", ["", "\n\n", "NaN\n", "\n".join(HOSTILE)])
def test_a_log_without_anything_to_draw_leaves_no_picture(tmp_path, content):
    """An empty file included: the error names the keys that are needed."""
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match="nothing to draw: a line must be a JSON object with a nu"):
        report(tmp_path / "metrics.jsonl")
    assert not (tmp_path / "report.png").exists()


def test_updates_without_any_number_to_draw_are_an_error_too(tmp_path):
    """All NaN, or under other names."""
    nothing = {"loss": float("nan"), "lr": None, "grad_norm": "high", "seconds": [1], "train": 1.0}
    path = log(tmp_path / "metrics.jsonl", [{"update": n, **nothing} for n in (1, 2)])
    with pytest.raises(ValueError, match="its keys are update, loss, lr, grad_norm, sec"):
        report(path)


@pytest.mark.parametrize(
    "change",
    [
        {"loss": 9e99, "grad_norm": -9e99, "seconds": 0.0},
        {"loss": 0.0, "lr": 0.0, "grad_norm": 0.0, "seconds": 0.0, "noise_scale": 0.0},
        {"loss": -5.0, "seconds": -1.0, "noise_scale": -3.0},
        {"loss": 10**400, "grad_norm": float("nan"), "lr": float("inf")},
        {"update": 0},
        {"update": -3},
        {"update": 10**12},
        {"update": 2.5},
        {"loss_unit": "$\\frac{$", "weight_unit": "{x} % $a_$"},
        {"stepped": "no", "skipped": [1]},
        {"stepped": False, "skipped": float("nan")},
        {"noise_scale": 5.0, "noise_low": 9.0, "noise_high": 9e99},
    ],
    ids=itertools.count(),
)
def test_numbers_and_texts_of_any_kind_are_drawn(tmp_path, change):
    """Huge, zero, negative and missing numbers; texts that look like formulas."""
    lines = [full_line(1), {**full_line(2), **change}, full_line(3)]
    path = log(tmp_path / "a$_{$b.jsonl", lines)
    assert report(path).read_bytes().startswith(PNG)
