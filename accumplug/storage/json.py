"""JSON that is only JSON: no NaN, no key twice, no size or nesting that takes the program down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accumplug.errors import CheckpointError
from accumplug.storage.files import FileEntry, read_file

MAX_JSON = 100_000_000  # bytes; also the limit that safetensors sets for its header


def dump_json(value: Any, indent: int | None = None) -> bytes:
    """Strict JSON in ASCII; ValueError for NaN and infinity, TypeError for what is not JSON."""
    return json.dumps(value, allow_nan=False, indent=indent).encode() + b"\n"


def parse_json(data: bytes, path: Path) -> Any:
    """The value of strict JSON: no NaN, no key twice, no nesting that overruns the stack."""
    try:
        return json.loads(
            data.decode(), object_pairs_hook=_object_without_repeats, parse_constant=_not_json
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _not_json(literal: str) -> Any:
    raise ValueError(f"{literal} is not JSON")


def read_json(path: Path, entry: FileEntry) -> Any:
    """The value in a file, every byte of it checked."""
    if entry.size > MAX_JSON:
        raise CheckpointError(f"{path}: {entry.size} bytes of JSON, more than {MAX_JSON}")
    return parse_json(bytes(read_file(path, entry)), path)
