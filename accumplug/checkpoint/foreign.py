"""Starts a run from what `torch.save` or Accelerate's `save_state` has written.

Only tensors and plain values are read (weights_only=True). Such a file knows no open window and no
place in the data, so the run begins its first pass with what it has learned so far.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accumplug.checkpoint import optimizer_state
from accumplug.checkpoint.division import BASE
from accumplug.checkpoint.model_state import unwrap_model
from accumplug.checkpoint.train_state import State, TrainState
from accumplug.storage.files import BLOCK, FileEntry, checksum
from accumplug.storage.safetensors_io import read_tensors

KEYS = {
    "model": ("model", "model_state_dict", "state_dict", "model_state"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optimizer_state"),
    "scheduler": ("scheduler", "scheduler_state_dict", "lr_scheduler", "lr_scheduler_state_dict"),
    "scaler": ("scaler", "scaler_state_dict", "grad_scaler"),
}
"""Under which keys a dict may have the states; those of several objects are in a list."""


def read(path: Path) -> State:
    """The states in the file or directory `path`, by the keys of `KEYS` or their own.

    Raises:
        ValueError: it is neither a dict that torch.load reads nor a directory of save_state.
    """
    if path.is_dir():
        return _read_directory(path)
    found = _load(path)
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} has a {type(found).__name__}; start_from= takes a dict")
    names = {key: name for name, keys in KEYS.items() for key in keys}
    states: dict[Any, Any] = {}
    for key, value in found.items():
        states.setdefault(names.get(key, key), value)
    return states


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} has more than tensors and plain values, and is not opened as that can run "
            f"code; save the state_dicts alone ({f'{error}'.strip():.300})"
        ) from error


def _read_directory(path: Path) -> State:
    """The files of `save_state`: NAME.bin, NAME_1.bin, ... of each kind of object."""
    if pending := [file.name for file in path.glob("accumplug-*-rank-*.json") if _is_open(file)]:
        raise ValueError(
            f"{path} was saved inside of a window ({pending[0]}), which accelerator.load_state "
            f"continues; call that instead of start_from="
        )
    states: State = {
        "model": _numbered(path, "model", ".safetensors") or _numbered(path, "pytorch_model"),
        "optimizer": _numbered(path, "optimizer"),
        "scheduler": _numbered(path, "scheduler"),
    }
    if (path / "scaler.pt").exists():
        states["scaler"] = _load(path / "scaler.pt")
    if not states["model"]:
        seen = ", ".join(sorted(file.name for file in path.iterdir())[:12])
        raise ValueError(
            f"{path} is no directory of save_state that can be read: it has {seen or 'no file'}, "
            f"and no model.safetensors or pytorch_model.bin"
        )
    return {name: state for name, state in states.items() if state}


def _is_open(file: Path) -> bool:
    return bool(json.loads(file.read_bytes()).get("pending"))


def _numbered(path: Path, name: str, suffix: str = ".bin") -> list[Any]:
    states: list[Any] = []
    while True:
        file = path / f"{name}{f'_{len(states)}' if states else ''}{suffix}"
        index = file.with_name(f"{file.name}.index.json")
        if index.exists():
            files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            states.append({k: v for one in files for k, v in _weights(path / one).items()})
        elif file.exists():
            states.append(_weights(file))
        else:
            return states


def _weights(file: Path) -> Any:
    if file.suffix != ".safetensors":
        return _load(file)
    data = memoryview(file.read_bytes())
    sums = [checksum(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    return read_tensors(file, FileEntry(len(data), "".join(sums)))


def load(path: Path, states: State, train_state: TrainState) -> None:
    """Load what `read` gave.

    Raises:
        ValueError: a state is missing, or of other objects than these.
    """
    if train_state.is_sharded:
        raise ValueError(
            f"start_from={str(path)!r}: the model is sharded (fully_shard), and the states "
            f"there are whole; load them before fully_shard, and let the Checkpointer save the run"
        )
    named = train_state.stateful
    models = _each(path, states, "model", train_state.models)
    optimizers = _each(path, states, "optimizer", train_state.optimizers)
    for name, thing in named.items():
        if hasattr(thing, "param_groups") and name not in states:
            raise ValueError(_missing(path, name, states))
    schedulers = _optional(path, states, "scheduler", train_state.schedulers)
    scalers = [] if train_state.scaler is None else [train_state.scaler]
    weights = [_named_as(own, s) for own, s in zip(train_state.models, models, strict=True)]
    groups = [{k: v for k, v in state.items() if k != "state"} for state in optimizers]
    moments = [state["state"] for state in optimizers]
    train_state.load(
        {
            "model": [weights if len(weights) > 1 else weights[0]],
            "optimizer": [moments if len(moments) != 1 else moments[0]],
            "progress": {
                "optimizers": groups,
                "schedulers": schedulers,
                "scaler": next(iter(_optional(path, states, "scaler", scalers)), None),
            },
            BASE: [_tied(own, s) for own, s in zip(train_state.models, weights, strict=True)],
        }
    )
    for name, thing in named.items():
        if name not in states:
            warnings.warn(f"{path} has no {name}, which begins anew", stacklevel=4)
        elif isinstance(thing, torch.optim.Optimizer):
            (state,) = _each(path, states, name, [thing])
            own = {k: v for k, v in state.items() if k != "state"}
            optimizer_state.load(thing, own, [state["state"]])
        else:
            (state,) = _listed(states[name])
            thing.load_state_dict(state)


def _each(path: Path, states: State, name: str, things: Sequence[Any]) -> list[Any]:
    """The state of each of `things`, which has to be there."""
    if not things:
        return []
    if name not in states:
        raise ValueError(_missing(path, name, states))
    found = _listed(states[name])
    if len(found) != len(things):
        raise ValueError(f"{path} has {len(found)} states of {name}, this run has {len(things)}")
    for state in found:
        whole = not hasattr(things[0], "param_groups") or {"state", "param_groups"} <= set(state)
        if not isinstance(state, Mapping) or not whole:
            raise ValueError(f"{path}: {name} is {state!r:.100}, and no state_dict of one")
    return found


def _optional(path: Path, states: State, name: str, things: Sequence[Any]) -> list[Any]:
    """The state of each of `things`; its own, with a warning, if none is there."""
    if things and name not in states:
        warnings.warn(f"{path} has no {name}, which begins anew", stacklevel=5)
        return [thing.state_dict() for thing in things]
    return _each(path, states, name, things)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _missing(path: Path, name: str, states: Iterable[str]) -> str:
    keys = ", ".join(map(repr, KEYS.get(name, (name,))))
    seen = ", ".join(repr(f"{key}")[:40] for key in list(states)[:12])
    return f"{path} has no state of the {name}: it has {seen or 'nothing'}; wanted is one of {keys}"


def _named_as(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` without what DistributedDataParallel and torch.compile put before a name."""
    own = unwrap_model(model).state_dict()
    result = {}
    for name, value in state.items():
        short = name.replace("_orig_mod.", "")
        if name not in own and short not in own:
            short = short.removeprefix("module.")
        result[name if name in own else short] = value
    return result


def _tied(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Names that `state` lacks, as their tensor is there under another one (safetensors)."""
    own = unwrap_model(model).state_dict()
    places = {own[n].data_ptr() for n in state if isinstance(own.get(n), Tensor)} - {0}
    return {
        name: None
        for name, value in own.items()
        if name not in state and isinstance(value, Tensor) and value.data_ptr() in places
    }
