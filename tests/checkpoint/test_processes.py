"""Runs that go from process to process, each of which knows nothing but the directory."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import PLACES, fork
from training import Run, Setup, difference, momentum

from accumplug.storage.layout import list_checkpoints

SETUPS = {
    "AdamW": Setup(),
    "momentum and fp16": Setup(optimizer=momentum, fp16=True),
    "two workers": Setup(loader="two workers"),
    "weigh and noise scale": Setup(weigh=True, noise=True),
}
EACH = pytest.mark.parametrize("name", SETUPS)
MICRO_BATCHES = 16  # two passes, each with a tail


def live(
    name: str, directory: Path, told: Path, seed: int, until: int | None = None, **options: Any
) -> None:
    """What a process does: go on, and leave after `until` micro-batches as one that is killed
    does; tell what it has seen, and where it was."""
    warnings.filterwarnings("ignore", message="BatchNorm sees micro-batches")
    run = Run(SETUPS[name], seed)
    checkpoint = run.checkpoints(directory, **options)
    checkpoint.resume()
    run.train(until=until)
    checkpoint.wait()
    torch.save({"seen": run.seen, "windows": run.windows, "state": run.state()}, told)
    if until is not None:
        os._exit(0)


def told_by(name: str, directory: Path, seed: int = 1, **options: Any) -> dict[str, Any]:
    """What a new process tells; `seed` is another one where nothing may come from it."""
    told = directory.with_suffix(".told")
    process = fork(live, name, directory, told, seed, **options)
    process.join(60)
    assert process.exitcode == 0
    return dict(torch.load(told, weights_only=True))


def assert_same(quiet: dict[str, Any], rest: dict[str, Any], what: str) -> None:
    """The rest of a run is that of the quiet one, to the last bit."""
    for key in ("seen", "windows"):
        expected = quiet[key][len(quiet[key]) - len(rest[key]) :]
        assert difference(rest[key], expected, f"{key} {what}") is None
    assert difference(rest["state"], quiet["state"], f"end {what}") is None


@EACH
def test_a_new_process_goes_on_from_each_micro_batch(name: str, tmp_path: Path) -> None:
    """Weights, moments, schedule, scaler, counters, losses, samples and random numbers are those
    of one process, with dropout, shuffling, noise in the data, two passes and their tails."""
    quiet = told_by(name, tmp_path / "quiet", every=1, keep=99)
    saved = list_checkpoints(tmp_path / "quiet")
    assert len(quiet["seen"]) == len(saved) == MICRO_BATCHES
    for stop, checkpoint in enumerate(saved[:-1], start=1):
        directory = tmp_path / f"{stop}"
        shutil.copytree(checkpoint, directory / checkpoint.name, copy_function=os.link)
        rest = told_by(name, directory, seed=100 + stop)
        assert len(rest["seen"]) == MICRO_BATCHES - stop
        assert_same(quiet, rest, f"after {stop}")


@EACH
def test_a_new_process_for_each_micro_batch_is_one_run(name: str, tmp_path: Path) -> None:
    """Sixteen processes in a row, each of which dies after one micro-batch."""
    quiet = told_by(name, tmp_path / "quiet")
    lives = [
        told_by(name, tmp_path / "chain", seed=1 if n == 0 else 100 + n, until=1, every=1)
        for n in range(MICRO_BATCHES)
    ]
    lives.append(told_by(name, tmp_path / "chain", seed=99))  # it only sees the end of the pass
    assert [len(life["seen"]) for life in lives] == [1] * MICRO_BATCHES + [0]
    for key in ("seen", "windows"):
        chain = list(itertools.chain.from_iterable(life[key] for life in lives))
        assert difference(chain, quiet[key], key) is None
    assert difference(lives[-1]["state"], quiet["state"]) is None


def test_a_new_interpreter_goes_on_as_a_forked_process_does(tmp_path: Path) -> None:
    """Python started anew twice, with other hash seeds, inside of a window each time."""
    name, told = "momentum and fp16", tmp_path / "told"
    quiet = told_by(name, tmp_path / "quiet")
    seen = []
    for seed, until in ((1, "until=4, every=1"), (8, "keep=2")):
        where = f"Path({str(tmp_path / 'run')!r}), Path({str(told)!r})"
        code = f"from test_processes import *\nlive({name!r}, {where}, {seed}, {until})"
        path = os.pathsep.join([*PLACES, *sys.path])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed)}
        environment["OMP_NUM_THREADS"] = "1"
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
        life = torch.load(told, weights_only=True)
        seen += life["seen"]
    assert difference(seen, quiet["seen"]) is None
    assert difference(life["state"], quiet["state"]) is None
