"""The name of a checkpoint and its manifest: position, ranks, size and checksum of each file."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accumplug._version import __version__
from accumplug.errors import CheckpointError, DamagedCheckpointError
from accumplug.storage.files import BLOCK, FileEntry
from accumplug.storage.json import dump_json, parse_json

FORMAT = 3
MANIFEST = "manifest.json"
PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", re.ASCII)
FILE = re.compile(PART.pattern + r"\.(json|safetensors)", re.ASCII)
NAME = re.compile(r"update-(\d{10,18})-micro-(\d{12,18})(?:-(\d{1,6}))?", re.ASCII)


def name_of(update: int, micro_batch: int, attempt: int = 0) -> str:
    """The directory's name; names sort like positions.

    `micro_batch` counts over the whole run: within one update it never falls, even where a
    window was skipped. `attempt` tells apart saves of one position.
    """
    name = f"update-{update:010d}-micro-{micro_batch:012d}"
    return f"{name}-{attempt}" if attempt else name


def order_of(name: str) -> tuple[int, int, int] | None:
    """Update, micro-batch and attempt of a directory's name; None if it is no such name."""
    match = NAME.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


@dataclass(frozen=True)
class Manifest:
    """What stands in manifest.json.

    `position` is any JSON object with the integers `update` and `micro_batch`; `version` is that
    of the product that wrote it; `files` are by name.
    """

    position: dict[str, Any]
    world_size: int
    files: dict[str, FileEntry]
    version: str = __version__
    format: int = FORMAT
    """Which parts there are, and how they are encoded. Older ones are read, and never written:
    format 1 has other values (format_1.py), format 2 has no weights in a part of their own."""

    def __post_init__(self) -> None:
        if type(self.version) is not str:
            raise ValueError(f"accumplug is {self.version!r:.40}")
        if not _is_count(self.world_size) or self.world_size == 0:
            raise ValueError(f"world_size is {self.world_size!r:.40}")
        check_position(self.position)
        for name, entry in self.files.items():
            _check_file(name, entry)
        if self.world_size > max(1, len(self.files)):  # each rank has written one at least
            raise ValueError(f"world_size is {self.world_size}, with {len(self.files)} files")
        if len({name.casefold() for name in self.files}) != len(self.files):
            raise ValueError("two files differ only in upper and lower case")

    def dump(self) -> bytes:
        body = {
            "format": self.format,
            "accumplug": self.version,
            "world_size": self.world_size,
            "position": self.position,
            "files": {name: entry.as_json() for name, entry in sorted(self.files.items())},
        }
        return dump_json(body | {"crc32": f"{zlib.crc32(dump_json(body)):08x}"}, indent=1)

    @staticmethod
    def parse(data: bytes, path: Path) -> Manifest:
        """The manifest in `data`.

        Raises:
            DamagedCheckpointError: no version of accumplug has written it so.
            CheckpointError: a newer version has.
        """
        try:
            body = parse_json(data, path)
        except CheckpointError as error:
            raise DamagedCheckpointError(str(error)) from error
        if not isinstance(body, dict) or not _is_count(body.get("format")) or not body["format"]:
            raise DamagedCheckpointError(f"{path}: not the manifest of a checkpoint")
        if body["format"] > FORMAT:
            raise CheckpointError(
                f"{path}: format {body['format']} of accumplug {body.get('accumplug')!r:.40}; "
                f"this is {__version__}, which reads up to {FORMAT}: install a newer one"
            )
        try:
            files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
            position, version = body["position"], body["accumplug"]
            manifest = Manifest(position, body["world_size"], files, version, body["format"])
            same = manifest.dump() == data
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"{path}: malformed ({error!r:.400})") from error
        if not same:
            raise DamagedCheckpointError(f"{path}: damaged (checksum differs)")
        return manifest


def _check_file(name: str, entry: FileEntry) -> None:
    if not FILE.fullmatch(name) or name.casefold() == MANIFEST:
        raise ValueError(f"{name!r:.200} can't be a file of a checkpoint")
    if type(entry.linked) is not bool:
        raise ValueError(f"{name} is linked: {entry.linked!r:.40}")
    blocks = -(-entry.size // BLOCK) if _is_count(entry.size) else -1
    if type(entry.sums) is not str or len(entry.sums) != 8 * blocks:
        raise ValueError(f"{name} has size {entry.size!r:.40}, sums {entry.sums!r:.40}")


def check_position(position: Any) -> None:
    """ValueError unless it is a dict with the integers `update` and `micro_batch`."""
    if type(position) is not dict or not all(
        _is_count(position.get(key)) for key in ("update", "micro_batch")
    ):
        raise ValueError(f"position is {position!r:.200}, without update and micro_batch")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 10**18
