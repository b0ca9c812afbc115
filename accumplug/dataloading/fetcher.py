"""The fetches of one pass: the generator states that they started from, and their replay."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accumplug.dataloading.fingerprint import fingerprint
from accumplug.dataloading.generators import Generators
from accumplug.dataloading.rng import State

KEPT = 4  # fingerprints of items before the position; a stateful loader goes back to the first
_END: Any = object()


class _OtherItem(Exception):
    """A stateful loader gives another item than before: its state_dict has not all of its state."""


class Fetcher:
    """An iterator over a loader that keeps the generator states from which its items are fetched.

    Of items that are fetched one after the other, with nothing else between, it keeps the state
    before the first. `stateful` is a loader with state_dict and load_state_dict, whose state is
    kept as well. If it does not give the same items after it was loaded, the pass is replayed from
    its start. `on_other_item` is called with the number of a fetch that gave another item here
    than in the process that saved, after that; None: items are not compared.
    """

    def __init__(
        self,
        generators: Generators,
        stateful: Any,
        on_other_item: Callable[[int], None] | None = None,
    ) -> None:
        self._generators = generators
        self._stateful = stateful
        self._on_other_item = on_other_item
        self._iterator: Iterator[Any] = iter(())
        self._loader: Any = None
        self._by_index = False
        self._captures = True
        self._starts: dict[int, State] = {}
        self._fingerprints: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self._number = 0
        self._moved = True
        self._known: dict[int, State] = {}
        self._must_replay = False
        self._target = 0
        self._until = 0
        self._on_replayed: Callable[[], None] | None = None
        self._ahead: deque[Any] = deque()
        """Items that another process had fetched, and had no block on."""
        self._kept = 0 if stateful is None else KEPT
        self.origin: State | None = None
        """The state of a stateful loader before the first fetch of the pass."""
        self._go_back: Callable[[], None] | None = None

    def resume(
        self,
        number: int,
        starts: dict[int, State],
        made: int,
        on_replayed: Callable[[], None],
        fingerprints: dict[int, int],
    ) -> None:
        """Let the next fetch be `number`; another process has made those before `made`.

        From there on they are made again from the states `starts`; then `on_replayed` is called.
        Their items have to match `fingerprints`.
        """
        self._known = dict(starts)
        self._must_replay, self._target, self._until = True, number, made
        self._on_replayed = on_replayed
        self._expected = dict(fingerprints) if self._on_other_item else {}

    def may_go_back(self, origin: State | None, restore: Callable[[], None]) -> None:
        """`origin`: of the process that saved. `restore` sets the generators to what they were
        when the pass began, before its iterator was made."""
        self.origin = origin
        if origin is not None and self._stateful is not None and self._expected:
            self._go_back = restore

    def through(self, loader: Any) -> Iterator[Any]:
        """Start on `loader`."""
        if self._known and self._stateful is not None:
            self._stateful.load_state_dict(self._known[min(self._known)]["protocol"])
        self._iterator = iter(loader)
        self._loader = loader if self._go_back is not None else None
        # where that name is gone (or in a DataLoader with an __iter__ of its own), items are read
        self._by_index = _reads_by_index(loader) and hasattr(self._iterator, "_sampler_iter")
        # Workers draw from generators of their own; nothing in this process moves.
        self._captures = not getattr(loader, "num_workers", 0) or self._stateful is not None
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._must_replay:
            self._must_replay = False
            self._replay()
        item = self._ahead.popleft() if self._ahead else self._fetch()
        if item is _END:
            raise StopIteration
        return item

    def starts(self, number: int) -> tuple[dict[int, State], int]:
        """What `resume` needs to go to fetch `number`: states, and how many fetches were made."""
        first = self._first(number, number)
        starts = {
            # the loader is loaded with the first one only
            n: state if n == first else {**state, "protocol": None}
            for n, state in self._starts.items()
            if n >= first
        }
        if not starts and self._stateful is not None:
            starts = {number: self._state()}
        return starts, max(number, self._number)

    def _first(self, number: int, default: int) -> int:
        """The last fetch whose state is known and that comes so far before `number` that what
        follows tells whether the loader gives the same items."""
        earlier = sorted(n for n in self._starts if n <= number)
        return max([n for n in earlier if n <= number - self._kept] or earlier[:1], default=default)

    @property
    def fingerprints(self) -> dict[int, int]:
        """Of the last items that were fetched, by number."""
        return dict(self._fingerprints)

    def blocks_ran(self, number: int) -> None:
        """Something else has run, and no fetch before `number` will be asked for."""
        self._moved = True
        first = self._first(number, 0)
        self._starts = {n: state for n, state in self._starts.items() if n >= first}
        self._fingerprints = {n: f for n, f in self._fingerprints.items() if n >= number - KEPT}

    def close(self) -> None:
        """Let go of the loader's iterator: its workers end at once if it is freed here, and only
        after seconds if it is found in a cycle later."""
        self._iterator, self._loader = iter(()), None

    def loader_state(self) -> Any:
        """The state of the stateful loader."""
        return None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())

    def _replay(self) -> None:
        """Fetch what another process had fetched, from the states that it had then."""
        known, expected = dict(self._known), dict(self._expected)
        try:
            self._fetch_again(min(known, default=self._target), loaded=self._stateful is not None)
        except _OtherItem:
            assert self._go_back is not None
            assert self.origin is not None
            self._go_back()
            self._go_back = None
            self._ahead.clear()
            self._stateful.load_state_dict(copy.deepcopy(self.origin["protocol"]))
            self._iterator = iter(self._loader)
            self._known, self._expected, self._number = {0: self.origin, **known}, expected, 0
            self._fetch_again(0, loaded=True)
        self._go_back = self._loader = None

    def _fetch_again(self, first: int, loaded: bool) -> None:
        if self._known and loaded:
            self._number = first
        while self._number < first and self._skip():
            pass
        self._number = first
        while self._number < self._target:
            if self._fetch() is _END:
                return
        while self._number < self._until and not (self._ahead and self._ahead[-1] is _END):
            self._ahead.append(self._fetch())

    def _skip(self) -> bool:
        """Pass over one item, if there is one. One that is found by its index is not read."""
        iterator: Any = self._iterator
        # torch 2.13, dataloader.py: the iterator draws the indices of its next batch from here
        item = next(iterator._sampler_iter if self._by_index else iterator, _END)
        if not self._captures or item is _END:  # else its noise is another one, up to the states
            self._compare(self._number, item)
        self._number += 1
        return item is not _END

    def _fetch(self) -> Any:
        if (known := self._known.pop(self._number, None)) is not None:
            self._generators.restore(known["states"])
            protocol = known["protocol"]
            self._starts[self._number] = {
                **known,
                "protocol": self.loader_state() if protocol is None else protocol,
            }
            self._moved = False
        self._finish_replay_if_done()
        if self._moved and self._captures:
            self._starts[self._number] = self._state()
        if self._number == 0 and self._stateful is not None:
            self.origin = self._starts.get(0, self.origin)
        self._moved = False
        self._number += 1
        try:
            item = next(self._iterator, _END)
        except BaseException:
            self._finish_replay_if_done()
            raise
        self._compare(self._number - 1, item)
        self._finish_replay_if_done()
        return item

    def _compare(self, number: int, item: Any) -> None:
        """Keep the fingerprint of an item, and compare it with that in the process that saved."""
        if self._on_other_item is None:
            return
        found = self._fingerprints[number] = 0 if item is _END else fingerprint(item)
        expected = self._expected.pop(number, found)
        ends_early = item is _END and any(f and n > number for n, f in self._expected.items())
        if expected != found or ends_early:
            if self._go_back is not None:
                raise _OtherItem
            self._expected = {}
            self._on_other_item(number)

    def _finish_replay_if_done(self) -> None:
        if self._on_replayed is not None and self._number >= self._until:
            self._on_replayed()
            self._on_replayed, self._moved = None, True

    def _state(self) -> State:
        return {"states": self._generators.capture(), "protocol": self.loader_state()}


class ProxyLoader:
    """Stands for the loader inside of a prepared one while that starts."""

    def __init__(self, loader: Any, fetcher: Fetcher) -> None:
        self._loader = loader
        self._fetcher = fetcher

    def __iter__(self) -> Iterator[Any]:
        return self._fetcher.through(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def stateful_part(loader: Any) -> Any:
    """The part of `loader` whose state_dict knows its position in the data, or None.

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

    The loader draws no seed for them then, so the order that is drawn after that is another one.
    """
    base = getattr(loader, "base_dataloader", loader)
    return _is_loader(base) and base.persistent_workers and base._iterator is not None


def check_loader(loader: Any) -> None:
    """Raise ValueError for a loader whose order can't be reproduced in another process."""
    base = getattr(loader, "base_dataloader", loader)
    if stateful_part(loader) is None:
        _refuse_one_shot(base, "the loader")
    for name in ("sampler", "batch_sampler"):
        if _is_loader(base) and (sampler := getattr(base, name)) is not None:
            _refuse_one_shot(sampler, f"its {name}")
    if getattr(base, "num_workers", 0) and not getattr(base, "in_order", True):
        raise ValueError(
            "the DataLoader has in_order=False, so its order is that in which its workers happen "
            "to finish; build it with in_order=True"
        )


def _refuse_one_shot(iterable: Any, name: str) -> None:
    if hasattr(iterable, "__next__"):
        raise ValueError(
            f"{name} is a {type(iterable).__name__}, which can be iterated over only once and "
            f"can't be brought back to a position; give an object whose __iter__ starts anew (a "
            f"DataLoader, a list, a class around the generator), or one with state_dict and "
            f"load_state_dict"
        )


def items_per_fetch(loader: Any) -> int:
    """How many fetches one item of `loader` takes in the process that makes them."""
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
