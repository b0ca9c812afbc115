"""A fingerprint is the same for equal items and another one for others, and costs little."""

from __future__ import annotations

import collections
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from accumplug.dataloading.fingerprint import fingerprint

Pair = collections.namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: Any
    label: int = 0


def images() -> torch.Tensor:
    return torch.arange(2 * 3 * 32 * 32, dtype=torch.float32).view(2, 3, 32, 32)


PAIRS: dict[str, tuple[Any, Any]] = {
    "values": (torch.ones(3), torch.zeros(3)),
    "dtypes": (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.float32)),
    "shapes": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "order of samples": (images(), images().flip(0)),
    "order of channels": (images(), images().flip(1)),
    "columns behind a first one that all rows share": (
        torch.stack([torch.arange(1024) % 1024] * 32),
        torch.stack([(torch.arange(1024) * 7) % 1024] * 32),
    ),
    "channels last": (
        images().to(memory_format=torch.channels_last),
        images().flip(0).to(memory_format=torch.channels_last),
    ),
    "bfloat16": (torch.ones(3).bfloat16(), torch.zeros(3).bfloat16()),
    "float8": (torch.ones(3).to(torch.float8_e4m3fn), torch.zeros(3).to(torch.float8_e4m3fn)),
    "booleans": (torch.tensor([True]), torch.tensor([False])),
    "conjugated": (torch.tensor([1j]), torch.tensor([1j]).conj()),
    "numbers": ({"x": 1}, {"x": 2}),
    "keys": ({"x": 1}, {"y": 1}),
    "text": ("a", "b"),
    "bytes": (b"a", b"b"),
    "NumPy": (np.zeros(3), np.ones(3)),
    "NumPy scalars": (np.float32(1), np.float32(2)),
    "NumPy text": (np.array(["a"]), np.array(["b"])),
    "nested": ([{"x": (1, [2])}], [{"x": (1, [3])}]),
    "the last of a long list": (list(range(99)), [*range(98), 0]),
    "lengths": ([1, 2], [1, 2, 3]),
    "named tuples": (Pair(1, 2), Pair(1, 3)),
    "objects": (Sample(torch.ones(2)), Sample(torch.zeros(2))),
    "UserDict": (collections.UserDict(x=1), collections.UserDict(x=2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_it_tells_items_apart(name: str) -> None:
    one, other = PAIRS[name]
    assert fingerprint(one) == fingerprint(one)
    assert fingerprint(one) != fingerprint(other)


def test_it_is_of_the_values_not_of_their_layout() -> None:
    assert fingerprint(images()[:, :1]) == fingerprint(images()[:, :1].clone())


def test_another_process_finds_the_same() -> None:
    """Nothing in it depends on Python's hash of text, or on addresses."""
    code = (
        "import torch; from accumplug.dataloading.fingerprint import fingerprint; "
        "print(fingerprint({'a': [torch.arange(9.0), 'text', object()], 'b': {1, 2}}))"
    )
    outputs = {subprocess.check_output([sys.executable, "-c", code]) for _ in range(2)}
    assert len(outputs) == 1


def test_nothing_of_a_device_is_read() -> None:
    assert fingerprint(torch.empty(3, device="meta")) != fingerprint(torch.empty(4, device="meta"))
    sparse = torch.ones(3, 3).to_sparse()
    assert fingerprint(sparse) == fingerprint(sparse)


def test_an_item_that_holds_itself_ends() -> None:
    item: list[Any] = [1]
    item.append(item)
    assert fingerprint(item) == fingerprint(item)


def test_it_costs_microseconds_for_a_batch_of_any_size() -> None:
    batch = {"image": torch.zeros(64, 3, 224, 224), "label": torch.zeros(64, dtype=torch.long)}
    fingerprint(batch)
    took = []
    for _ in range(20):
        start = time.perf_counter()
        fingerprint(batch)
        took.append(time.perf_counter() - start)
    assert min(took) < 200e-6  # 38 MB, of which 64 values are read


def test_items_are_read_where_they_are_whatever_the_default_device() -> None:
    """As with `torch.set_default_device("cuda")` and a loader that gives host memory."""
    item = torch.arange(1000.0)
    expected = fingerprint(item)
    with torch.device("meta"):
        assert fingerprint(item) == expected
