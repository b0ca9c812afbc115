"""Where a loop is in its data, and how another process gets to the same place.

The order of a pass comes from generators and epoch numbers (sources.py). Their states at its
start are kept, so that the same order can be drawn again; on resuming, the items that were
handed out are passed over. Two more moments matter:

* `accum.batches` fetches items ahead of the block that it runs. A dataset that draws random
  numbers in this process has drawn them then, from generators in a state that the blocks have
  since moved. So the states before the items that were not handed out yet are kept as well.
* Making a loader's iterator draws from the global generator, so the state at the save is set
  after that, once the items that had been fetched are fetched again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import DataLoader

from accumplug.dataloading import resharding
from accumplug.dataloading.fetcher import (
    Fetches,
    Lent,
    check,
    has_iterator,
    has_workers,
    items_per_fetch,
    protocol,
    use_iterator,
)
from accumplug.dataloading.generators import Sources
from accumplug.dataloading.rng import State, pack, unpack
from accumplug.loop.data_pass import with_last


class Order:
    """The pass of one loop through one loader.

    `loader` is where the order comes from, if what the loop goes through only wraps it (a
    progress bar); by default whatever the loop goes through. `making` is entered while the
    iterator of a loader is made.
    """

    def __init__(
        self,
        loader: Any = None,
        making: Callable[[Any], AbstractContextManager[Any]] = lambda loader: nullcontext(),
    ) -> None:
        self.loader = loader
        self._source = loader
        self._making = making
        self._total: int | None = None
        self._start: State | None = None
        self._base = 0
        """Items of this pass handed out before the rest was redistributed (resharding.py)."""
        self._fetches: Fetches | None = None
        self._per_item = 1
        self._resume: State | None = None
        self._late: State | None = None
        if loader is not None:
            check(loader)

    def open(self, loader: Any, position: int) -> Iterator[tuple[Any, bool]]:
        """A pass, in which another process has been handed `position` items if `begun`."""
        self._source = source = loader if self.loader is None else self.loader
        check(source)
        resume, self._resume, self._total = self._resume, None, None
        sources, self._fetches = Sources(source), None
        if resume is not None:
            self._start_workers(resume)
        if resume is None or resume["start"] is None:
            if resume is not None:
                self._between(sources, resume)
            self._start = {
                "states": pack(sources.capture()),
                "numbers": sources.numbers(),
                "has_iterator": has_iterator(source),
                "has_workers": has_workers(source),
                "deal": {
                    "loader": resharding.describe(source),
                    "world": None,
                    "made": [],
                    "base": 0,
                },
            }
            self._base = 0
            return self._noted(self._follow(loader, Fetches(sources, protocol(source))), 0)
        self._start = resume["start"]
        self._base = resume["start"]["deal"]["base"]
        if resume["ended"]:
            return self._after_the_end(loader, sources, resume, position)
        if resume["start"]["deal"]["made"]:
            return self._dealt_anew(loader, sources, resume, position)
        resharding.refuse_other_pass(resume["start"]["deal"]["loader"], source)
        if not resume["start"]["has_iterator"]:
            use_iterator(source)
        sources.set_numbers(resume["start"]["numbers"])
        sources.restore(unpack(resume["start"]["states"]))
        fetches = Fetches(sources, protocol(source))
        number = position * items_per_fetch(loader)
        fetches.resume(number, resume["starts"], resume["made"], self._settle)
        return self._noted(self._follow(loader, fetches), position)

    @property
    def begun(self) -> bool:
        """Whether another process was in the middle of the pass that `open` will open."""
        return self._resume is not None and self._resume["start"] is not None

    def state(self, position: int, is_open: bool) -> State:
        """Everything that `load` needs, for a loop that was handed `position` items so far.

        `is_open`: it is in a pass, not between two of them.
        """
        sources = Sources(self._source)
        ended = is_open and self._total == position
        state: State = {
            "start": self._start if is_open else None,
            "ended": ended,
            "starts": {},
            "made": 0,
            "now": pack(sources.capture()),
            "numbers": sources.numbers(),
            "has_workers": has_workers(self._source),
            "protocol": None,
        }
        if self._fetches is not None:
            if is_open and not ended:
                state["starts"], state["made"] = self._fetches.starts(self._number(position))
            else:
                state["protocol"] = self._fetches.protocol_now()
        return state

    def load(self, state: State) -> None:
        """Go on from what `state` gave, with the next pass that is opened."""
        self._resume, self._late = state, state["now"]
        if self.loader is not None and not self.begun:
            Sources(self.loader).set_numbers(state["numbers"])

    def settle(self) -> None:
        """A block is about to run: set the generators to what they were, if that is still to do."""
        if self._late is not None:
            self._settle()

    def moved(self, position: int) -> None:
        """The loop has run the blocks of the items before `position`."""
        if self._fetches is not None:
            self._fetches.moved(self._number(position))

    def _number(self, position: int) -> int:
        """How many fetches come before item `position`."""
        return (position - self._base) * self._per_item

    def _settle(self) -> None:
        if self._late is not None:
            Sources(self._source).restore(unpack(self._late))
            self._late = None

    def _start_workers(self, resume: State) -> None:
        """If the other process had workers when the pass began, or has at the end of one."""
        between = resume["start"] is None or resume["ended"]
        known = resume if between else resume["start"]
        if known["has_workers"] and not has_workers(self._source):
            with self._making(self._source):
                iter(getattr(self._source, "base_dataloader", self._source))

    def _between(self, sources: Sources, resume: State) -> None:
        """The other process was between two passes."""
        if self.loader is None:  # the loop has set the epoch by now, see load
            numbers = resume["numbers"].items()
            sources.set_numbers({k: n for k, n in numbers if not k.endswith("epoch")})
        self._load_protocol(resume["protocol"])
        self._settle()

    def _dealt_anew(
        self, loader: Any, sources: Sources, resume: State, position: int
    ) -> Iterator[tuple[Any, bool]]:
        """The rest of a pass that other ranks have begun, of which this one may have had a part."""
        start, deal = resume["start"], resume["start"]["deal"]
        source = loader if self.loader is None else self.loader
        batches = resharding.rest(deal["loader"], deal["world"], deal["made"], source)[deal["rank"]]
        if position - self._base == len(batches):  # this rank has no part in it
            return self._after_the_end(loader, sources, resume, position)
        sources.set_numbers(start["numbers"])
        fetches = Fetches(sources, None)
        if start["states"] is None:  # no process has gone into this rest before
            self._settle()
            self._start = {**start, "states": pack(sources.capture())}
        else:
            sources.restore(unpack(start["states"]))
            number = position - self._base
            fetches.resume(number, resume["starts"], resume["made"], self._settle)
        with resharding.lent(source, batches):
            items = self._noted(self._follow(loader, fetches), position)
            first = list(itertools.islice(items, 1))
        return itertools.chain(first, items)

    def _after_the_end(
        self, loader: Any, sources: Sources, resume: State, position: int
    ) -> Iterator[tuple[Any, bool]]:
        """The other process had been handed all items, and was about to see the end."""
        if getattr(loader, "rng_types", None) and not resharding.why_not(loader):
            with resharding.lent(loader, []):
                list(loader)  # ranks that have items left wait for all to start, in there
        sources.set_numbers(resume["numbers"])
        if hasattr(loader, "end_of_dataloader"):  # a prepared loader counts behind its last item
            loader.iteration = resume["start"]["numbers"].get("iteration", loader.iteration) + 1
        self._load_protocol(resume["protocol"])
        self._settle()
        self._total = position
        return iter(())

    def _load_protocol(self, state: Any) -> None:
        """Bring a stateful loader to the end of a pass."""
        if (stateful := protocol(self._source)) is not None and state is not None:
            stateful.load_state_dict(state)
            if isinstance(stateful, DataLoader):
                iter(stateful)  # torchdata draws random numbers for the ended iterator as well
        use_iterator(self._source)

    def _noted(self, items: Iterator[tuple[Any, bool]], count: int) -> Iterator[tuple[Any, bool]]:
        for item, last in items:
            count += 1
            if last:
                self._total = count
            yield item, last

    def _follow(self, loader: Any, fetches: Fetches) -> Iterator[tuple[Any, bool]]:
        """The items of `loader`, fetched through `fetches`."""
        self._fetches, self._per_item = fetches, items_per_fetch(loader)
        with self._making(loader):
            base = getattr(loader, "base_dataloader", None)
            if base is None:
                return with_last(loader, fetches.through(loader))
            # A prepared loader gets its items from this attribute, once, when it starts.
            iterator, loader.base_dataloader = iter(loader), Lent(base, fetches)
            try:
                first = list(itertools.islice(iterator, 1))
            finally:
                loader.base_dataloader = base
            return with_last(loader, itertools.chain(first, iterator))
