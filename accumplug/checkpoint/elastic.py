"""A checkpoint of some number of ranks, resumed by another number of ranks.

Each new rank resumes from a state that is assembled from those of all old ranks:

* The window. The micro-batches that the old ranks have run in it count as run by the new ranks, as
  evenly as possible, and the remaining ones are redistributed. The effective batch has to stay the
  same. Running sums and weights: see merge_windows.py.
* The position in the data: see dataloading/resharding.py.
* `micro_batches` of old rank r is added to new rank `r % ranks`, so that their sum is right and
  none decreases; `position` is spread evenly. Random states, buffers and all else that belongs to
  one rank are those of old rank `rank % old ranks`. So two ranks may draw the same dropout mask,
  as ranks with the same seed do.
"""

from __future__ import annotations

from collections.abc import Sequence

from accumplug.accumulator import Accumulator
from accumplug.checkpoint import dtensor_shards
from accumplug.checkpoint.merge_windows import SavedRank, WindowSplit, merge_windows, plan_of
from accumplug.checkpoint.train_state import State, TrainState
from accumplug.parallel.ddp import ddp_modules, has_sparse_gradients


def redistribute(states: Sequence[State], accum: Accumulator, train_state: TrainState) -> State:
    """The state that this rank resumes from, like one of `window_state.capture`.

    `states` are those of all ranks of the saved run, which had more or fewer ranks than this one.

    Raises:
        ValueError: this is impossible; the message names the setting to change.
    """
    rank, size = accum.parts.group.rank, accum.parts.group.size
    saved_ranks = [SavedRank(state) for state in states]
    steps = _steps(saved_ranks, accum, size)
    split = WindowSplit.of(saved_ranks, rank, size, steps)
    if split.done:
        _refuse_uneven(split, saved_ranks, accum, train_state)
    own = states[rank % len(states)]
    counters = dict(own["accum"])
    counters["micro_batches"] = sum(s["accum"]["micro_batches"] for s in states[rank::size])
    position = sum(s["accum"]["position"] for s in states)
    counters["position"] = position // size + (rank < position % size)
    feed = None
    if own["feed"] is not None:  # alive: the ranks tell each other anew, or they had planned it
        plan = plan_of(saved_ranks, split)
        alive = None if plan is None else float(sum(left > 0 for left in split.remaining))
        feed = {"alive": alive, "plan": plan}
    scales = [s["scale"] for s in states if s["scale"] is not None] if split.index else []
    window, sums = merge_windows(saved_ranks, split, accum.parts.options.sync == "every")
    if split.done and train_state.is_sharded:
        sums = dtensor_shards.redistribute_sums(
            [old.state["sums"] for old in saved_ranks if old.index], sums
        )
    return {
        **own,
        "accum": counters | window,
        "scale": scales[0] if scales else None,
        "sums": sums,
        "replicas": _ddp_modules(own, train_state, split.done > 0),
        "order": _order(saved_ranks, split, counters["position"], accum, train_state),
        "feed": feed,
        "count": min(old.state["count"] - old.index for old in saved_ranks) + split.index,
    }


def _steps(saved_ranks: Sequence[SavedRank], accum: Accumulator, size: int) -> int:
    """Of a window on each rank here; ValueError if that makes another effective batch."""
    opened = next((old.window for old in saved_ranks if old.window and not old.plan), None)
    saved = int(saved_ranks[0].state["steps"] if opened is None else opened["steps"])
    given = accum.parts.state.steps
    if given is None:
        return saved
    here = int(given(saved_ranks[0].state["accum"]["updates"]) if callable(given) else given)
    total = saved * len(saved_ranks)
    if here * size == total:
        return here
    advice = f"set steps={total // size}"
    if total % size:
        fit = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        advice = f"which {size} ranks can't share evenly: start as many ranks as divide it ({fit})"
    raise ValueError(
        f"steps is {here} here on {_ranks(size)}, {here * size} micro-batches an update; the "
        f"checkpoint was saved with steps={saved} on {_ranks(len(saved_ranks))}, {total} "
        f"micro-batches an update: {advice}"
    )


def _refuse_uneven(
    split: WindowSplit,
    saved_ranks: Sequence[SavedRank],
    accum: Accumulator,
    train_state: TrainState,
) -> None:
    """What is left of the window can't be run by these ranks in the way that they reduce."""
    left, size = sum(split.remaining), len(split.remaining)
    every = accum.parts.options.sync == "every" and size > 1
    if every and (left % size or any(old.plan for old in saved_ranks)):
        raise ValueError(
            f'sync="every" reduces in each micro-batch, so {size} ranks can\'t share the {left} '
            f"that are left of the open window; start {_ranks(len(saved_ranks))} until it is "
            f'full, or a number of ranks that divides {left} (without weigh=), or set sync="last"'
        )
    if train_state.is_sharded and left % size:
        raise ValueError(
            f"under fully_shard all ranks run the same number of micro-batches, and {left} are "
            f"left of the open window; start {_ranks(len(saved_ranks))} until it is full, or a "
            f"number of ranks that divides {left}"
        )
    if min(split.remaining) == 0 and _needs(accum, train_state) != "none":
        raise ValueError(
            f"{left} micro-batches are left of the open window, too few for {size} ranks, and one "
            f"that has none can't stand in for it in this run (for that it takes optimizer= or "
            f"accelerator=, and no sparse gradients); start at most {_ranks(left)}, or give "
            f"optimizer="
        )


def _needs(accum: Accumulator, train_state: TrainState) -> str:
    """How many micro-batches of its own a rank needs to take part in a window: "none" or "one", or
    "as many" as the others."""
    sparse = any(has_sparse_gradients(ddp) for m in train_state.models for ddp in ddp_modules(m))
    if (accum.parts.host.takes_over) and not (sparse or train_state.is_sharded):
        return "none"
    return (
        "one" if accum.parts.options.tail == "flush" and not train_state.is_sharded else "as many"
    )


def _ddp_modules(own: State, train_state: TrainState, is_open: bool) -> list[State]:
    """Inside of a window the buffers have been broadcast; the buckets are those that were found."""
    orders = [state["buckets"] for state in own["replicas"]]
    count = sum(len(ddp_modules(model)) for model in train_state.models)
    orders += [None] * (count - len(orders))
    return [{"awaits_buffers": not is_open, "buckets": order} for order in orders[:count]]


def _order(
    saved_ranks: Sequence[SavedRank],
    split: WindowSplit,
    position: int,
    accum: Accumulator,
    train_state: TrainState,
) -> State:
    """The place in the data of this rank, which has been handed `position` items before."""
    own: State = dict(saved_ranks[split.rank % len(saved_ranks)].state["order"])
    if own["protocol"] is not None or any(
        start["protocol"] is not None for start in own["starts"].values()
    ):
        raise ValueError(
            f"the loader keeps its place by itself (state_dict), which is that of one rank of "
            f"{len(saved_ranks)}; start {len(saved_ranks)}"
        )
    orders = [old.state["order"] for old in saved_ranks]
    started = next((order["start"] for order in orders if order["start"] is not None), None)
    if started is None or all(order["ended"] for order in orders):
        return own
    deal = started["deal"]
    new = {
        "taken": [old.taken for old in saved_ranks],
        "lefts": split.remaining,
        "carries": accum.parts.options.tail == "carry",
        "window": split.steps * len(split.remaining),
        "needs": _needs(accum, train_state),
    }
    deal = {**deal, "world": deal["world"] or len(saved_ranks), "made": [*deal["made"], new]}
    start = {**started, "deal": {**deal, "rank": split.rank, "base": position}, "states": None}
    return {**own, "start": start, "ended": False, "starts": {}, "made": 0}


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"
