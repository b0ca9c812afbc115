"""The state of one rank inside of a window: sums, counters, position in the data, buffers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from accumplug.accumulator import Accumulator
from accumplug.checkpoint import dtensor_shards
from accumplug.checkpoint.train_state import State, TrainState
from accumplug.core.gradients import named
from accumplug.core.normalization import WindowPlan
from accumplug.core.state import DataPassState, Parts
from accumplug.dataloading.position import DataPosition
from accumplug.parallel.fsdp import roots
from accumplug.storage.codec import TensorShard


def capture(
    accum: Accumulator, train_state: TrainState, order: DataPosition, data_pass: State | None
) -> State:
    """The state of this rank, in a pass of that state. Nothing is copied."""
    parts = accum.parts
    sums = (
        [parts.gradients.named(model) for model in train_state.models]
        if parts.state.pending
        else []
    )
    return {
        "accum": parts.state_dict(),
        "scale": parts.stepper.scale,
        "sums": sums,
        "forward": train_state.forward_states(),
        "replicas": train_state.ddp_states(reduced=parts.state.syncs > 0),
        "order": order.state(parts.state.position, data_pass is not None),
        "feed": data_pass,
        "noise": _noise(accum),
    }


def restore(state: State, accum: Accumulator, train_state: TrainState, order: DataPosition) -> None:
    """Load what `capture` gave. Weights, optimizers and scaler have to be loaded before."""
    device = next(
        (p.device for m in train_state.models for p in m.parameters()), torch.device("cpu")
    )
    train_state.load_forward_states(_forward_states(state))
    train_state.restore_buckets(state["replicas"])
    accum.load_state_dict(_to(state["accum"], device))
    for model, saved in zip(train_state.models, state["sums"], strict=bool(state["sums"])):
        if roots(model):
            accum.parts.models.admit([model])  # what it has deferred is reduced by nothing else
        parameters = named(model)
        sums = {n: _sum_of(grad, parameters.get(n)) for n, grad in saved.items()}
        accum.parts.gradients.restore(model, sums)
    accum.parts.stepper.scale = _to(state["scale"], device)
    if accum.parts.stepper.scaler is not None and accum.pending:
        accum.parts.stepper.scaler.scale(
            torch.ones((), device=device)
        )  # unscale_ asks for one call before it
    train_state.load_ddp_states(state["replicas"])
    order.load(state["order"])
    _load_noise(state.get("noise"), accum)


def restore_pass(state: State, data_pass: DataPassState) -> None:
    """Let the pass that opens now be the one that was under way."""
    if state["alive"] is not None:
        data_pass.resumed, data_pass.alive = True, state["alive"]
    data_pass.items.reads_ahead = state.get("reads_ahead")
    if state["plan"] is not None:
        plan = WindowPlan(**state["plan"])
        if "done" not in state["plan"]:  # of format 1, where each item had one block
            plan.done = len(plan.weights) - plan.left
        if "items" not in state["plan"]:  # until format 3
            plan.items = plan.done + plan.left
        data_pass.plans.append(plan)
    if state.get("parts") is not None:
        data_pass.resumed_parts = Parts(**state["parts"])


def _noise(accum: Accumulator) -> State | None:
    """The noise scale so far, and what the open window has for it."""
    if (probe := accum.parts.noise_probe) is None:
        return None
    return probe.state_dict()


def _load_noise(state: State | None, accum: Accumulator) -> None:
    """Load what `_noise` gave, if this run asks for the noise scale."""
    if (probe := accum.parts.noise_probe) is None or state is None:
        return
    probe.load_state_dict(state)


def pass_state(data_pass: DataPassState, accum: Accumulator) -> State:
    """What `restore_pass` needs."""
    plan = None
    if (own := data_pass.plan) is not None:
        # what a loop that reads ahead has, and has run no block on, is fetched again; so are the
        # windows behind this one, which are planned again
        left = max(own.items - own.done, own.left)
        plan = asdict(own) | {"left": left} if left or accum.pending else None
    return {
        "alive": None if data_pass.begins else data_pass.alive,
        "plan": plan,
        "reads_ahead": data_pass.items.reads_ahead,
        "parts": _parts(accum.parts.state.parts),
    }


def _parts(parts: Parts | None) -> State | None:
    """How much of an item that is cut into parts has been trained on, if not all or nothing."""
    if parts is None or not 0 < parts.done < parts.count:
        return None
    return {"size": parts.size, "count": parts.count, "done": parts.done}


def _forward_states(state: State) -> list[State]:
    """By model; format 1 had the buffers of the state_dict alone."""
    if "forward" in state:
        return list(state["forward"])
    return [{"buffers": buffers, "extra": {}} for buffers in state["buffers"]]


def _sum_of(saved: Any, parameter: Any) -> Tensor:
    """A running sum, if it was sharded (`saved` is a shard or several) as `parameter` is."""
    if isinstance(saved, Tensor):
        return saved
    shards = [saved] if isinstance(saved, TensorShard) else saved
    return dtensor_shards.to_dtensor(shards, parameter)


def _to(value: Any, device: torch.device) -> Any:
    """The 0-dim tensors in `value` on `device`: numbers that the host need not read."""
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value
