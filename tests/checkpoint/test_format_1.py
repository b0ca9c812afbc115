"""Checkpoints that an earlier version has written, in format 1, are resumed as its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from format_1_run import Run

SAVED = Path(__file__).parent / "format_1" / "one_rank"


@pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches")
def test_a_run_goes_on_from_a_checkpoint_of_format_1(tmp_path: Path) -> None:
    """Sparse gradients of an open window, two optimizers, random states, a loader's place."""
    shutil.copytree(SAVED, tmp_path, dirs_exist_ok=True)
    expected = Run(1).train()
    resumed = Run(2)
    with resumed.checkpoints(tmp_path) as checkpoint:
        position = checkpoint.resume()
        assert position is not None
        assert (position.update, position.micro_batch, position.pending) == (1, 5, 2)
        found = resumed.train()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)  # another CPU may have saved
