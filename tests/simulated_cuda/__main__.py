"""Runs pytest in a process that has the simulated devices: `python -m simulated_cuda LIBRARY ...`.

With `--device cuda` the tests of the CPU make their tensors and models on the first of them.
"""

from __future__ import annotations

import os
import sys

from simulated_cuda import device

os.environ["SIMULATED_CUDA"] = sys.argv[1]  # for the ranks of tests
device.load(sys.argv[1])

import pytest  # noqa: E402  the devices come first

sys.exit(pytest.main(sys.argv[2:]))
