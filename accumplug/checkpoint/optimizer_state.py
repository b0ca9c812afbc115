"""An optimizer's state, as it was saved: any nesting, every value, every dtype."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from accumplug.checkpoint import dtensor_shards
from accumplug.checkpoint.model_state import Fingerprint
from accumplug.checkpoint.model_state import fingerprint as fingerprint_of


def refuse_unsavable(optimizer: Optimizer) -> None:
    """Raise ValueError for a type of optimizer whose state can't be saved, before it trains."""
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise ValueError(
            "ZeroRedundancyOptimizer keeps a part of the state on each rank and gives the whole "
            "only after consolidate_state_dict(), so a checkpoint can't hold it; use fully_shard "
            "(FSDP2), whose optimizer state is saved in shards"
        )


def fingerprint(states: Iterable[Any]) -> Fingerprint:
    """Of everything that optimizers keep of their parameters."""
    found: list[Any] = []
    stack: list[Any] = list(states)
    while stack:
        value = stack.pop()
        if type(value) is Tensor:
            found += value.data_ptr(), value._version
        elif isinstance(value, Tensor):
            found.append(fingerprint_of(value))
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
        else:
            found.append(value if isinstance(value, int | float | str | None) else id(value))
    return tuple(found)


def load(optimizer: Optimizer, groups: dict[str, Any], states: Sequence[Any]) -> None:
    """Load the parameter groups, and the states that one rank, or all of them, have saved.

    torch's own load_state_dict (read from 2.13) converts each tensor to its parameter's dtype and
    rebuilds each iterable, strings too. Where it is torch's, it is given the groups alone.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [{k: v for k, v in g.items() if isinstance(v, Tensor)} for g in optimizer.param_groups]
    assembled = dtensor_shards.assemble(states, dict(enumerate(parameters)))
    state = {k: _owned(v, optimizer.state.get(_key(parameters, k))) for k, v in assembled.items()}
    if _is_torchs(optimizer):
        optimizer.load_state_dict({**groups, "state": {}})
        counts = [_counts_on_device(g) for g in optimizer.param_groups for _ in g["params"]]
        for index, parameter in enumerate(parameters):
            if index in state:
                state[index] = _on(state[index], parameter, counts[index])
        for key, value in state.items():
            optimizer.state[_key(parameters, key)] = value
    else:
        optimizer.load_state_dict({**groups, "state": state})
        for key, value in state.items():
            own = _key(parameters, key)
            optimizer.state[own] = _with_dtypes(value, optimizer.state[own])
    for group, tensors in zip(optimizer.param_groups, before, strict=True):
        for name, own in tensors.items():  # a learning rate that is a tensor stays the same one
            if isinstance(saved := group[name], Tensor) and saved.dtype == own.dtype:
                group[name] = own.copy_(saved)


def _key(parameters: Sequence[nn.Parameter], key: Any) -> Any:
    """The key in `optimizer.state`: a parameter for its number, any other key as it is."""
    known = isinstance(key, int) and key < len(parameters)
    return parameters[key] if known else key


def _is_torchs(optimizer: Optimizer) -> bool:
    """Whether nobody but torch has a hand in loading."""
    own = type(optimizer).load_state_dict
    hooks = [*optimizer._optimizer_load_state_dict_pre_hooks]
    hooks += optimizer._optimizer_load_state_dict_post_hooks
    return own is Optimizer.load_state_dict and not hooks


def _owned(saved: Any, before: Any) -> Any:
    """`saved`, which may be mapped from a file, in memory of its own: that of `before` if it fits.

    Memory that is reused costs no page faults, which is most of the time of a resume.
    """
    if type(saved) is Tensor:
        layout = (saved.dtype, saved.shape, saved.stride())
        fits = type(before) is Tensor and (before.dtype, before.shape, before.stride()) == layout
        return before.copy_(saved) if fits else saved.clone()
    if isinstance(saved, dict):
        own = before if isinstance(before, dict) else {}
        return {key: _owned(value, own.get(key)) for key, value in saved.items()}
    if type(saved) in (list, tuple):
        same = isinstance(before, list | tuple) and len(before) == len(saved)
        return type(saved)(
            _owned(value, before[i] if same else None) for i, value in enumerate(saved)
        )
    return saved


def _counts_on_device(group: dict[str, Any]) -> bool:
    """Whether a "step" is beside its parameter (torch 2.13); else it is on the CPU."""
    return bool(group.get("capturable") or group.get("fused"))


def _on(value: Any, parameter: nn.Parameter, steps: bool, key: Any = None) -> Any:
    """`value` with its tensors where torch puts them: beside the parameter.

    A "step" stays on the CPU, unless `steps`: the optimizer counts on the device.
    """
    if isinstance(value, Tensor):
        return value if key == "step" and not steps else value.to(parameter.device)
    if isinstance(value, dict):
        return {k: _on(item, parameter, steps, k) for k, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on(item, parameter, steps) for item in value)
    return value


def _with_dtypes(saved: Any, loaded: Any) -> Any:
    """`loaded`, with each tensor that a load has converted in the dtype of `saved` again."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key in saved.keys() & loaded.keys():
            loaded[key] = _with_dtypes(saved[key], loaded[key])
    elif type(saved) is type(loaded) and type(saved) in (list, tuple) and len(saved) == len(loaded):
        return type(saved)(map(_with_dtypes, saved, loaded))
    return loaded
