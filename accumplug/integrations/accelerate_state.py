"""An open window beside what `accelerator.save_state` writes, and back with `load_state`.

Accelerate restores its counter and loses the gradients. Its own hooks carry both here: each
rank adds two files of its own to the directory. A directory without them still loads.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import fsdp_utils

from accumplug.core.gradients import named, unwrapped_name
from accumplug.errors import CheckpointError
from accumplug.integrations.accelerate_buckets import PreparedBuckets
from accumplug.loop.lifecycle import Lifecycle
from accumplug.loop.registry import Registry
from accumplug.parallel import fsdp
from accumplug.parallel.private import require
from accumplug.storage.codec import encode
from accumplug.storage.decode import decode
from accumplug.storage.files import FileEntry
from accumplug.storage.json import dump_json, parse_json
from accumplug.storage.safetensors_io import read_tensors, write_tensors


def register_hooks(own: Lifecycle, accelerator: Any) -> None:
    """Let `save_state` and `load_state` of `accelerator` take the open window along."""
    this, buckets = weakref.ref(own), PreparedBuckets(own)
    number = next(n for n in count() if n not in _numbers(accelerator))

    def save(models: Any, weights: Any, directory: Any) -> None:
        if (one := this()) is not None:
            for stale in _unclaimed(one, Path(directory), accelerator):  # of an earlier save
                stale.unlink()
            _warn_of_first(one, accelerator)
            save_window(one, Path(directory), number, buckets)
            if one.state.pending:  # this comes back with load_state, see accelerate._refuse_late
                accelerator.step = -one.state.pending

    def load(models: Any, directory: Any) -> None:
        if (one := this()) is not None:
            load_window(one, Path(directory), number, buckets)
            for path in _unclaimed(one, Path(directory), accelerator):
                if parse_json(path.read_bytes(), path).get("pending"):
                    raise RuntimeError(
                        f"{path} holds the open window of an Accumulator that this run has not "
                        f"made; make all of them before load_state, in the order of the run that "
                        f"saved"
                    )

    save.accumplug_number = number  # type: ignore[attr-defined]

    for handle in (
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(load),
    ):
        Registry.remove_with(own, handle)


def _numbers(accelerator: Any) -> set[int]:
    """Of the Accumulators of `accelerator`: each has files of its own."""
    hooks = accelerator._save_model_state_pre_hook.values()
    return {h.accumplug_number for h in hooks if hasattr(h, "accumplug_number")}


def _unclaimed(own: Lifecycle, directory: Path, accelerator: Any) -> list[Path]:
    """Windows of this rank in `directory` that no Accumulator of `accelerator` has."""
    found = sorted(directory.glob(f"accumplug-*-rank-{own.group.rank}.json"))
    numbers = _numbers(accelerator)
    return [path for path in found if int(path.name.split("-")[1]) not in numbers]


def _paths(own: Lifecycle, directory: Path, number: int) -> tuple[Path, Path]:
    stem = directory / f"accumplug-{number}-rank-{own.group.rank}"
    return stem.with_suffix(".json"), stem.with_suffix(".safetensors")


def _sums(own: Lifecycle, model: Any) -> dict[str, Any]:
    """The part of `model` in the sum of this Accumulator, not in that of another."""
    ids = {id(p) for p in own.gradients.parameters}
    names = {name for name, p in named(model).items() if id(p) in ids}
    sums = own.gradients.named(model)
    return {n: fsdp.local(grad) for n, grad in sums.items() if n.split("#")[0] in names}


def _refuse_unprepared(own: Lifecycle, models: Sequence[Any]) -> None:
    """Raise RuntimeError for a sum in a model that `load_state` knows nothing of."""
    ids = {id(p) for model in models for p in named(model).values()}
    for model in own.gradients.models:
        for name, parameter in named(model).items():
            if parameter.grad is not None and id(parameter) not in ids:
                raise RuntimeError(
                    f"save_state inside of a window: {name} of {type(model).__name__} is in no "
                    f"model that accelerator.prepare was given, so load_state can't restore its "
                    f"gradient. Prepare it, save between windows, or use Checkpointer"
                )


def refuse_lossy_saves() -> None:
    """Raise RuntimeError if this Accelerate saves a sharded model without its optimizer's state.

    Before 1.13 it takes `optimizer.state_dict()`, of which `load_state` restores nothing.
    """
    require(fsdp_utils, ["save_fsdp_optimizer"], "the optimizer's state in a save", "accelerate")
    if "get_optimizer_state_dict" not in fsdp_utils.save_fsdp_optimizer.__code__.co_names:
        raise RuntimeError(
            f"save_state of Accelerate {accelerate.__version__} loses the optimizer's state of a "
            f"fully_shard model. Use Accelerate 1.13 or later, or accumplug's Checkpointer"
        )


def _warn_of_first(own: Lifecycle, accelerator: Any) -> None:
    if own.state.updates == 0 and any(fsdp.roots(model) for model in accelerator._models):
        # accelerate 1.15 asks torch for the state, which takes a step to have one
        warnings.warn(
            "before the first update Accelerate can't save a sharded model's optimizer: inside "
            "of a window its state is missing, which load_state fails on; before the window it "
            "counts a step that nobody took, in this run as well. Save later, or use Checkpointer",
            stacklevel=4,
        )


def save_window(own: Lifecycle, directory: Path, number: int, buckets: PreparedBuckets) -> None:
    """Write this rank's window; RuntimeError or TornWindowError where it can't be gone on from."""
    text, tensors = _paths(own, directory, number)
    models = own.host.models()
    if any(fsdp.roots(model) for model in models):
        refuse_lossy_saves()
    pending = own.state.pending
    if pending:
        _refuse_unprepared(own, models)
    found = [_sums(own, model) for model in models] if pending else []
    state = {
        "accum": own.state_dict(),
        "sums": found,
        "buffers": [_buffers(model) for model in models] if pending else [],
        "noise": None if own.noise_probe is None else own.noise_probe.state_dict(),
        "ranks": own.group.size,
        "buckets": buckets.orders(models),
    }
    encoded = encode(state)
    for old in (text, tensors):
        old.unlink(missing_ok=True)
    entry = write_tensors(tensors, encoded.tensors)
    saved = {"pending": pending, "tensors": entry.as_json(), "tree": encoded.tree}
    text.write_bytes(dump_json(saved))


def load_window(own: Lifecycle, directory: Path, number: int, buckets: PreparedBuckets) -> None:
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
    if ranks == own.group.size:
        buckets.restore(own.host.models(), state.get("buckets") or [])
    own.load_state_dict(window)
    for model, each in zip(own.host.models(), sums, strict=bool(sums)):
        if each and fsdp.roots(model):
            own.models.admit([model])
        own.gradients.restore(model, each)
    if (noise := state.get("noise")) is not None and own.noise_probe is not None:
        own.noise_probe.load_state_dict(noise)
    if buffers := state.get("buffers"):
        own.before_block.append(partial(_load_buffers, own, buffers))


def _buffers(model: Any) -> dict[str, Any]:
    """The buffers of this rank, in the state_dict or not: each forward may change them, and
    Accelerate saves those of the first rank's state_dict."""
    return {unwrapped_name(name): fsdp.local(b) for name, b in model.named_buffers()}


def _load_buffers(own: Lifecycle, saved: list[dict[str, Any]]) -> None:
    """In the first block after `load_state`, which has loaded the first rank's: this rank's."""
    own.before_block[:] = [
        f for f in own.before_block if getattr(f, "func", f) is not _load_buffers
    ]
    for model, each in zip(own.host.models(), saved, strict=True) if own.state.pending else ():
        for name, buffer in _buffers(model).items():
            if name in each and each[name].shape == buffer.shape:
                buffer.copy_(each[name])
