"""An open window beside what `accelerator.save_state` writes, and back with `load_state`.

Accelerate restores its counter and loses the gradients. Its own hooks carry both here: each
rank adds two files of its own to the directory. A directory without them still loads.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import fsdp_utils

from accumplug.errors import CheckpointError
from accumplug.loop.lifecycle import Lifecycle
from accumplug.parallel import fsdp
from accumplug.storage.codec import encode
from accumplug.storage.decode import decode
from accumplug.storage.files import FileEntry
from accumplug.storage.json import dump_json, parse_json
from accumplug.storage.safetensors_io import read_tensors, write_tensors


def register_hooks(own: Lifecycle, accelerator: Any) -> None:
    """Let `save_state` and `load_state` of `accelerator` take the open window along."""
    this = weakref.ref(own)
    number = len(accelerator._save_model_state_pre_hook)  # one file for each Accumulator

    def save(models: Any, weights: Any, directory: Any) -> None:
        if (one := this()) is not None:
            save_window(one, Path(directory), number)

    def load(models: Any, directory: Any) -> None:
        if (one := this()) is not None:
            load_window(one, Path(directory), number)

    for handle in (
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(load),
    ):
        weakref.finalize(own, handle.remove)


def _paths(own: Lifecycle, directory: Path, number: int) -> tuple[Path, Path]:
    stem = directory / f"accumplug-{number}-rank-{own.group.rank}"
    return stem.with_suffix(".json"), stem.with_suffix(".safetensors")


def _models(own: Lifecycle) -> list[Any]:
    return own.models.known() or own.host.models()


def refuse_lossy_saves() -> None:
    """Raise RuntimeError if this Accelerate saves a sharded model without its optimizer's state.

    Before 1.13 it takes `optimizer.state_dict()`, of which `load_state` restores nothing.
    """
    if "get_optimizer_state_dict" not in fsdp_utils.save_fsdp_optimizer.__code__.co_names:
        raise RuntimeError(
            f"save_state of Accelerate {accelerate.__version__} loses the optimizer's state of a "
            f"fully_shard model. Use Accelerate 1.13 or later, or accumplug's Checkpointer"
        )


def save_window(own: Lifecycle, directory: Path, number: int) -> None:
    """Write this rank's window; RuntimeError or TornWindowError where it can't be gone on from."""
    text, tensors = _paths(own, directory, number)
    models = _models(own)
    sharded = any(fsdp.roots(model) for model in models)
    if sharded:
        refuse_lossy_saves()
    if own.state.updates == 0 and sharded:
        # accelerate 1.15 asks torch for the state, which takes a step to have one
        warnings.warn(
            "before the first update Accelerate can't save a sharded model's optimizer: inside "
            "of a window its state is missing, which load_state fails on; before the window it "
            "counts a step that nobody took, in this run as well. Save later, or use Checkpointer",
            stacklevel=4,
        )
    found = [own.gradients.named(model) for model in models] if own.state.pending else []
    sums = [{name: fsdp.local(grad) for name, grad in each.items()} for each in found]
    encoded = encode({"accum": own.state_dict(), "sums": sums, "ranks": own.group.size})
    for old in (text, tensors):
        old.unlink(missing_ok=True)
    entry = write_tensors(tensors, encoded.tensors)
    text.write_bytes(dump_json({"tensors": asdict(entry), "tree": encoded.tree}))


def load_window(own: Lifecycle, directory: Path, number: int) -> None:
    """Go on from this rank's window, if one was saved; else from none."""
    text, tensors = _paths(own, directory, number)
    if not text.exists():
        own.discard()
        return
    saved = parse_json(text.read_bytes(), text)
    try:
        entry = FileEntry(**saved["tensors"])
        state = decode(saved["tree"], read_tensors(tensors, entry), text)
        ranks, window, sums = state["ranks"], state["accum"], state["sums"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{text}: not the state of a window ({error})") from error
    if ranks != own.group.size and sums:
        raise ValueError(
            f"{directory} was saved inside of a window on {ranks} ranks, and this run has "
            f"{own.group.size}; start {ranks}"
        )
    own.load_state_dict(window)
    for model, each in zip(_models(own), sums, strict=bool(sums)):
        if fsdp.roots(model):
            own.models.admit([model])
        own.gradients.restore(model, each)
