"""A loop's position in its data, and how another process gets to the same position.

The order of a pass comes from generators and epoch numbers (generators.py). Their states at its
start are kept, so that the same order can be drawn again; on resuming, the items that were
handed out are passed over. Three more things matter:

* `accum.batches` fetches items ahead of the block that it runs. A dataset that draws random
  numbers in this process has drawn them then, from generators in a state that the blocks have
  since moved. So the states before the items that were not handed out yet are kept as well.
* Making a loader's iterator draws from the global generator, so the state at the save is set
  after that, once the items that had been fetched are fetched again.
* What the order or the noise depends on may be something that is not saved, such as the time. So
  the last items are recognised by their fingerprints when they are fetched again.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from accumplug.dataloading import resharding, saved_position
from accumplug.dataloading.fetcher import (
    Fetcher,
    ProxyLoader,
    check_loader,
    has_iterator,
    has_workers,
    items_per_fetch,
    stateful_part,
    use_iterator,
)
from accumplug.dataloading.generators import Generators
from accumplug.dataloading.rng import State
from accumplug.dataloading.stream_check import StreamCheck, VerifyData
from accumplug.loop.data_pass import with_last


class DataPosition:
    """The pass of one loop through one loader.

    Args:
        loader: where the order comes from, if what the loop goes through only wraps it (a progress
            bar); by default whatever the loop goes through.
        making_iterator: entered while the iterator of a loader is made.
        generators: random generators that the data draw from and that can't be reached from the
            loader.
        verify: what happens when a resumed pass gives other items than the one that was saved.
    """

    def __init__(
        self,
        loader: Any = None,
        making_iterator: Callable[[Any], AbstractContextManager[Any]] = lambda _: nullcontext(),
        generators: Sequence[Any] = (),
        verify: VerifyData = "raise",
    ) -> None:
        self.loader = loader
        self._source = loader
        self._making_iterator = making_iterator
        self._generators = Generators(generators)
        self._check = StreamCheck(self._generators, verify)
        self._total: int | None = None
        self._start: State | None = None
        self._base = 0
        """Items of this pass handed out before the rest was redistributed (resharding.py)."""
        self._fetcher: Fetcher | None = None
        self._per_item = 1
        self._resume: State | None = None
        self._generators_at_save: State | None = None
        self._looks_again = False
        self._told = False
        if loader is not None:
            check_loader(loader)
            self._generators.look(loader)

    def open(self, loader: Any, position: int) -> Iterator[tuple[Any, bool]]:
        """A pass, in which another process has been handed `position` items if `begun`."""
        self._source = source = loader if self.loader is None else self.loader
        check_loader(source)
        resume, self._resume, self._total = self._resume, None, None
        self._generators.look(source)
        self._warn_of_bounds()
        self._fetcher, self._looks_again = None, True
        if resume is not None:
            self._start_workers(resume)
        if resume is None or resume["start"] is None:
            if resume is not None:
                self._start_between_passes(resume)
            return self._start_anew(loader, source)
        self._start, deal = resume["start"], resume["start"]["deal"]
        self._base = deal["base"]
        if resume["ended"]:
            return self._start_after_end(loader, resume, position)
        if deal["made"]:
            return self._resharded(loader, resume, position)
        resharding.refuse_other_pass(deal["loader"], source)
        if not resume["start"]["has_iterator"]:
            use_iterator(source)
        self._restore_start(resume["start"])
        fetcher = self._new_fetcher(stateful_part(source))
        self._resume_fetcher(fetcher, resume, position * items_per_fetch(loader))
        return self._count_items(self._through(loader, fetcher), position)

    def _start_anew(self, loader: Any, source: Any) -> Iterator[tuple[Any, bool]]:
        self._start = {
            "states": self._generators.capture(),
            "numbers": self._generators.numbers(),
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
        fetcher = self._new_fetcher(stateful_part(source))
        return self._count_items(self._through(loader, fetcher), 0)

    def _new_fetcher(self, stateful: Any) -> Fetcher:
        self._check.base = self._base
        return Fetcher(self._generators, stateful, self._check if self._check.verify else None)

    def _resume_fetcher(self, fetcher: Fetcher, resume: State, number: int) -> None:
        fingerprints = resume.get("fingerprints", {})
        fetcher.resume(
            number, resume["starts"], resume["made"], self._restore_generators, fingerprints
        )
        fetcher.may_go_back(resume.get("origin"), partial(self._restore_start, resume["start"]))

    @property
    def begun(self) -> bool:
        """Whether another process was in the middle of the pass that `open` will open."""
        return self._resume is not None and self._resume["start"] is not None

    def state(self, position: int, is_open: bool) -> State:
        """Everything that `load` needs, for a loop that was handed `position` items so far.

        `is_open`: it is in a pass, not between two of them.
        """
        if self._resume is not None and self.begun and self._generators_at_save is not None:
            return self._resume  # a save right after the resume
        if self._looks_again:  # what the first items have built is there by now
            self._generators.look(self._source)
            self._looks_again = False
        ended = is_open and self._total == position
        state: State = {
            "start": self._start if is_open else None,
            "ended": ended,
            "starts": {},
            "made": 0,
            "now": self._generators.capture(),
            "numbers": self._generators.numbers(),
            "has_workers": has_workers(self._source),
            "protocol": None,
            "fingerprints": {},
            "origin": None,
        }
        if self._fetcher is not None:
            if is_open and not ended:
                state["starts"], state["made"] = self._fetcher.starts(self._number(position))
                state["fingerprints"] = self._fetcher.fingerprints
                state["origin"] = self._fetcher.origin
            else:
                state["protocol"] = self._fetcher.loader_state()
        return state

    def load(self, state: State) -> None:
        """Continue from what `state` gave, with the next pass that is opened.

        TypeError: it is not of that form.
        """
        saved_position.check(state)
        started = [] if state["start"] is None else [state["start"]["states"]]
        fetches = [*state["starts"].values(), *filter(None, [state.get("origin")])]
        for states in (state["now"], *started, *(fetch["states"] for fetch in fetches)):
            if states is not None:
                self._generators.check(states)
        self._resume, self._generators_at_save = state, state["now"]
        if self.loader is not None and not self.begun:
            self._generators.set_numbers(state["numbers"])

    def before_block(self) -> None:
        """A block is about to run: set the generators to what they were, if that is still to do."""
        if self._generators_at_save is not None:
            self._restore_generators()

    def blocks_ran(self, position: int) -> None:
        """The loop has run the blocks of the items before `position`."""
        if self._fetcher is not None:
            self._fetcher.blocks_ran(self._number(position))

    def _number(self, position: int) -> int:
        """How many fetches come before item `position`."""
        return (position - self._base) * self._per_item

    def _restore_start(self, start: State) -> None:
        self._generators.set_numbers(start["numbers"])
        self._generators.restore(start["states"])

    def _restore_generators(self) -> None:
        if self._generators_at_save is not None:
            self._generators.restore(self._generators_at_save)
            self._generators_at_save = None

    def _start_workers(self, resume: State) -> None:
        """If the other process had workers when the pass began, or has at the end of one."""
        between = resume["start"] is None or resume["ended"]
        known = resume if between else resume["start"]
        if known["has_workers"] and not has_workers(self._source):
            with self._making_iterator(self._source):
                iter(getattr(self._source, "base_dataloader", self._source))

    def _start_between_passes(self, resume: State) -> None:
        """The other process was between two passes."""
        if self.loader is None:  # the loop has set the epoch by now, see load
            numbers = resume["numbers"].items()
            self._generators.set_numbers({k: n for k, n in numbers if not k.endswith("epoch")})
        self._load_loader_state(resume["protocol"])
        self._restore_generators()

    def _resharded(self, loader: Any, resume: State, position: int) -> Iterator[tuple[Any, bool]]:
        """The rest of a pass that was begun by another number of ranks."""
        start, deal = resume["start"], resume["start"]["deal"]
        source = loader if self.loader is None else self.loader
        batches = resharding.remaining_batches(deal["loader"], deal["world"], deal["made"], source)[
            deal["rank"]
        ]
        if position - self._base == len(batches):  # this rank has no part in it
            return self._start_after_end(loader, resume, position)
        self._generators.set_numbers(start["numbers"])
        fetcher = self._new_fetcher(None)
        if start["states"] is None:  # no process has gone into this rest before
            self._restore_generators()
            self._start = {**start, "states": self._generators.capture()}
        else:
            self._generators.restore(start["states"])
            self._resume_fetcher(fetcher, resume, position - self._base)
        with resharding.use_batches(source, batches):
            items = self._count_items(self._through(loader, fetcher), position)
            first = list(itertools.islice(items, 1))
        return itertools.chain(first, items)

    def _start_after_end(
        self, loader: Any, resume: State, position: int
    ) -> Iterator[tuple[Any, bool]]:
        """The other process had been handed all items, and was about to see the end."""
        if getattr(loader, "rng_types", None) and not resharding.unsupported_reason(loader):
            with resharding.use_batches(loader, []):
                list(loader)  # ranks that have items left wait for all to start, in there
        self._generators.set_numbers(resume["numbers"])
        if hasattr(loader, "end_of_dataloader"):  # a prepared loader counts behind its last item
            loader.iteration = resume["start"]["numbers"].get("iteration", loader.iteration) + 1
        self._load_loader_state(resume["protocol"])
        self._restore_generators()
        self._total = position
        return iter(())

    def _load_loader_state(self, state: Any) -> None:
        """Bring a stateful loader to the end of a pass."""
        if (stateful := stateful_part(self._source)) is not None and state is not None:
            stateful.load_state_dict(state)
            if isinstance(stateful, DataLoader):
                iter(stateful)  # torchdata draws random numbers for the ended iterator as well
        use_iterator(self._source)

    def _count_items(
        self, items: Iterator[tuple[Any, bool]], count: int
    ) -> Iterator[tuple[Any, bool]]:
        fetcher = self._fetcher
        try:
            for item, last in items:
                count += 1
                if last:
                    self._total = count
                yield item, last
        finally:
            if fetcher is not None:
                fetcher.close()

    def _through(self, loader: Any, fetcher: Fetcher) -> Iterator[tuple[Any, bool]]:
        """The items of `loader`, fetched through `fetches`."""
        self._fetcher, self._per_item = fetcher, items_per_fetch(loader)
        self._check.per_item = self._per_item
        with self._making_iterator(loader):
            base = getattr(loader, "base_dataloader", None)
            if base is None:
                return with_last(loader, fetcher.through(loader))
            # A prepared loader gets its items from this attribute, once, when it starts.
            iterator, loader.base_dataloader = iter(loader), ProxyLoader(base, fetcher)
            try:
                first = list(itertools.islice(iterator, 1))
            finally:
                loader.base_dataloader = base
            return with_last(loader, itertools.chain(first, iterator))

    def _warn_of_bounds(self) -> None:
        if self._generators.skipped and self._check.verify and not self._told:
            self._told = True
            warnings.warn(
                f"random generators were not looked for in all of the loader: "
                f"{'; '.join(self._generators.skipped)}. If the data draw from one in there, name "
                f"it: Checkpointer(..., generators=[...])",
                stacklevel=2,
            )
