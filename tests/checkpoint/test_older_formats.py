"""Checkpoints that an earlier version has written, in format 1 or 2, are resumed as its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import training
from older_format_run import Run

FORMAT_1 = Path(__file__).parent / "format_1"
FORMATS = [FORMAT_1, FORMAT_1.with_name("format_2")]


@pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches")
@pytest.mark.parametrize("saved", FORMATS, ids=lambda path: path.name)
def test_a_run_goes_on_from_a_checkpoint_of_an_older_format(saved: Path, tmp_path: Path) -> None:
    """Sparse gradients of an open window, two optimizers, random states, a loader's place."""
    shutil.copytree(saved / "one_rank", tmp_path, dirs_exist_ok=True)
    expected = Run(1).train()
    resumed = Run(2)
    with resumed.checkpoints(tmp_path) as checkpoint:
        position = checkpoint.resume()
        assert position is not None
        assert (position.update, position.micro_batch, position.pending) == (1, 5, 2)
        found = resumed.train()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)  # another CPU may have saved


@pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches")
def test_a_planned_window_of_format_1_goes_on_with_its_scaler_and_noise_scale(
    tmp_path: Path,
) -> None:
    """Under weigh=, fp16 and a noise scale: five of eight micro-batches, two in a window."""
    shutil.copytree(FORMAT_1 / "weighed", tmp_path, dirs_exist_ok=True)
    setup = training.Setup(fp16=True, weigh=True, noise=True, optimizer=training.momentum)
    quiet = training.Run(setup, 1).train()
    resumed = training.Run(setup, 2)
    with resumed.checkpoints(tmp_path) as checkpoint:
        position = checkpoint.resume()
        assert position is not None
        assert (position.micro_batch, position.pending) == (5, 2)
        resumed.train()
    expected, found = quiet.state(), resumed.state()
    assert expected["counters"] == found["counters"]
    for (x, loss), (y, other) in zip(quiet.seen[5:], resumed.seen, strict=True):
        assert torch.equal(x, y)
        assert loss == pytest.approx(other, rel=1e-2)  # another CPU may have saved, in fp16
    for name, weight in expected["model"].items():
        torch.testing.assert_close(found["model"][name], weight, rtol=1e-2, atol=1e-3)
    for (loss, weight, *_), (other, same, *_) in zip(
        quiet.windows[1:], resumed.windows, strict=True
    ):
        assert (loss, weight) == (pytest.approx(other, rel=1e-2), same)
