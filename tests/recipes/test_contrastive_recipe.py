"""contrastive.py in short, on one rank and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = str(Path(__file__).parents[2] / "recipes" / "contrastive.py")
RANKS = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]


@pytest.mark.parametrize(("ranks", "batch"), [(1, 128), (2, 64)])
def test_the_halves_find_each_other_more_often(ranks: int, batch: int) -> None:
    """After 10 epochs; the same effective batch."""
    launcher = RANKS if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, RECIPE, "--batch", str(batch), "--epochs", "10"],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    before, after = (int(found) for found in re.findall(r"(\d+)% of the held-out", done.stdout))
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert after > before
    assert losses[-1] < 0.7 * losses[0]
