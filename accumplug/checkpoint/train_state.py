"""The objects of a training run and their states."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accumplug.accumulator import Accumulator
from accumplug.checkpoint import dtensor_shards, model_state, optimizer_state
from accumplug.checkpoint.division import BASE, Division, Mark, described
from accumplug.checkpoint.model_state import Fingerprint, unwrap_model
from accumplug.integrations.accelerate_buckets import PreparedBuckets
from accumplug.parallel import fsdp
from accumplug.parallel.ddp import bucket_order, ddp_modules, settle_buckets
from accumplug.storage.codec import encode
from accumplug.storage.safetensors_io import digest

State = dict[str, Any]


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
        buckets: PreparedBuckets,
    ) -> None:
        self._models = [weakref.ref(model) for model in models]
        self.is_sharded = any(fsdp.roots(model) for model in models)
        """Whether each rank has its own part of the weights and the optimizers' states."""
        self._constants = [model_state.constants(unwrap_model(model)) for model in models]
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.scaler = scaler
        self.stateful = stateful
        self._buckets: list[list[str] | None] | None = None
        self._base: frozenset[Mark] = frozenset()
        self._digests: dict[Mark, str] = {}
        self.prepared_buckets = buckets

    @property
    def models(self) -> list[nn.Module]:
        """The models as they were given, wrapped or not."""
        models = []
        for reference in self._models:
            if (model := reference()) is None:
                raise RuntimeError("a model of the Checkpointer is gone; close() it first")
            models.append(model)
        return models

    # -- large, and the same inside of a window -------------------------------------------------

    def weights(self) -> list[State]:
        """The models' state_dicts."""
        return [unwrap_model(model).state_dict() for model in self.models]

    def leave_out_frozen(self) -> None:
        """Let the weights that are frozen now be in no checkpoint while they stay as they are."""
        self._base = frozenset(self.divide().marks)

    def left_out(self, division: Division) -> list[dict[str, Any]]:
        """By model and name, what the weights are that no checkpoint has."""
        return division.describe_left_out(self.weights(), self._digests)

    def difference_from(self, base: Sequence[State]) -> str:
        """How the weights here differ from those that were left out of a checkpoint, or ""."""
        wrong = []
        marks = {mark[0]: mark for mark in self.divide().marks}
        for saved, weights in zip(base, self.weights(), strict=True):
            for name, there in saved.items():
                if not isinstance(value := weights.get(name), Tensor):
                    wrong.append(f"{name} is not in this model")
                    continue
                local = fsdp.local(value)
                checksum = digest(local)
                if (mark := marks.get(local.data_ptr())) is not None:
                    self._digests[mark] = checksum
                if (here := described(value, checksum)) != there:
                    wrong.append(f"{name} is {here} here and {there} in the checkpoint")
        if not wrong:
            return ""
        return "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")

    def divide(self) -> Division:
        """What holds still from one update to the next, as it is now."""
        holders: list[Any] = list(self.optimizers)
        for thing in self.stateful.values():
            if hasattr(thing, "param_groups"):
                holders.append(thing)
        parameters: list[nn.Parameter] = []
        for model in map(unwrap_model, self.models):
            parameters += model_state.parameters(model, self.is_sharded)
        return Division(parameters, self.optimizers, holders, self.is_sharded, self._base)

    def optimizer_states(self) -> list[Any]:
        """What the optimizers keep of each parameter."""
        return [optimizer.state_dict()["state"] for optimizer in self.optimizers]

    def optimizer_fingerprint(self) -> Fingerprint:
        """Of what is in `optimizer_states`."""
        return optimizer_state.fingerprint([optimizer.state for optimizer in self.optimizers])

    # -- small, or different after each micro-batch ---------------------------------------------

    def forward_states(self) -> list[State]:
        """What a forward may change: buffers and extra states."""
        pairs = zip(self.models, self._constants, strict=True)
        return [model_state.forward_state(unwrap_model(m), known) for m, known in pairs]

    def load_forward_states(self, states: Sequence[State]) -> None:
        """Load what `forward_states` gave."""
        for model, state in zip(self.models, states, strict=True):
            model_state.load_forward_state(unwrap_model(model), state)

    def progress(self) -> State:
        """Parameter groups, schedulers, scaler."""
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

    def object_states(self) -> State:
        """The states of the objects that were given by name."""
        return {name: thing.state_dict() for name, thing in self.stateful.items()}

    def ddp_states(self, reduced: bool) -> list[State]:
        """What the DistributedDataParallel modules have found out, and have still to do.

        `reduced`: they have reduced a gradient, and so have their final buckets.
        """
        ddps = self._ddp_modules()
        if not ddps:
            return [{"buckets": order} for order in self.prepared_buckets.orders(self.models)]
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
        ddps = self._ddp_modules()
        if not ddps:
            orders = [state["buckets"] for state in states]
            self.prepared_buckets.restore(self.models, orders)
        for ddp, state in zip(ddps, states, strict=False):
            if state["buckets"] is not None:
                settle_buckets(ddp, state["buckets"])

    def load_ddp_states(self, states: Sequence[State]) -> None:
        """The rest of what `ddp_states` gave."""
        for ddp, state in zip(self._ddp_modules(), states, strict=False):
            ddp.require_forward_param_sync = state["awaits_buffers"]

    def _ddp_modules(self) -> list[DistributedDataParallel]:
        return [ddp for model in self.models for ddp in ddp_modules(model)]

    def _kinds(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self.optimizers]

    # -- checks and loading ---------------------------------------------------------------------

    @property
    def has_optimizer_state(self) -> bool:
        """Whether an optimizer has begun to keep something."""
        return any(optimizer.state for optimizer in self.optimizers)

    def check_savable(self) -> None:
        """Raise ValueError, naming it, for a state that no checkpoint can hold."""
        for name, get in (
            ("model", self.weights),
            ("buffers", self.forward_states),
            ("optimizer", self.optimizer_states),
            ("progress", self.progress),
            ("objects", self.object_states),
        ):
            try:
                encode(get(), name)
            except (TypeError, ValueError) as error:
                raise ValueError(f"this run can't be saved: {error}") from error

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

    def load(self, parts: Mapping[str, Any]) -> None:
        """Load the parts "model", "optimizer" and "progress"."""
        models, optimizers = self.models, self.optimizers
        base = parts[BASE] or [{}] * len(models)
        for model, states, left_out in zip(
            models, _by_object(parts["model"], len(models)), base, strict=True
        ):
            model_state.load_weights(unwrap_model(model), states, left_out.keys())
        progress = parts["progress"]
        for optimizer, groups, states in zip(
            optimizers,
            progress["optimizers"],
            _by_object(parts["optimizer"], len(optimizers)),
            strict=True,
        ):
            optimizer_state.load(optimizer, groups, states)
        for scheduler, state in zip(self.schedulers, progress["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(progress["scaler"])

    def load_objects(self, parts: Sequence[State]) -> None:
        """Load what `object_states` gave on each of some ranks."""
        for name, thing in self.stateful.items():
            states = [part[name] for part in parts]
            sharded = dtensor_shards.has_shards(states[0])
            targets = thing.state_dict() if sharded else None
            thing.load_state_dict(dtensor_shards.assemble(states, targets))


def find_train_state(accum: Accumulator, model: Any, stateful: dict[str, Any]) -> TrainState:
    """Everything that is to be saved, or ValueError."""
    host = accum.parts.host
    if model is None:
        model = host.models() or None
    models = [model] if isinstance(model, nn.Module) else _listed(model)
    if not models or not all(isinstance(one, nn.Module) for one in models):
        if model is None:
            raise ValueError("give model=: the torch module, or the modules, that accum is given")
        raise TypeError(
            f"model is the torch module, or the modules, that accum is given; got {model!r:.100}"
        )
    optimizers = [*accum.parts.options.optimizers, *host.optimizers()]
    schedulers = [*accum.parts.options.schedulers, *host.schedulers()]
    if not optimizers and not stateful:
        raise ValueError(
            "neither accum nor the Checkpointer knows an optimizer, so its state would not be "
            "saved; give it to the Accumulator, or here: optimizer=optimizer"
        )
    named = [thing for thing in stateful.values() if isinstance(thing, Optimizer)]
    for optimizer in (*optimizers, *named):
        optimizer_state.refuse_unsavable(optimizer)
    known = {id(p) for one in models for p in fsdp.named_parameters(one).values()}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"the optimizer steps a parameter of shape {tuple(parameter.shape)} of none of "
                    f"the models given; give all of them: model=[...]"
                )
    return TrainState(
        models,
        _each(optimizers),
        _each(schedulers),
        accum.parts.stepper.scaler,
        stateful,
        PreparedBuckets(accum.parts),
    )


def _listed(models: Any) -> list[Any]:
    return list(models) if isinstance(models, list | tuple) else []


def _each(things: list[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())


def _by_object(parts: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Of each of `count` objects its states in `parts`; the state of a single one is the part."""
    if count == 1:
        return [parts]
    return [[part[index] for part in parts] for index in range(count)]
