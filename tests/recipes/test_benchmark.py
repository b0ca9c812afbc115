"""The benchmark runs: its sections give their numbers, and a save falls where its row says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import benchmark_checkpoints
from benchmark_checkpoints import STEPS, Run, take_turns
from benchmark_loops import Settings

RECIPES = Path(benchmark_checkpoints.__file__).parent


def test_sections_can_be_run_alone_and_are_written(tmp_path):
    """In a process of its own, with a tiny model."""
    command = [sys.executable, RECIPES / "benchmark.py", "--smoke", "--repeats", "1"]
    command += ["--only", "cost", "sums", "--output-dir", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "benchmark.json").read_text())
    assert {"cost", "sums"} <= found.keys()
    assert "tokens" not in found
    assert found["cost"]["own_us"]["accum"] > 0
    assert found["sums"]["fp32 sums"]["relative_error"] < 0.005
    assert (tmp_path / "benchmark.png").is_file()


def test_waits_are_not_counted_on_a_cpu():
    """An error in one line, before anything is measured."""
    command = [sys.executable, RECIPES / "benchmark.py", "--only", "waits"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert run.returncode == 2
    assert run.stderr.endswith("error: waits are counted with --device cuda\n")


@pytest.mark.parametrize("before", [0, STEPS // 2])
def test_saves_fall_on_the_place_of_the_window_that_their_row_names(tmp_path, monkeypatch, before):
    """All with so many pending."""
    monkeypatch.setattr(benchmark_checkpoints, "TOKENS", 4)
    run = Run(Settings("cpu", 1, tmp_path, smoke=True), tmp_path)
    run.train(before)
    pending = []
    for way in ("save_state", "async_save"):
        monkeypatch.setattr(run, way, lambda: pending.append(run.accum.pending))
    with run.checkpointer() as checkpointer:
        held, longer = take_turns(run, checkpointer, 2)
    assert pending == [before] * 4
    saved = [int(path.name.rpartition("-")[2]) for path in (tmp_path / "accum").glob("update-*")]
    assert [micro_batch % STEPS for micro_batch in saved] == [before] * 2
    assert max(saved) - min(saved) == 3 * STEPS  # the order begins with another way in each turn
    assert held.keys() == longer.keys() == {"accum", "save_state", "DCP async_save"}
    assert {len(times) for times in (*held.values(), *longer.values())} == {2}


@pytest.mark.parametrize("place", ["cached", "on disk"])
def test_a_resume_is_measured_with_the_files_where_its_row_says(tmp_path, place):
    """`put` is given clean pages."""
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(bytes(10 << 20))
    os.sync()
    benchmark_checkpoints.put(tmp_path, place)
    with path.open("rb") as file:
        assert file.read() == bytes(10 << 20)
