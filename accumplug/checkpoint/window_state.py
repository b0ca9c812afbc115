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
from accumplug.core.normalization import Plan
from accumplug.dataloading.position import DataPosition
from accumplug.loop.data_pass import DataPassState
from accumplug.parallel.fsdp import roots
from accumplug.storage.codec import TensorShard


def capture(
    accum: Accumulator, train_state: TrainState, order: DataPosition, data_pass: State | None
) -> State:
    """The state of this rank, in a pass of that state. Nothing is copied."""
    sums = [accum._sum.named(model) for model in train_state.models] if accum.pending else []
    return {
        "accum": accum.state_dict(),
        "scale": accum._update.scale,
        "sums": sums,
        "forward": train_state.forward_states(),
        "replicas": train_state.ddp_states(reduced=accum.syncs > 0),
        "order": order.state(accum.position, data_pass is not None),
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
            accum._models.see([model])  # what it has deferred is reduced by nothing else
        parameters = named(model)
        sums = {n: _sum_of(grad, parameters.get(n)) for n, grad in saved.items()}
        accum._sum.restore(model, sums)
    accum._update.scale = _to(state["scale"], device)
    if accum._scaler is not None and accum.pending:
        accum._scaler.scale(torch.ones((), device=device))  # unscale_ asks for one call before it
    train_state.load_ddp_states(state["replicas"])
    order.load(state["order"])
    _load_noise(state.get("noise"), accum)


def restore_pass(state: State, feed: DataPassState) -> None:
    """Let the pass that opens now be the one that was under way."""
    if state["alive"] is not None:
        feed.resumed, feed.alive = True, state["alive"]
    if state["plan"] is not None:
        feed.plan = Plan(**state["plan"])


def _noise(accum: Accumulator) -> State | None:
    """The noise scale so far, and what the open window has for it."""
    if (probe := accum._probe) is None:
        return None
    return {"scale": probe.noise.state_dict(), "norm": probe._small, "weight": probe._weight}


def _load_noise(state: State | None, accum: Accumulator) -> None:
    """Load what `_noise` gave, if this run asks for the noise scale."""
    if (probe := accum._probe) is None or state is None:
        return
    probe.noise.load_state_dict(state["scale"])
    probe._small = _to(state["norm"], accum._sum.device)
    probe._weight = _to(state["weight"], accum._sum.device)


def pass_state(feed: DataPassState, accum: Accumulator) -> State:
    """What `restore_pass` needs."""
    plan = feed.plan
    is_open = plan is not None and (plan.left > 0 or accum.pending > 0)
    return {
        "alive": None if feed.begins else feed.alive,
        "plan": asdict(plan) if plan is not None and is_open else None,
    }


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
