"""Running sums and weights of an open window, moved to another number of ranks.

A rank's sum times its divisor (`steps * reference`) is the gradient of `sum(w * l)` over its
micro-batches. So it can be added to that of another rank once both have one divisor. Where one sum
goes to one rank the divisor stays, and so do the sum's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumplug.checkpoint.train_state import State
from accumplug.core.window import Window
from accumplug.dataloading.resharding import spread, turn
from accumplug.storage.codec import TensorShard


class SavedRank:
    """The state of one rank of the saved run."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.window: State = state["accum"]["window"] or {}
        self.plan: State | None = None if state["feed"] is None else state["feed"]["plan"]
        self.index: int = self.window.get("index", 0)
        """Micro-batches that it has run in the open window."""
        start = state["order"]["start"]
        self.deal: State = {"base": 0, "made": []} if start is None else start["deal"]
        self.taken: int = state["accum"]["position"] - self.deal["base"]
        """Items that it was given since the data were last redistributed."""

    @property
    def left(self) -> int:
        """Micro-batches that it has planned (`weigh=`) and not run."""
        return 0 if self.plan is None else len(self.plan["weights"]) - self.index

    @property
    def divisor(self) -> Any:
        """The divisor of its sum; None if nothing was added."""
        reference = self.window.get("reference")
        return _computed(lambda one: self.window["steps"] * one, reference)


@dataclass(frozen=True)
class WindowSplit:
    """How the open window is divided."""

    rank: int
    steps: int
    """Of a full window on each new rank."""
    done: int
    """Micro-batches that all ranks have run in it."""
    indices: list[int]
    """How many of these count as run by each new rank. If uneven, the first ranks have more: a rank
    that has run none has no window, and can't hold a sum."""
    remaining: list[int]
    """How many each new rank still has to run."""

    @staticmethod
    def of(saved_ranks: Sequence[SavedRank], rank: int, size: int, steps: int) -> WindowSplit:
        done = sum(old.index for old in saved_ranks)
        indices = [done // size + (r < done % size) for r in range(size)]
        planned = any(old.plan for old in saved_ranks)
        left = sum(old.left for old in saved_ranks) if planned else steps * size - done
        remaining = [left // size + (r >= size - left % size) for r in range(size)]
        return WindowSplit(rank, steps, done, indices, remaining if done else [0] * size)

    @property
    def index(self) -> int:
        """Of this rank."""
        return self.indices[self.rank]


def plan_of(saved_ranks: Sequence[SavedRank], split: WindowSplit) -> State | None:
    """The plan of this rank, if the old ones had looked at the window and begun it."""
    plan = next((old.plan for old in saved_ranks if old.plan), None)
    if plan is None or not split.done:
        return None
    none = [0] * len(saved_ranks)
    left = sorted(
        (turn(old.deal["made"][-1]["lefts"] if old.deal["made"] else none, r, old.taken + i), r, i)
        for r, old in enumerate(saved_ranks)
        for i in range(old.left)
    )
    weights = [saved_ranks[r].plan["weights"][saved_ranks[r].index + i] for _, r, i in left]  # type: ignore[index]
    mean = _computed(lambda total: total / plan["micro_batches"], plan["total"])
    own = spread(weights, split.remaining)[split.rank] or [
        0.0
    ]  # 0: of a rank without data that joins
    weights = [mean] * split.index + own
    left_here = split.remaining[split.rank]
    return {**plan, "weights": weights, "left": left_here, "done": split.index}


def merge_windows(
    saved_ranks: Sequence[SavedRank], split: WindowSplit, common: bool
) -> tuple[State, list[Any]]:
    """The open window of this rank, as in `accum.state_dict`, and its running sums.

    `common`: all ranks have one reference.
    """
    if not split.index:
        return {"window": None}, []
    size, plan = len(split.indices), plan_of(saved_ranks, split)
    opened = [old for old in saved_ranks if old.index]
    mine = opened[split.rank :: min(size, split.done)]
    steps = split.steps if plan is None else len(plan["weights"])
    if plan is not None:
        divisor = _computed(lambda total: total / size, plan["total"])
    elif common:
        divisor = _computed(lambda *all_: sum(all_) / size, *_there(old.divisor for old in opened))
    else:
        divisor = _computed(lambda *all_: sum(all_), *_there(old.divisor for old in mine))
    window: State = {
        "steps": steps,
        "index": split.index,
        "reference": _computed(lambda one: one / steps, divisor),
        "factor": 1.0,
        "torn": None,
        **_weight(mine),
    }
    states = [old.state["accum"] for old in mine]
    return {
        "window": window,
        "loss_sum": _computed(lambda *a: sum(a), *_there(s["loss_sum"] for s in states)),
        "overflows": sum(state["overflows"] for state in states),
        "elapsed": max(old.state["accum"]["elapsed"] for old in opened),
    }, _sums(mine, divisor)


def _weight(mine: Sequence[SavedRank]) -> State:
    """The weights of some ranks as one, with what floating point has lost of each."""
    window = Window(1)
    for old in mine:
        window.add_weight(old.window["weight"])
        window.compensation += old.window["compensation"]
    weight = _computed(lambda *_: window.weight, *(old.window["weight"] for old in mine))
    return {"weight": 0.0 if weight is None else weight, "compensation": window.compensation}


def _sums(mine: Sequence[SavedRank], divisor: Any) -> list[Any]:
    """By model and name: the sums of some ranks with one divisor, added."""
    models: list[Any] = []
    for old in mine:
        factor = _computed(lambda a, b: a / b, old.divisor, divisor)
        for index, sums in enumerate(old.state["sums"]):
            if index == len(models):
                models.append({})
            for name, grad in sums.items():
                if isinstance(grad, TensorShard):
                    continue  # the same for all ranks, see dtensor_shards.redistribute_sums
                models[index][name] = _added(models[index].get(name), grad, factor)
    return models


def _added(total: Tensor | None, grad: Tensor, factor: Any) -> Tensor:
    """`total + factor * grad`; None for no total."""
    if total is None and isinstance(factor, float) and factor == 1.0:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    result = grad.to(wide) * factor
    if total is not None:
        result = total.to(wide) + result
    back: Tensor = result.to(grad.dtype)
    return back


def _there(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _computed(function: Callable[..., Any], *values: Any) -> Any:
    """`function` of numbers or tensors; None if one of them is None, or without any."""
    if not values or any(value is None for value in values):
        return None
    return function(*values)
