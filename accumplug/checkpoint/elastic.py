"""A checkpoint of some ranks, gone on from by another number of ranks.

Each rank of the new run takes over a state that is put together from those of all old ranks:

* The window. The micro-batches that the old ranks have run in it count as run by the new ones, as
  evenly as it goes; what is left is dealt to them. That needs the effective batch to be kept.
  Running sums and weights: see merge.py.
* The place in the data: see redeal.py.
* `micro_batches` of old rank r is added to new rank `r % ranks`, so that their sum is right and
  none falls; `position` is spread evenly. Random numbers, buffers and what else is a rank's own
  are those of old rank `rank % old ranks`. So two ranks may draw the same dropout mask, as all do
  that were seeded alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from accumplug.accumulator import Accumulator
from accumplug.checkpoint import dtensor_shards
from accumplug.checkpoint.merge_windows import Old, Share, merge, plan_of
from accumplug.checkpoint.train_state import State, Subject
from accumplug.parallel.ddp import ddp_modules, has_sparse_gradients


def take_over(states: Sequence[State], accum: Accumulator, subject: Subject) -> State:
    """The state that this rank goes on from, as `window.take` gives one.

    `states` are those of all ranks of the run that saved, which were more or fewer than here.

    Raises:
        ValueError: something can't be kept; the message says which number to change.
    """
    rank, size = accum._ranks.rank, accum._ranks.size
    olds = [Old(state) for state in states]
    steps = _steps(olds, accum, size)
    share = Share.of(olds, rank, size, steps)
    if share.done:
        _refuse_uneven(share, olds, accum, subject)
    own = states[rank % len(states)]
    counters = dict(own["accum"])
    counters["micro_batches"] = sum(s["accum"]["micro_batches"] for s in states[rank::size])
    position = sum(s["accum"]["position"] for s in states)
    counters["position"] = position // size + (rank < position % size)
    feed = None
    if own["feed"] is not None:  # alive: the ranks tell each other anew, or they had planned it
        plan = plan_of(olds, share)
        alive = None if plan is None else float(sum(left > 0 for left in share.lefts))
        feed = {"alive": alive, "plan": plan}
    scales = [s["scale"] for s in states if s["scale"] is not None] if share.index else []
    window, sums = merge(olds, share, accum._options.sync == "every")
    if share.done and subject.is_sharded:
        sums = dtensor_shards.deal([old.state["sums"] for old in olds if old.index], sums)
    return {
        **own,
        "accum": counters | window,
        "scale": scales[0] if scales else None,
        "sums": sums,
        "replicas": _replicas(own, subject, share.done > 0),
        "order": _order(olds, share, counters["position"], accum, subject),
        "feed": feed,
        "count": min(old.state["count"] - old.index for old in olds) + share.index,
    }


def _steps(olds: Sequence[Old], accum: Accumulator, size: int) -> int:
    """Of a window on each rank here; ValueError if that makes another effective batch."""
    opened = next((old.window for old in olds if old.window and not old.plan), None)
    saved = int(olds[0].state["steps"] if opened is None else opened["steps"])
    given = accum._steps
    here = int(given(olds[0].state["accum"]["updates"]) if callable(given) else given)
    total = saved * len(olds)
    if here * size == total:
        return here
    advice = f"set steps={total // size}"
    if total % size:
        fit = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        advice = f"which {size} ranks can't share evenly: start as many ranks as divide it ({fit})"
    raise ValueError(
        f"steps is {here} here on {_ranks(size)}, {here * size} micro-batches an update; the "
        f"checkpoint was saved with steps={saved} on {_ranks(len(olds))}, {total} micro-batches an "
        f"update: {advice}"
    )


def _refuse_uneven(share: Share, olds: Sequence[Old], accum: Accumulator, subject: Subject) -> None:
    """What is left of the window can't be run by these ranks in the way that they reduce."""
    left, size = sum(share.lefts), len(share.lefts)
    every = accum._options.sync == "every" and size > 1
    if every and (left % size or any(old.plan for old in olds)):
        raise ValueError(
            f'sync="every" reduces in each micro-batch, so {size} ranks can\'t share the {left} '
            f"that are left of the open window; start {_ranks(len(olds))} until it is full, or a "
            f'number of ranks that divides {left} (without weigh=), or set sync="last"'
        )
    if subject.is_sharded and left % size:
        raise ValueError(
            f"under fully_shard all ranks run the same number of micro-batches, and {left} are "
            f"left of the open window; start {_ranks(len(olds))} until it is full, or a number of "
            f"ranks that divides {left}"
        )
    if min(share.lefts) == 0 and _needs(accum, subject) != "none":
        raise ValueError(
            f"{left} micro-batches are left of the open window, too few for {size} ranks, and one "
            f"that has none can't stand in for it in this run (for that it takes optimizer= or "
            f"accelerator=, and no sparse gradients); start at most {_ranks(left)}, or give "
            f"optimizer="
        )


def _needs(accum: Accumulator, subject: Subject) -> str:
    """How many micro-batches of its own a rank needs to take part in a window: "none" or "one", or
    "as many" as the others."""
    sparse = any(has_sparse_gradients(ddp) for m in subject.models for ddp in ddp_modules(m))
    if (accum.takes_step or accum._loop) and not (sparse or subject.is_sharded):
        return "none"
    return "one" if accum._options.tail == "flush" and not subject.is_sharded else "as many"


def _replicas(own: State, subject: Subject, is_open: bool) -> list[State]:
    """Inside of a window the buffers have been broadcast; the buckets are those that were found."""
    orders = [state["buckets"] for state in own["replicas"]]
    count = sum(len(ddp_modules(model)) for model in subject.models)
    orders += [None] * (count - len(orders))
    return [{"awaits_buffers": not is_open, "buckets": order} for order in orders[:count]]


def _order(
    olds: Sequence[Old], share: Share, position: int, accum: Accumulator, subject: Subject
) -> State:
    """The place in the data of this rank, which has been handed `position` items before."""
    own: State = dict(olds[share.rank % len(olds)].state["order"])
    if own["protocol"] is not None or any(
        start["protocol"] is not None for start in own["starts"].values()
    ):
        raise ValueError(
            f"the loader keeps its place by itself (state_dict), which is that of one rank of "
            f"{len(olds)}; start {len(olds)}"
        )
    orders = [old.state["order"] for old in olds]
    started = next((order["start"] for order in orders if order["start"] is not None), None)
    if started is None or all(order["ended"] for order in orders):
        return own
    deal = started["deal"]
    new = {
        "taken": [old.taken for old in olds],
        "lefts": share.lefts,
        "carries": accum._options.tail == "carry",
        "window": share.steps * len(share.lefts),
        "needs": _needs(accum, subject),
    }
    deal = {**deal, "world": deal["world"] or len(olds), "made": [*deal["made"], new]}
    start = {**started, "deal": {**deal, "rank": share.rank, "base": position}, "states": None}
    return {**own, "start": start, "ended": False, "starts": {}, "made": 0}


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"
