"""What every test starts from, and the markers: by folder, fixture and measured duration."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")

HERE = Path(__file__).parent
SLOW = frozenset((HERE / "slow.txt").read_text().split())
"""Test functions that take more than 0.7 s, all their cases together."""
FOLDERS = {"ranks": "ranks", "recipes": "recipes", "docs": "slow", "cuda": "cuda"}
FOLDERS |= {"simulated_cuda": "slow"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device cuda` makes the tensors and models of all tests on a GPU."""
    parser.addoption("--device", default="cpu", help="torch's default device in the tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test; `quick` is what has no other of these marks. The longest ones come first, so
    that no worker is left with one at the end."""
    items.sort(key=lambda item: "simulated_cuda" not in item.path.parts)
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        marks = {FOLDERS[folder]} if folder in FOLDERS else set()
        if "ranks" in getattr(item, "fixturenames", ()):
            marks.add("ranks")
        if getattr(item, "originalname", item.name) in SLOW:
            marks.add("slow")
        for mark in marks or {"quick"}:
            item.add_marker(mark)


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = request.config.getoption("device")
    elsewhere = device != "cpu" and "ranks" not in request.fixturenames  # these have their own
    if elsewhere:
        torch.set_default_device(device)
    yield
    if elsewhere:  # torch 2.8 can't tell its default device any more once it was set to None
        torch.set_default_device(None)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
