"""The layout of a checkpoint directory, and the check whether one is whole.

    update-0000000012-micro-000000000195/
        manifest.json         written last; size and checksum of every other file
        NAME.json             one part: the tree of a state
        NAME.safetensors      its tensors, if it has any

Nothing in such a directory is trusted: a name in the manifest can't lead out of it, links and
pipes are refused, a size is believed when the file has it. Every fault is a CheckpointError that
names the file. The manifest has a checksum of itself.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accumplug.errors import CheckpointError, DamagedCheckpointError
from accumplug.storage.decode import decode
from accumplug.storage.files import check_size, opened, verify_file
from accumplug.storage.format_1 import upgrade
from accumplug.storage.json import MAX_JSON, read_json
from accumplug.storage.manifest import MANIFEST, Manifest, order_of
from accumplug.storage.safetensors_io import read_tensors


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory whose manifest has been read."""

    path: Path
    manifest: Manifest

    @property
    def parts(self) -> list[str]:
        """The names of its parts, which `read_part` takes."""
        return sorted(name[:-5] for name in self.manifest.files if name.endswith(".json"))


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads the manifest, no other file."""
    path = Path(path)
    with opened(path / MANIFEST) as file:
        size = os.fstat(file).st_size
        if size > MAX_JSON:
            raise DamagedCheckpointError(
                f"{path / MANIFEST}: {size} bytes of JSON, more than {MAX_JSON}"
            )
        data = os.pread(file, size, 0)
    return Checkpoint(path, Manifest.parse(data, path / MANIFEST))


def faults(checkpoint: Checkpoint, *, full: bool = True) -> Iterator[CheckpointError]:
    """The faults of its files, one by one: presence and size, and every byte if `full`."""
    for name, entry in checkpoint.manifest.files.items():
        path = checkpoint.path / name
        try:
            if full:
                verify_file(path, entry)
            else:
                with opened(path) as file:
                    check_size(path, file, entry)
        except CheckpointError as error:
            yield error


def verify(path: str | os.PathLike[str], *, full: bool = True) -> Checkpoint:
    """The checkpoint at `path` if it is whole; CheckpointError naming the first file that isn't.

    `full=False` looks at presence and size only. `read_part` checks every byte that it reads in
    any case.
    """
    checkpoint = open_checkpoint(path)
    for fault in faults(checkpoint, full=full):
        raise fault
    return checkpoint


def read_part(checkpoint: Checkpoint, part: str, *, mapped: bool = False) -> Any:
    """The state that was saved as `part`, every byte checked against the manifest.

    `mapped=True` is several times quicker and leaves the tensors in the file's mapping (see
    `read_tensors`): for what is copied from at once, like a model's, or lives for a window only,
    like gradients.
    """
    files = checkpoint.manifest.files
    tree_file, tensor_file = f"{part}.json", f"{part}.safetensors"
    if tree_file not in files:
        raise CheckpointError(
            f"{checkpoint.path}: has no part {part!r}, only {', '.join(checkpoint.parts)}"
        )
    path = checkpoint.path / tree_file
    tree = read_json(path, files[tree_file])
    tensors = {}
    if tensor_file in files:
        path_of_tensors = checkpoint.path / tensor_file
        tensors = read_tensors(path_of_tensors, files[tensor_file], mapped=mapped)
    return decode(tree, tensors, path, upgrade if checkpoint.manifest.format == 1 else None)


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint, if there is one, and why each newer one was passed over."""

    checkpoint: Checkpoint | None
    passed: tuple[str, ...]


def newest(
    directory: str | os.PathLike[str], *, full: bool = True, skip: Collection[str] = ()
) -> Found:
    """Looks through `directory` from the newest checkpoint back to the first that is whole.

    Only what is proven to be damaged is passed over: one that can't be read now, or that a newer
    version has written, is a CheckpointError.

    `full=False` doesn't read the files: for a caller that reads them next, and comes back with
    the name of the one that failed in `skip`.
    """
    passed: list[str] = []
    for path in reversed(list_checkpoints(directory)):
        if path.name not in skip:
            try:
                return Found(verify(path, full=full), tuple(passed))
            except DamagedCheckpointError as error:
                passed.append(str(error))
    return Found(None, tuple(passed))


def list_checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Every directory named like a checkpoint, oldest first, whole or not; links don't count."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error.strerror})") from error
    ordered = sorted((order, name) for name in names if (order := order_of(name)))
    return [Path(directory, name) for _, name in ordered]
