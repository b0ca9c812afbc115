"""The simulated devices, in processes of their own: no other test sees them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks.harness import Ranks

from simulated_cuda import build
from simulated_cuda.processes import Gpus


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled devices: once a session, or once for all in $SIMULATED_CUDA_CACHE."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler (g++, or $CXX): the CUDA device can't be simulated")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = Path(os.environ.get("SIMULATED_CUDA_CACHE", shared / "simulated_cuda"))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build.build(folder)


@pytest.fixture(scope="session")
def gpus(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Processes with simulated devices; started by the first test that needs them."""
    ranks = Gpus(tmp_path_factory.mktemp("gpus"), str(library))
    yield ranks
    ranks.stop()
