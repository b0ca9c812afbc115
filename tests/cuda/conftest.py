"""Tests that wait for a real GPU: `python -m pytest -m cuda`. They take a few minutes at most.

The simulated device runs them too (tests/simulated_cuda/test_cpu_suite.py), but for what only a
CUDA build of torch has: graphs and torch.compile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from ranks.harness import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what has no device to run on."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent.name == "cuda":
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture
def cuda_build() -> None:
    """Skip on the simulated device, which has no compiler and no graphs."""
    if torch.version.cuda is None:
        pytest.skip("needs a CUDA build of torch")


@pytest.fixture(scope="session")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, str, int]]:
    """Ranks with a GPU each, the name of their backend, and how many there can be."""
    places = tmp_path_factory.mktemp("nccl")
    if torch.version.cuda is not None:
        ranks, backend, most = Ranks(places), "nccl", torch.cuda.device_count()
    else:
        from simulated_cuda.processes import Gpus

        ranks, backend, most = Gpus(places, os.environ["SIMULATED_CUDA"]), "simulated_nccl", 2
    yield ranks, backend, most
    ranks.stop()
