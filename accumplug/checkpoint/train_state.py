"""What a checkpoint is of: models, optimizers, schedulers, scaler, and whatever has a state."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accumplug.accumulator import Accumulator
from accumplug.checkpoint import dtensor_shards
from accumplug.core.options import inner
from accumplug.parallel import fsdp
from accumplug.parallel.ddp import bucket_order, ddp_modules, settle_buckets

State = dict[str, Any]
Fingerprint = tuple[Any, ...]
"""Equal stamps: the tensors are the same ones, and nobody has written into them since."""


def unwrap_model(model: nn.Module) -> nn.Module:
    """`model` without DistributedDataParallel and torch.compile around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


class TrainState:
    """The objects of one training run, and their states on one rank.

    Models are referred to weakly: DistributedDataParallel must not outlive its process group.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        scaler: Any,
        stateful: Mapping[str, Any],
    ) -> None:
        self._models = [weakref.ref(model) for model in models]
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.scaler = scaler
        self.stateful = stateful
        self._buckets: list[list[str] | None] | None = None

    @property
    def models(self) -> list[nn.Module]:
        """The models as they were given, wrapped or not."""
        models = [reference() for reference in self._models]
        if any(model is None for model in models):
            raise RuntimeError("a model of the Checkpointer is gone; close() it before the model")
        return [model for model in models if model is not None]

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of the weights and moments of its own."""
        return any(fsdp.roots(model) for model in self.models)

    def weights(self) -> list[State]:
        """The models' state_dicts."""
        return [dtensor_shards.pack(unwrap_model(model).state_dict()) for model in self.models]

    def weights_fingerprint(self) -> Fingerprint:
        """Of the parameters. Buffers may change inside of a window, parameters don't."""
        found = [fsdp.named_parameters(unwrap_model(model)) for model in self.models]
        return tuple(_fingerprint(fsdp.local(p)) for each in found for p in each.values())

    def load_weights(self, states: Sequence[State]) -> None:
        """Load what `weights` gave."""
        for model, state in zip(self.models, states, strict=True):
            inner = unwrap_model(model)
            unpacked = dtensor_shards.unpack(state, inner.state_dict())
            _check_dtypes(inner, unpacked)
            inner.load_state_dict(unpacked)

    def buffers(self) -> list[dict[str, Tensor]]:
        """The buffers that belong to the models' state_dicts."""
        return [_buffers(unwrap_model(model)) for model in self.models]

    def load_buffers(self, states: Sequence[dict[str, Tensor]]) -> None:
        """Load what `buffers` gave."""
        with torch.no_grad():
            for model, state in zip(self.models, states, strict=True):
                buffers = _buffers(unwrap_model(model))
                for name, value in state.items():
                    buffers[name].copy_(value)

    def ddp_states(self, reduced: bool) -> list[State]:
        """What the DistributedDataParallel modules have found out, and have still to do.

        `reduced`: they have reduced a gradient, and so have their final buckets.
        """
        ddps = self._ddp_modules()
        if reduced and self._buckets is None:
            self._buckets = [bucket_order(ddp) for ddp in ddps]
        orders: Sequence[list[str] | None] = self._buckets or [None] * len(ddps)
        return [
            {"awaits_buffers": ddp.require_forward_param_sync, "buckets": order}
            for ddp, order in zip(ddps, orders, strict=True)
        ]

    def restore_buckets(self, states: Sequence[State]) -> None:
        """Before gradients are loaded: the buckets that `ddp_states` gave. All ranks are here."""
        self._buckets = None
        for ddp, state in zip(self._ddp_modules(), states, strict=False):
            if state["buckets"] is not None:
                settle_buckets(ddp, state["buckets"])

    def load_ddp_states(self, states: Sequence[State]) -> None:
        """The rest of what `ddp_states` gave."""
        for ddp, state in zip(self._ddp_modules(), states, strict=False):
            ddp.require_forward_param_sync = state["awaits_buffers"]

    def _ddp_modules(self) -> list[DistributedDataParallel]:
        return [ddp for model in self.models for ddp in ddp_modules(model)]

    def optimizer_states(self) -> list[Any]:
        """What the optimizers keep of each parameter."""
        return [
            dtensor_shards.pack(optimizer.state_dict()["state"]) for optimizer in self.optimizers
        ]

    def optimizer_fingerprint(self) -> Fingerprint:
        """Of the tensors in `optimizer_states`."""
        return tuple(
            (_fingerprint(fsdp.local(value)) if isinstance(value, Tensor) else value)
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            if isinstance(state, dict)
            for value in state.values()
        )

    def progress(self) -> State:
        """The small rest: parameter groups, schedulers, scaler."""
        groups = [
            {key: value for key, value in optimizer.state_dict().items() if key != "state"}
            for optimizer in self.optimizers
        ]
        return {
            "kinds": self._kinds(),
            "optimizers": groups,
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def _kinds(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self.optimizers]

    def check(self, progress: State, others: State) -> None:
        """Raise ValueError if these are of other objects, before anything is loaded."""
        for name, here, there in (
            ("optimizers", self._kinds(), progress["kinds"]),
            ("schedulers", len(self.schedulers), len(progress["schedulers"])),
            ("scaler", self.scaler is not None, progress["scaler"] is not None),
            ("objects by name", sorted(self.stateful), sorted(others)),
        ):
            if here != there:
                raise ValueError(
                    f"the checkpoint has {name}: {there}, this run has {here}; give the same ones"
                )

    def load_progress(self, progress: State, states: Sequence[Any]) -> None:
        """Load what `progress` and `optimizer_states` gave."""
        for optimizer, groups, state in zip(
            self.optimizers, progress["optimizers"], states, strict=True
        ):
            _load_optimizer(optimizer, groups, state)
        for scheduler, state in zip(self.schedulers, progress["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(progress["scaler"])

    def load(self, model: Any, optimizer: Any, progress: State) -> None:
        """Load the parts of these names."""
        self.load_weights(_several(model, len(self._models)))
        self.load_progress(progress, _several(optimizer, len(self.optimizers)))

    def object_states(self) -> State:
        """The states of the objects that were given by name."""
        return {
            name: dtensor_shards.pack(thing.state_dict()) for name, thing in self.stateful.items()
        }

    def load_objects(self, states: State) -> None:
        """Load what `object_states` gave."""
        for name, thing in self.stateful.items():
            state = dtensor_shards.join([states[name]])
            if dtensor_shards.are_in(state):
                state = dtensor_shards.unpack(state, thing.state_dict())
            thing.load_state_dict(state)


def _fingerprint(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    kept = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _check_dtypes(model: nn.Module, state: Mapping[str, Any]) -> None:
    """load_state_dict converts without a word; a run would not go on from where it was."""
    for name, value in model.state_dict().items():
        saved = state.get(name)
        if isinstance(saved, Tensor) and isinstance(value, Tensor) and saved.dtype != value.dtype:
            raise ValueError(f"{name} is {value.dtype} here and {saved.dtype} in the checkpoint")


def _load_optimizer(optimizer: Optimizer, groups: State, state: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = dtensor_shards.unpack(state, dict(enumerate(parameters)))
    state = {
        index: _owned(moments, _state_of(optimizer, parameters, index))
        for index, moments in state.items()
    }
    optimizer.load_state_dict({**groups, "state": state})
    # torch 2.13, Optimizer._process_value_according_to_param_policy: moments are converted to
    # the parameter's dtype, which loses those in fp32 of a parameter in bf16.
    for index, parameter in enumerate(parameters):
        for key, saved in state.get(index, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(saved, Tensor) and loaded is not None and loaded.dtype != saved.dtype:
                optimizer.state[parameter][key] = saved.to(loaded.device)


def _state_of(optimizer: Optimizer, parameters: Sequence[nn.Parameter], index: Any) -> Any:
    """What `optimizer` has of a parameter so far."""
    known = isinstance(index, int) and index < len(parameters)
    return optimizer.state.get(parameters[index], {}) if known else {}


def _owned(moments: Any, before: Any) -> Any:
    """`moments`, which may be mapped from a file, in memory of their own: that of `before`."""
    if not isinstance(moments, dict):
        return moments
    return {key: _own(value, before.get(key)) for key, value in moments.items()}


def _own(value: Any, before: Any) -> Any:
    if type(value) is not Tensor:
        return value
    if type(before) is Tensor and (before.dtype, before.shape, before.stride()) == (
        value.dtype,
        value.shape,
        value.stride(),
    ):
        return before.copy_(value)
    return value.clone()


def find_train_state(accum: Accumulator, model: Any, stateful: dict[str, Any]) -> TrainState:
    """What is to be saved, complete, or ValueError."""
    loop = accum._loop
    if model is None and loop is not None:
        model = loop.models()
    models = [model] if isinstance(model, nn.Module) else list(model or ())
    if not models or not all(isinstance(one, nn.Module) for one in models):
        raise ValueError("model is the torch module, or the modules, that accum is given")
    optimizers = list(accum._options.optimizers)
    schedulers = list(accum._options.schedulers)
    if loop is not None:
        optimizers += [inner(o) for o in loop.accelerator._optimizers]
        schedulers += [inner(s) for s in loop.accelerator._schedulers]
    for name, thing in stateful.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise ValueError(f"{name} is a {type(thing).__name__} without state_dict")
    if not optimizers and not stateful:
        raise ValueError(
            "neither accum nor the Checkpointer knows an optimizer, so its state would not be "
            "saved; give it to the Accumulator, or here: optimizer=optimizer"
        )
    known = {id(p) for one in models for p in fsdp.named_parameters(one).values()}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"the optimizer steps a parameter of shape {tuple(parameter.shape)} of none of "
                    f"the models given; give all of them: model=[...]"
                )
    return TrainState(models, _each(optimizers), _each(schedulers), accum._scaler, stateful)


def _each(things: list[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())


def _several(part: Any, count: int) -> list[Any]:
    """The states in a part: one is stored as it is, see snapshot.py."""
    return [part] if count == 1 else part
