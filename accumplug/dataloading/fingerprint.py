"""A short fingerprint of an item of data, by which a resumed stream is recognised.

It covers the structure of the item, shapes and dtypes, numbers and text, and up to `SAMPLES` values
of each tensor or array, spread over it. A tensor on a device is not read, as that would wait for
the device: only its shape and dtype count.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

SAMPLES = 64
ITEMS = 32  # of each list or dict that an item consists of
DEPTH = 6


def fingerprint(item: Any) -> int:
    """The same for equal items in any process, and another one for others, but by chance."""
    return _crc(item, 0, DEPTH)


def _crc(value: Any, crc: int, depth: int) -> int:
    if isinstance(value, Tensor):
        return zlib.crc32(_sampled(value), zlib.crc32(f"{value.dtype}{value.shape}".encode(), crc))
    if value is None or isinstance(value, (bool, int, float, complex)):
        return zlib.crc32(repr(value).encode(), crc)
    if isinstance(value, (str, bytes)):
        data = value.encode(errors="replace") if isinstance(value, str) else value
        return zlib.crc32(data[:4096], zlib.crc32(b"%d" % len(data), crc))
    crc = zlib.crc32(type(value).__name__.encode(), crc)
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.ndarray | numpy.generic):
        return _array(numpy.asarray(value), crc)
    if depth == 0:
        return crc
    if isinstance(value, Mapping):
        parts: Any = [part for pair in islice(value.items(), ITEMS) for part in pair]
    elif isinstance(value, (list, tuple)):
        parts = value if len(value) <= ITEMS else [*value[: ITEMS - 1], value[-1]]
    else:
        parts = islice(getattr(value, "__dict__", {}).items(), ITEMS)
    if hasattr(value, "__len__"):
        crc = zlib.crc32(b"%d" % len(value), crc)
    for part in parts:
        crc = _crc(part, crc, depth - 1)
    return crc


def _sampled(tensor: Tensor) -> bytes:
    """The bytes of some values that are spread over `tensor`."""
    if tensor.layout is not torch.strided or not tensor.is_cpu or not tensor.numel():
        return b""
    if type(tensor) is not Tensor:
        return b""  # a subclass decides by itself what reading means
    size, values = tensor.numel(), tensor.detach()
    if values.dtype.is_floating_point and values.element_size() == 1:
        values = values.view(torch.uint8)  # float8 can't be indexed
    # An odd step: an even one would meet the same few columns in each row.
    picked = torch.take(
        values, torch.arange(0, size, max(1, size // SAMPLES) | 1, device=values.device)
    )
    return picked.resolve_conj().resolve_neg().view(torch.uint8).numpy().tobytes()


def _array(array: Any, crc: int) -> int:
    crc = zlib.crc32(f"{array.dtype.str}{array.shape}".encode(), crc)
    if array.dtype.hasobject or not array.size:
        return crc
    return zlib.crc32(array.flat[:: max(1, -(-array.size // SAMPLES))].tobytes(), crc)
