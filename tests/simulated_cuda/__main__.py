"""Runs pytest in a process that has the simulated devices: `python -m simulated_cuda LIBRARY ...`.

With `--device cuda` the tests of the CPU make their tensors and models on the first of them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter

from simulated_cuda import device

os.environ["SIMULATED_CUDA"] = sys.argv[1]  # for the ranks of tests
device.load(sys.argv[1])

import pytest  # noqa: E402  the devices come first
import torch.distributed as dist  # noqa: E402

from simulated_cuda import group  # noqa: E402, F401  registers the groups

_init = dist.init_process_group


def _mixed(backend: str, *args: object, **options: object) -> None:
    """A build of torch without CUDA crashes where gloo is given tensors of a device."""
    _init("simulated_mixed" if backend == "gloo" else backend, *args, **options)


dist.init_process_group = _mixed


class Passed:
    """Tells at the end how many tests of each file have passed."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the bodies of tests."""
        self.files[report.location[0]] += report.when == "call" and report.passed

    def pytest_unconfigure(self) -> None:
        """A line for each file."""
        for file, count in self.files.items():
            print(f"passed: {file} {count}")


sys.exit(pytest.main(sys.argv[2:], plugins=[Passed()]))
