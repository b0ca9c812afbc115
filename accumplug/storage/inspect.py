"""Describes a directory of checkpoints for people: position, ranks, files, and their faults.

python -c "from accumplug.storage.inspect import describe; print(describe('runs/a'))"
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from accumplug.errors import CheckpointError
from accumplug.storage.files import FileEntry
from accumplug.storage.layout import Checkpoint, faults, list_checkpoints, open_checkpoint
from accumplug.storage.manifest import MANIFEST, order_of
from accumplug.storage.retention import REMOVING, WRITING


def inspect_command(path: str | os.PathLike[str], verify: bool = False) -> tuple[str, int]:
    """The text for `path` and an exit code: 0 no fault found, 1 damaged, 2 no checkpoint.

    `path` is one checkpoint or a directory of several. `verify` reads every byte; otherwise only
    the files' presence and sizes are checked.
    """
    path = Path(path)
    if (order_of(path.name) or os.path.lexists(path / MANIFEST)) and path.is_dir():
        text, good = _report(path, verify)
        return text, 0 if good else 1
    try:
        found = list_checkpoints(path)
    except CheckpointError as error:
        return str(error), 2
    if not found:
        return f"{path}: no checkpoint here, nor a directory of checkpoints", 2
    reports = [_report(checkpoint, verify) for checkpoint in found]
    newest = next(
        (at.name for at, (_, good) in zip(found[::-1], reports[::-1], strict=True) if good), None
    )
    texts = [text for text, _ in reports]
    texts += [f"{name}: unfinished, the next run here removes it" for name in _unfinished(path)]
    texts.append(f"newest {'whole' if verify else 'whose sizes agree'}: {newest}")
    return "\n\n".join(texts), 0 if all(good for _, good in reports) else 1


def describe(path: str | os.PathLike[str], verify: bool = False) -> str:
    """The text of `inspect_command`."""
    return inspect_command(path, verify)[0]


def _unfinished(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.startswith((WRITING, REMOVING)))


def _report(path: Path, verify: bool) -> tuple[str, bool]:
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        return f"{path}\n  DAMAGED\n    {error}", False
    wrong = list(faults(checkpoint, full=verify))
    lines = [str(path), *(f"  {key:<12} {value}" for key, value in _facts(checkpoint))]
    lines += _files(checkpoint)
    if wrong:
        lines += ["  DAMAGED", *(f"    {fault}" for fault in wrong)]
    elif verify:
        lines.append("  whole (every byte checked)")
    else:
        lines.append("  sizes agree (--verify checks every byte)")
    return "\n".join(lines), not wrong


def _facts(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    manifest = checkpoint.manifest
    position = dict(manifest.position)
    facts = [(key, _plain(position.pop(key))) for key in ("update", "micro_batch")]
    if {"pending", "steps"} <= position.keys():
        pending, steps = _plain(position.pop("pending")), _plain(position.pop("steps"))
        inside = f"{pending} of {steps} micro-batches"
        facts.append(("window", "none is open" if pending == "0" else inside))
    facts += [(_plain(key), _plain(value)) for key, value in position.items()]
    facts.append(("ranks", f"{manifest.world_size}"))
    facts.append(("written by", f"accumplug {_plain(manifest.version)}, format {manifest.format}"))
    return facts


def _plain(value: Any) -> str:
    """JSON in one line of ASCII: text of a stranger can't control the terminal."""
    text = json.dumps(value)[1:-1] if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _files(checkpoint: Checkpoint) -> list[str]:
    entries, told = checkpoint.manifest.files, checkpoint.manifest.format >= 3
    width = max((len(name) for name in entries), default=0)
    lines = [f"  {'files':<12} {_count(entries.values())}"]
    if told:
        linked = [entry for entry in entries.values() if entry.linked]
        written = [entry for entry in entries.values() if not entry.linked]
        lines.append(f"  {'written':<12} {_count(written)}")
        lines.append(f"  {'linked':<12} {_count(linked)}, as they were in an earlier checkpoint")
    return lines + [
        f"    {name:<{width}}  {_size(entry.size):>9}{'  linked' if entry.linked else ''}"
        for name, entry in entries.items()
    ]


def _count(entries: Collection[FileEntry]) -> str:
    return f"{len(entries)}, {_size(sum(entry.size for entry in entries))}"


def _size(size: int) -> str:
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if size >= 10**power:
            return f"{size / 10**power:.1f} {unit}"
    return f"{size} B"
