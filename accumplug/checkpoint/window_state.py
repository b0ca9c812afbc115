"""What one rank needs to go on inside of a window: sums, counters, place in the data, buffers."""

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


def capture(accum: Accumulator, train_state: TrainState, order: DataPosition) -> State:
    """The state of this rank. Nothing is copied."""
    sums = [accum._sum.named(model) for model in train_state.models] if accum.pending else []
    return {
        "accum": _located(accum.state_dict()),
        "scale": _located(accum._update.scale),
        "sums": [
            {n: dtensor_shards.pack(dense(grad)) for n, grad in each.items()} for each in sums
        ],
        "buffers": train_state.buffers(),
        "replicas": train_state.ddp_states(reduced=accum.syncs > 0),
        "order": order.state(accum.position, accum._feed is not None),
        "feed": _pass_state(accum),
    }


def restore(state: State, accum: Accumulator, train_state: TrainState, order: DataPosition) -> None:
    """Go on from what `take` gave. Weights, optimizers and scaler have to be loaded before."""
    device = next(
        (p.device for m in train_state.models for p in m.parameters()), torch.device("cpu")
    )
    train_state.load_buffers(state["buffers"])
    train_state.restore_buckets(state["replicas"])
    accum.load_state_dict(_placed(state["accum"], device))
    for model, packed in zip(train_state.models, state["sums"], strict=bool(state["sums"])):
        if roots(model):
            accum._models.see([model])  # what it has deferred is reduced by nothing else
        sums = dtensor_shards.unpack(dtensor_shards.join([packed]), named(model))
        accum._sum.restore(model, {name: given(grad) for name, grad in sums.items()})
    accum._update.scale = _placed(state["scale"], device)
    if accum._scaler is not None and accum.pending:
        accum._scaler.scale(torch.ones((), device=device))  # unscale_ asks for one call before it
    train_state.load_ddp_states(state["replicas"])
    order.load(state["order"])


def restore_pass(state: State, feed: DataPassState) -> None:
    """Let the pass that opens now be the one that was under way."""
    if state["alive"] is not None:
        feed.resumed, feed.alive = True, state["alive"]
    if state["plan"] is not None:
        feed.plan = Plan(**_placed(state["plan"], torch.device("cpu")))


def _pass_state(accum: Accumulator) -> State | None:
    feed = accum._feed
    if feed is None:
        return None
    plan = feed.plan
    is_open = plan is not None and (plan.left > 0 or accum.pending > 0)
    return {
        "alive": None if feed.begins else feed.alive,
        "plan": _located(asdict(plan)) if plan is not None and is_open else None,
    }


def _located(value: Any) -> Any:
    """`value` with the kind of device of each tensor in it."""
    if isinstance(value, dict):
        return {key: _located(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_located(item) for item in value]
    return {"tensor": value, "on": value.device.type} if isinstance(value, Tensor) else value


def _placed(value: Any, device: torch.device) -> Any:
    """What was given to `_located`; what was on a device goes to `device`."""
    if isinstance(value, dict):
        if value.keys() == {"tensor", "on"}:
            tensor: Tensor = value["tensor"]
            return tensor if value["on"] == "cpu" else tensor.to(device)
        return {key: _placed(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [_placed(item, device) for item in value]
    return value


def dense(grad: Tensor) -> Any:
    """A sparse gradient (of an Embedding) in dense pieces."""
    if not grad.is_sparse:
        return grad
    return {
        "indices": grad._indices(),
        "values": grad._values(),
        "size": list(grad.shape),
        "coalesced": grad.is_coalesced(),
    }


def given(grad: Any) -> Tensor:
    if isinstance(grad, Tensor):
        return grad
    return torch.sparse_coo_tensor(
        grad["indices"],
        grad["values"],
        grad["size"],
        is_coalesced=grad["coalesced"],
        check_invariants=True,  # indices outside of the size would be outside of the memory
    )
