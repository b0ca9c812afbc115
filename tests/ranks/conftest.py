"""The ranks that all tests of this directory share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from .harness import Ranks


@pytest.fixture(scope="session")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Ranks]:
    """Processes to run ranks on; started by the first test that needs them.

    With `--device cuda` each has a simulated device of its own.
    """
    places = tmp_path_factory.mktemp("ranks")
    if request.config.getoption("device") == "cpu":
        ranks = Ranks(places)
    else:
        from simulated_cuda.processes import DeviceRanks

        ranks = DeviceRanks(places, os.environ["SIMULATED_CUDA"])
    yield ranks
    ranks.stop()


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """The references are computed in float64, as the ranks do."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
