"""What the tests of the CPU hold is asked of the simulated device, with the same tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LEFT_OUT = (
    "sparse or compiled or not_served_in_place",  # are not simulated; the last one compiles
    "itself_fp16",  # autocast computes its loss in fp32 on CUDA
    "host_reads or may_read",  # waits are counted in test_waits.py, or there is no process group
    # Accelerate prepares on the CPU there; a loader's workers have no simulated device
    "prepared or accelerator or evaluation_is_not or reads_on_into or over_two_passes or nested",
    "workers",
    "share_no_window",  # counts the sums of ranks in host memory
)
"""Names of tests."""
FILES = {
    "loop": [
        "core/test_accumulate_dtype.py",
        "core/test_optimizer_step.py",
        "core/test_window.py",
        "dataloading/test_contrastive.py",
        "loop/test_amp.py",
        "loop/test_data_pass.py",
        "loop/test_formula.py",
        "loop/test_guards.py",
        "loop/test_loop.py",
        "loop/test_open_windows.py",
        "loop/test_reading_ahead.py",
        "loop/test_several_accumulators.py",
    ],
    "ranks": [
        "ranks/test_contrastive.py",
        "ranks/test_gradients.py",
        "ranks/test_groups.py",
        "ranks/test_inplace.py",
        "ranks/test_left_out.py",
        "ranks/test_noise.py",
        "ranks/test_partitions.py",
        "ranks/test_sharded.py",
        "ranks/test_wide.py",
    ],
    "GPU": ["cuda/test_gpu.py"],
}
FEW = {"ranks/test_contrastive.py": 4, "ranks/test_partitions.py": 1, "ranks/test_noise.py": 4}
"""How many have to pass of files that have fewer than five."""


@pytest.mark.parametrize("kind", FILES)
def test_what_holds_on_the_cpu_holds_on_the_device(library: Path, kind: str) -> None:
    """All tensors and models are on a simulated device, those of a rank on its own."""
    command = [sys.executable, "-m", "simulated_cuda", str(library), "--device", "cuda", "-q"]
    command += [str(TESTS / file) for file in FILES[kind]]
    command += ["-k", f"not ({' or '.join(LEFT_OUT)})", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = dict(re.findall(r"^passed: tests/(\S+) (\d+)$", done.stdout, re.MULTILINE))
    assert all(int(passed[file]) >= FEW.get(file, 5) for file in FILES[kind]), passed
