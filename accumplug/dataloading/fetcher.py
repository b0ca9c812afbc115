"""The fetches of one pass: what they started from, and how earlier ones are passed over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accumplug.dataloading.generators import Sources
from accumplug.dataloading.rng import State, pack, unpack


class Fetches:
    """An iterator over a loader that keeps the states from which its items are fetched.

    Of items that are fetched one after the other, with nothing else between, it keeps the state
    before the first. `protocol` is a loader with state_dict and load_state_dict, whose state is
    kept as well.
    """

    def __init__(self, sources: Sources, protocol: Any) -> None:
        self._sources = sources
        self._protocol = protocol
        self._iterator: Iterator[Any] = iter(())
        self._by_index = False
        self._captures = True
        self._starts: dict[int, State] = {}
        self._number = 0
        self._moved = True
        self._known: dict[int, State] = {}
        self._behind = False
        self._target = 0
        self._until = 0
        self._settle: Callable[[], None] | None = None

    def resume(
        self, number: int, starts: dict[int, State], made: int, settle: Callable[[], None]
    ) -> None:
        """Let the next fetch be `number`; another process has made those before `made`.

        From there on they are made again from the states `starts`; then `settle` is called.
        """
        self._known = {n: {**s, "states": unpack(s["states"])} for n, s in starts.items()}
        self._behind, self._target, self._until, self._settle = True, number, made, settle

    def through(self, loader: Any) -> Iterator[Any]:
        """Start on `loader`."""
        if self._known and self._protocol is not None:
            self._protocol.load_state_dict(self._known[min(self._known)]["protocol"])
        self._iterator = iter(loader)
        self._by_index = _reads_by_index(loader)
        # Workers draw from generators of their own; nothing in this process moves.
        self._captures = not getattr(loader, "num_workers", 0) or self._protocol is not None
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._behind:
            self._catch_up()
        return self._fetch()

    def starts(self, number: int) -> tuple[dict[int, State], int]:
        """What `resume` needs to go to fetch `number`: states, and how many fetches were made."""
        first = max((n for n in self._starts if n <= number), default=number)
        starts = {n: state for n, state in self._starts.items() if n >= first}
        if not starts and self._protocol is not None:
            starts = {number: self._state()}
        packed = {n: {**state, "states": pack(state["states"])} for n, state in starts.items()}
        return packed, max(number, self._number)

    def moved(self, number: int) -> None:
        """Something else has run, and nobody will ask for fetches before `number`."""
        self._moved = True
        first = max((n for n in self._starts if n <= number), default=0)
        self._starts = {n: state for n, state in self._starts.items() if n >= first}

    def protocol_now(self) -> Any:
        """The state of the stateful loader."""
        return None if self._protocol is None else copy.deepcopy(self._protocol.state_dict())

    def _catch_up(self) -> None:
        self._behind = False
        self._number = min(self._known, default=self._target)
        if not (self._known and self._protocol is not None):
            _pass_over(self._iterator, self._number, self._by_index)
        while self._number < self._target:
            try:
                self._fetch()
            except StopIteration:
                return

    def _fetch(self) -> Any:
        if (known := self._known.pop(self._number, None)) is not None:
            self._sources.restore(known["states"])
            self._starts[self._number] = known
            self._moved = False
        self._settle_if_done()
        if self._moved and self._captures:
            self._starts[self._number] = self._state()
        self._moved = False
        self._number += 1
        try:
            return next(self._iterator)
        finally:
            self._settle_if_done()

    def _settle_if_done(self) -> None:
        if self._settle is not None and self._number >= self._until:
            self._settle()
            self._settle, self._moved = None, True

    def _state(self) -> State:
        return {"states": self._sources.capture(), "protocol": self.protocol_now()}


class Lent:
    """Stands for the loader inside of a prepared one while that starts."""

    def __init__(self, loader: Any, fetches: Fetches) -> None:
        self._loader = loader
        self._fetches = fetches

    def __iter__(self) -> Iterator[Any]:
        return self._fetches.through(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def protocol(loader: Any) -> Any:
    """The part of `loader` whose state_dict knows where it is in its data, or None.

    A DataLoader over a dataset with indices is followed by its sampler instead.
    """
    base = getattr(loader, "base_dataloader", loader)
    if _is_loader(base) and not isinstance(base.dataset, IterableDataset):
        return None
    if hasattr(base, "state_dict") and hasattr(base, "load_state_dict"):
        return base
    return None


def has_iterator(loader: Any) -> bool:
    """Whether the next pass goes through an iterator that was made before it."""
    # torchdata 0.11: state_dict makes one, and Accelerate calls it when it prepares a loader
    base = getattr(loader, "base_dataloader", loader)
    return bool(getattr(base, "_initial_iter_for_state_dict", False))


def use_iterator(loader: Any) -> None:
    """Let the next pass make an iterator of its own, as each pass but the first does."""
    if has_iterator(loader):
        iter(getattr(loader, "base_dataloader", loader))


def has_workers(loader: Any) -> bool:
    """Whether the workers of an earlier pass are there for the next one (persistent_workers).

    It draws no seed for them then, so the order that is drawn after that is another one.
    """
    base = getattr(loader, "base_dataloader", loader)
    return _is_loader(base) and base.persistent_workers and base._iterator is not None


def check(loader: Any) -> None:
    """Raise ValueError for a loader whose order can't be drawn again in another process."""
    base = getattr(loader, "base_dataloader", loader)
    if protocol(loader) is None:
        _refuse_one_shot(base, "the loader")
    for name in ("sampler", "batch_sampler"):
        if _is_loader(base) and (sampler := getattr(base, name)) is not None:
            _refuse_one_shot(sampler, f"its {name}")
    if getattr(base, "num_workers", 0) and not getattr(base, "in_order", True):
        raise ValueError(
            "the DataLoader has in_order=False, so its order is that in which its workers happen "
            "to finish; build it with in_order=True"
        )


def _refuse_one_shot(iterable: Any, what: str) -> None:
    if hasattr(iterable, "__next__"):
        raise ValueError(
            f"{what} is a {type(iterable).__name__}, which can be gone through once and can't be "
            f"brought back to a place; give an object whose __iter__ starts anew (a DataLoader, a "
            f"list, a class around the generator), or one with state_dict and load_state_dict"
        )


def items_per_fetch(loader: Any) -> int:
    """How many fetches one item of `loader` costs the process that makes them."""
    # accelerate 1.15, DataLoaderDispatcher: rank 0 fetches one batch for each process
    if hasattr(loader, "slice_fn") and not loader.split_batches:
        return int(loader.state.num_processes)
    return 1


def _is_loader(loader: Any) -> bool:
    return isinstance(loader, DataLoader)


def _reads_by_index(loader: Any) -> bool:
    """Whether items can be passed over by their indices, without reading them."""
    return (
        _is_loader(loader)
        and loader.num_workers == 0
        and not isinstance(loader.dataset, IterableDataset)
    )


def _pass_over(iterator: Any, count: int, by_index: bool) -> None:
    # torch 2.13, dataloader.py: the iterator draws the indices of its next batch from here
    source = iterator._sampler_iter if by_index else iterator
    for _ in range(count):
        next(source, None)
