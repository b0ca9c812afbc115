"""What every test starts from: the same seed, one thread, no state of Accelerate left over."""

from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
