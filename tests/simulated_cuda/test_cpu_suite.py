"""What the tests of the CPU hold is asked of the simulated device, with the same tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NOT_THERE = "sparse or compiled"  # are not simulated
LEFT_OUT = {
    "core/test_accumulate_dtype.py": NOT_THERE,
    "core/test_optimizer_step.py": NOT_THERE,
    "core/test_window.py": NOT_THERE,
    "cuda/test_gpu.py": NOT_THERE,
    "loop/test_amp.py": "itself_fp16",  # autocast computes its loss in fp32 on CUDA
    "loop/test_formula.py": NOT_THERE,
    # waits are counted in test_waits.py; the others need a process group on the CPU
    "loop/test_guards.py": "host_reads or may_read",
    "loop/test_loop.py": NOT_THERE,
    "ranks/test_contrastive.py": NOT_THERE,
    "ranks/test_gradients.py": NOT_THERE,
    "ranks/test_partitions.py": NOT_THERE,
    "ranks/test_reductions.py": NOT_THERE,
}
"""Files of tests, and which of their tests are left out."""
FEW = {"ranks/test_contrastive.py": 4, "ranks/test_partitions.py": 1}
"""How many have to pass of files that have fewer than five."""


@pytest.mark.parametrize("file", LEFT_OUT)
def test_a_file_of_tests_passes_on_the_device(library: Path, file: str) -> None:
    """All of its tensors and models are on a simulated device, those of a rank on its own."""
    command = [sys.executable, "-m", "simulated_cuda", str(library), "--device", "cuda", "-q"]
    command += [str(TESTS / file), "-k", f"not ({LEFT_OUT[file]})", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= FEW.get(file, 5)
