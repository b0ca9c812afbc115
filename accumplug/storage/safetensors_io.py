"""Tensors in a safetensors file: the public format, one pass to write and one to read.

The files are those of the safetensors library (which the tests hold them against). It is not
used here because each of its calls would need a second pass over the bytes for the checksum,
and because what it loads stays mapped: optimizer state would go on living in a file that a later
save removes, and a file cut short under a running program kills it with SIGBUS.

Format: https://huggingface.co/docs/safetensors#format
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from accumplug.errors import CheckpointError
from accumplug.storage.files import (
    BLOCK,
    THREADS,
    FileEntry,
    Source,
    checksum,
    read_file,
    write_file,
)
from accumplug.storage.json import MAX_JSON, dump_json, parse_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGN = 64  # bytes: where torch's own CPU tensors start; the last bits of a GEMM may hang on it
METADATA = "__metadata__"  # the one name that the format keeps for itself


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    sources: Mapping[int, Source] = MappingProxyType({}),
) -> FileEntry:
    """Writes `tensors` (any device, any strides, dtypes of `DTYPES`) to the new file `path`.

    `sources` give the bytes of tensors, by id, when it is their turn.
    """
    # Whole multiples of ALIGN bytes first, so that all of these start at one; then wide dtypes.
    sizes = {n: t.numel() * t.dtype.itemsize for n, t in tensors.items()}
    keys = [(sizes[n] % ALIGN != 0, -t.dtype.itemsize) for n, t in tensors.items()]
    ordered = [
        item for _, _, item in sorted(zip(keys, range(len(keys)), tensors.items(), strict=True))
    ]
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + sizes[name]
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = dump_json(header).strip()
    text += b" " * (-(8 + len(text)) % ALIGN)
    if len(text) > MAX_JSON:
        raise ValueError(f"{path.name}: a header of {len(text)} bytes, more than {MAX_JSON}")

    def pieces() -> Iterator[Source | memoryview]:
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            source = sources.get(id(tensor))
            yield raw(tensor.detach().cpu().contiguous()) if source is None else source

    return write_file(path, pieces())


def raw(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, not copied."""
    # as_strided, because a single element counts as contiguous whatever its stride is.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def digest(tensor: torch.Tensor) -> str:
    """8 hex digits for the values of a tensor, from the checksums of its blocks."""
    memory = raw(tensor.detach().cpu().contiguous())
    sums = [checksum(memory[at : at + BLOCK]) for at in range(0, len(memory), BLOCK)]
    return f"{zlib.crc32(''.join(sums).encode()):08x}"


def read_tensors(path: Path, entry: FileEntry, *, mapped: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a file, each in memory of its own, every byte checked before it is used.

    `mapped=True` leaves them in a private mapping of the file, which is not copied: several times
    quicker. A page is copied when it is first written to. The disk keeps the file, even if
    removed, while one of the tensors lives, so it suits tensors that don't live long.
    """
    memory = read_file(path, entry, mapped=True)
    size = int.from_bytes(memory[:8], "little")
    if not 2 <= size <= min(MAX_JSON, entry.size - 8):
        raise CheckpointError(
            f"{path}: not a safetensors file: its header claims {size} bytes, "
            f"the file has {entry.size}"
        )
    header = parse_json(bytes(memory[8 : 8 + size]), path)
    layout, start = _layout(header, entry.size - 8 - size, path), 8 + size
    tensors: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in layout.items():
        if count := math.prod(shape):
            tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
            tensors[name] = tensor.view(shape)
            start += count * dtype.itemsize
        else:
            tensors[name] = _empty(path, name, dtype, shape)
    views = [n for n, t in tensors.items() if t.numel() and not (mapped and _is_aligned(t))]
    with ThreadPoolExecutor(THREADS) as pool:
        tensors |= zip(views, pool.map(_copy, (tensors[name] for name in views)), strict=True)
    return tensors


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % ALIGN == 0


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return fill(torch.empty_like(tensor), tensor)


def fill(room: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`room` with the values of `tensor`, both dense CPU tensors of one layout.

    As `copy_`, whose threads wait for each other by burning the CPU while others need it.
    """
    np.copyto(np.frombuffer(raw(room), np.uint8), np.frombuffer(raw(tensor), np.uint8))
    return room


def _empty(path: Path, name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device="cpu")
    except (RuntimeError, TypeError) as error:  # no such shape, or no memory for it
        raise CheckpointError(f"{path}: tensor {name!r} of shape {shape}: {error}") from error


def _layout(header: Any, size: int, path: Path) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Dtype and shape of each tensor, in the order of the file, which they must fill exactly."""
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: not a safetensors file: its header is no JSON object")
    spans = []
    for name, item in header.items():
        if name == METADATA:
            continue
        dtype, shape, start, end = _item(item, name, path)
        if end - start != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(
                f"{path}: tensor {name!r} has {end - start} bytes for shape {shape} of {dtype}"
            )
        spans.append((start, end, name, dtype, shape))
    spans.sort(key=lambda span: span[:2])
    filled = 0
    for start, end, name, _, _ in spans:
        if start != filled:
            raise CheckpointError(f"{path}: tensor {name!r} starts at {start}, not at {filled}")
        filled = end
    if filled != size:
        raise CheckpointError(f"{path}: its tensors fill {filled} of {size} bytes")
    return {name: (dtype, shape) for _, _, name, dtype, shape in spans}


def _item(item: Any, name: str, path: Path) -> tuple[torch.dtype, list[int], int, int]:
    try:
        dtype, shape, (start, end) = item["dtype"], item["shape"], item["data_offsets"]
        known = DTYPES[dtype]
        numbers = [*shape, start, end]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name!r} is described as {item!r:.200}") from error
    if not isinstance(shape, list) or not all(
        type(number) is int and 0 <= number < 2**63 for number in numbers
    ):
        raise CheckpointError(f"{path}: tensor {name!r} is described as {item!r:.200}")
    return known, shape, start, end
