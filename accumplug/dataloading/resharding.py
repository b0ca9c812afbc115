"""The remaining micro-batches of a pass, redistributed to another number of ranks.

Whole micro-batches are redistributed, in the order in which the ranks that began the pass would
have run them. So each window of the rest of the pass gets the micro-batches that it would have
got, if the effective batch is the same, and no sample is seen more often than there: one that
`DistributedSampler` repeats to pad the data is repeated once.

A loader is described when a pass starts (`describe`), its sampler by what its order follows from
(sampler_order.py). From that any number of ranks finds the micro-batches of each rank. Each time
that the number of ranks has changed within the pass adds an assignment as plain JSON: how many
micro-batches each rank had taken by then ("taken"), and how many each new one runs until the open
window is full ("lefts").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, cycle
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accumplug.dataloading import sampler_order
from accumplug.dataloading.saved_position import MALFORMED
from accumplug.errors import CheckpointError, MovedError
from accumplug.parallel.private import require

T = TypeVar("T")
PURPOSE = "resuming on another number of ranks"
State = dict[str, Any]
Batches = list[list[int]]


def describe(loader: Any) -> State:
    """What determines the micro-batches of a pass that starts now, or why that isn't known."""
    if why := unsupported_reason(loader):
        return {"why": why}
    base = _base(loader)
    batches = base.batch_sampler
    even = None
    if type(batches).__name__ == "BatchSamplerShard":
        even, batches = batches.even_batches, batches.batch_sampler
    return {
        "batch_size": batches.batch_size,
        "drop_last": batches.drop_last,
        "even": even,
        "samples": _length(base.dataset),
        "sampler": sampler_order.describe(batches.sampler, loader),
    }


def remaining_batches(
    described: State, world: int, assignments: list[State], loader: Any
) -> list[Batches]:
    """The micro-batches of each rank after the last of `assignments`.

    `world` ranks have begun the pass through what is `described`; this run goes through `loader`.

    ValueError: the pass can't be redistributed, or another loader goes through other data.
    """
    try:
        return _remaining_batches(described, world, assignments, loader)
    except MALFORMED as error:
        raise CheckpointError(f"what is known of the data is malformed ({error!r})") from error


def _remaining_batches(
    described: State, world: int, assignments: list[State], loader: Any
) -> list[Batches]:
    if not described.get("why"):
        _refuse_absurd(described)
    assigned = _assigned_at_start(described, world)
    remaining = [0] * world
    for assignment in assignments:
        places = sorted(
            (turn(remaining, rank, index), rank, index)
            for rank, own in enumerate(assigned)
            for index in range(assignment["taken"][rank], len(own))
        )
        remaining = assignment["lefts"]
        _refuse_short_carry(assignment, len(places))
        assigned = spread([assigned[rank][index] for _, rank, index in places], remaining)
        _refuse_unequal(assignment, len(places))
    _refuse_other_loader(described, loader)
    return assigned


def _refuse_absurd(described: State) -> None:
    """A length is believed up to that of the data."""
    sampler, samples = described["sampler"], described["samples"]
    length, count = sampler.get("length", 0), sampler.get("num_samples") or 0
    if (type(samples) is int and length > samples) or count > max(100 * (samples or 0), 10**8):
        raise TypeError(f"a sampler of {length} with {count} for {samples} samples")


def turn(remaining: list[int], rank: int, index: int) -> tuple[bool, int, int]:
    """Sorts the micro-batches of all ranks: when micro-batch `index` of a rank has its turn.

    `remaining`: how many each rank had to run in the window that was open when they were
    redistributed. A rank that has fewer begins later, so that all run their last one in the same
    round.
    """
    late, own = max(remaining) - remaining[rank], remaining[rank]
    return index >= own, index + late if index < own else index - own, rank


def spread(items: Iterable[T], remaining: list[int]) -> list[list[T]]:
    """`items` by rank: `remaining[rank]` to fill the open window, then by turns."""
    assigned: list[list[T]] = [[] for _ in remaining]
    first = sorted(turn(remaining, rank, i) for rank, n in enumerate(remaining) for i in range(n))
    ranks = chain((rank for _, _, rank in first), cycle(range(len(remaining))))
    for item, rank in zip(items, ranks, strict=False):
        assigned[rank].append(item)
    return assigned


@contextmanager
def use_batches(loader: Any, batches: Batches) -> Iterator[None]:
    """Let an iterator of `loader` that is made meanwhile go through `batches`."""
    base = _base(loader)
    kept = base.batch_sampler
    # torch 2.8 to 2.15: a DataLoader refuses to be given another batch_sampler; with
    # persistent_workers its iterator keeps the one that it was made with
    try:
        vars(base)["batch_sampler"] = batches
        _keep(base, batches)
        if getattr(base, "_index_sampler", None) is not batches:  # what an iterator asks for
            raise MovedError("DataLoader._index_sampler", PURPOSE)
        yield
    finally:
        vars(base)["batch_sampler"] = kept
        _keep(base, kept)


def _keep(base: Any, batches: Any) -> None:
    require(base, ["_iterator"], PURPOSE)
    if base._iterator is not None:
        require(base._iterator, ["_index_sampler"], PURPOSE)
        base._iterator._index_sampler = batches


def _length(data: Any) -> int | None:
    return len(data) if hasattr(data, "__len__") else None


def _base(loader: Any) -> Any:
    return getattr(loader, "base_dataloader", loader)


def unsupported_reason(loader: Any) -> str | None:
    """Why the micro-batches of `loader` can't be redistributed, in words."""
    base = _base(loader)
    if not isinstance(base, DataLoader):
        return f"it is a {type(loader).__name__}; give the Checkpointer a torch DataLoader"
    if isinstance(base.dataset, IterableDataset):
        return "its dataset is an IterableDataset, of which no sample can be asked for by index"
    if hasattr(loader, "slice_fn"):
        return "rank 0 reads for all of them (dispatch_batches=True)"
    if type(base).__iter__ is not DataLoader.__iter__:
        return f"it is a {type(base).__name__}, which keeps its position by itself"
    batches: Any = base.batch_sampler
    if getattr(batches, "split_batches", False):
        return "it splits each batch over the ranks (split_batches=True)"
    if type(batches).__name__ == "BatchSamplerShard":
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler:
        return f"its batch_sampler is a {type(batches).__name__}, not torch's BatchSampler"
    return None


def _assigned_at_start(described: State, world: int) -> list[Batches]:
    """The micro-batches of each of the `world` ranks that began the pass."""
    if why := described.get("why"):
        raise ValueError(f"the loader of the run that saved: {why}. {_advice(world)}")
    sampler, size = described["sampler"], described["batch_size"]
    drop_last = described["drop_last"]
    if sampler["kind"] == "distributed":
        if sampler["num_replicas"] != world:
            raise ValueError(
                f"its DistributedSampler had num_replicas={sampler['num_replicas']} on {world} "
                f"ranks. {_advice(world)}"
            )
        shards = [sampler_order.indices_of_rank(sampler, rank) for rank in range(world)]
        return [list(BatchSampler(shard, size, drop_last)) for shard in shards]
    if sampler["kind"] == "other":
        raise ValueError(
            f"the order of a {sampler['name']} can be reproduced by its own process only. "
            f"{_advice(world)}"
        )
    indices = sampler_order.indices(sampler)
    if described["even"] is not None:
        return _sharded(BatchSampler(indices, size, drop_last), world, described["even"])
    if world > 1:
        raise ValueError(
            f"each of the {world} ranks went through a loader of its own, and which samples they "
            f"share is not known; use a DistributedSampler. {_advice(world)}"
        )
    return [list(BatchSampler(indices, size, drop_last))]


def _sharded(batches: BatchSampler, world: int, even: bool) -> list[Batches]:
    from accelerate.data_loader import BatchSamplerShard

    return [
        list(BatchSamplerShard(batches, world, rank, even_batches=even)) for rank in range(world)
    ]


def _refuse_short_carry(assignment: State, count: int) -> None:
    """A rank whose part of the window is full closes it; it can't wait for the next pass."""
    left, ranks = sum(assignment["lefts"]), len(assignment["lefts"])
    if assignment["carries"] and ranks > 1 and left - ranks < count < left:
        raise ValueError(
            f'tail="carry" takes the last {left - count} micro-batches of the open window from '
            f"the next pass, too few for {ranks} ranks; start at most {left - count}"
        )


def _refuse_unequal(assignment: State, count: int) -> None:
    """The last window is too small for ranks that need a micro-batch each."""
    left, ranks = sum(assignment["lefts"]), len(assignment["lefts"])
    last = count if count < left else (count - left) % assignment["window"]
    fits = {"none": True, "one": last == 0 or last >= ranks, "as many": last % ranks == 0}
    if not fits[assignment["needs"]]:
        raise ValueError(
            f"the last window of the pass gets {last} micro-batches, which {ranks} ranks can't "
            f"share here, since a rank without data can't join a window in this run (that takes "
            f"optimizer= or accelerator=, and neither fully_shard nor sparse gradients); start a "
            f"number of ranks that divides {last}, or give optimizer="
        )


def refuse_other_pass(described: State, loader: Any) -> None:
    """A position is a number of micro-batches, so they have to hold the same samples."""
    if not described.get("why") and not unsupported_reason(loader):
        try:
            _refuse_other_loader(described, loader)
        except MALFORMED as error:
            raise CheckpointError(f"what is known of the data is malformed ({error!r})") from error


def _refuse_other_loader(described: State, loader: Any) -> None:
    """The rest of the pass has to consist of the same micro-batches."""
    if why := unsupported_reason(loader):
        raise ValueError(f"the loader of this run can't take over the rest of the pass: {why}")
    base = _base(loader)
    size = getattr(base.batch_sampler, "batch_size", None)
    if size != described["batch_size"]:
        raise ValueError(
            f"batch_size is {size} here, and {described['batch_size']} in the pass that was "
            f"saved; set batch_size={described['batch_size']}"
        )
    if (samples := _length(base.dataset)) != described["samples"]:
        raise ValueError(
            f"the dataset has {samples} samples here, and {described['samples']} in the pass that "
            f"was saved; resume with the same data"
        )


def _advice(world: int) -> str:
    ranks = f"{world} rank{'s' if world > 1 else ''}"
    return f"Start {ranks} until the pass has ended; a save between two passes fits any number"
