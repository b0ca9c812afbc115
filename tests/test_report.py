"""What the pictures promise: the numbers of the log, and no trouble with a log that is torn."""

import builtins
import json

import pytest

from accumplug.report import draw_curve, draw_run, read_metrics, report

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
    """A line with `stepped: false` is a mark in every panel and a number in the title."""
    lines = [full_line(1), full_line(2, stepped=False, skipped=1), full_line(2, skipped=1)]
    figure = draw_run(read_metrics(log(tmp_path / "metrics.jsonl", lines)), title="run")
    assert "2 updates, 1 skipped windows" in figure.get_suptitle()
    marks = [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert list(marks[0].get_xdata()) == [2.0, 2.0]


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
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds no line with an update"):
        report(path)


CURVE = {
    "limit_samples_per_sec": 1000.0,
    "rows": [
        {"accum_steps": k, "micro_batch": 8, "effective_batch": 8 * k}
        | {"samples_per_sec": 900.0 * k / (k + 1), "share_of_limit": 0.9 * k / (k + 1)}
        | {"limit_samples_per_sec": 1000.0}
        for k in (1, 2, 4)
    ],
}


def test_the_curve_is_drawn_from_its_json(tmp_path):
    """A PNG comes out of the fields that accum-curve.v1 names."""
    assert draw_curve(CURVE, tmp_path / "curve.png").read_bytes().startswith(PNG)


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    """The extra is named; nothing half written is left."""
    true_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return true_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'pip install "accumplug\[recipes\]"'):
        draw_curve(CURVE, tmp_path / "curve.png")
    assert not list(tmp_path.iterdir())
