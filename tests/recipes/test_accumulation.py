"""What the lesson promises: it runs as it stands, and its exercises say what is so."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "accumulation.py"


def run(*arguments, cwd):
    """Run the recipe as a newcomer does, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "error", RECIPE, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=280,
    )


def test_the_lesson_runs_and_leaves_its_two_files(tmp_path):
    """The proof, one step, the table; the JSON's path as the last line; exit 0."""
    found = run("--num-steps", "4", cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert lines[-1] == "outputs/accum-curve.json"
    (gap,) = (line for line in lines if line.startswith("largest difference"))
    assert float(gap.split()[2]) < 1e-4
    assert any(line.startswith("4 micro-batches, 1 gradient reduction, one opt") for line in lines)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "accum-curve.json",
        "accum-curve.png",
        "outputs",
    ]
    curve = json.loads((tmp_path / "outputs" / "accum-curve.json").read_text())
    assert curve["schema"] == "accum-curve.v1"
    assert [row["accum_steps"] for row in curve["rows"]] == [1, 2, 4, 8, 16, 32]
    assert [row["effective_batch"] for row in curve["rows"]] == [8, 16, 32, 64, 128, 256]
    assert {row["sync_calls"] for row in curve["rows"]} == {1}


def test_the_exercises_hold(tmp_path):
    """Each says what it saw, and the exit code says whether it is what it claims."""
    found = run("--exercise", "all", cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    for said in (
        "SGD, no division",
        "micro-batch 4 of 4: AdamW's step is 2",
        "rank 1 of 2, 4 micro-batches: 4 reductions in a plain loop, 1 with an Accumulator",
        "torch.float64, 4 x 4",
        "the window starts again as 8 x 4",
    ):
        assert said in found.stdout
    assert list(tmp_path.iterdir()) == [], "an exercise leaves nothing"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--num-steps", "0"], "at least 1"), (["--exercise", "rowing"], "invalid choice: 'rowing'")],
)
def test_wrong_options_are_refused(tmp_path, monkeypatch, capsys, arguments, said):
    """Exit 2, one line, and nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *arguments])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(RECIPE), run_name="__main__")
    err = capsys.readouterr().err
    assert err.startswith("accumulation.py: error: ")
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
