"""What prepared loaders have handed out, in an Accelerate loop that does not use `accum.batches`.

Read from accelerate 1.15, data_loader.py: a prepared loader announces each pass to the gradient
state (`_add_dataloader`), gets its batches from `base_dataloader.__iter__()` one ahead of the loop,
and stays announced for good if the loop is left by `break`. So each pass is met when it is
announced, and its batches are counted on their way; a pass whose iterator is gone was left.

A loop may also read a loader whole before its first block, and nothing that Accelerate shows tells
such a pass from that of an evaluation. It is followed if a model was in training mode when it began
and all of its batches are still there; if they are not (other copies of them may be), it is
followed up to its tail, which is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any  # Accelerate's loaders and states have no types

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import Tensor

from accumplug.core.state import ItemCount
from accumplug.core.window import Window
from accumplug.parallel.private import require

ADVICE = "Let it go through `for batch in accum.batches(loader)`"


@dataclass(eq=False)
class LoaderPass:
    """One pass through one prepared loader."""

    loader: weakref.ref[Any]
    trains: bool = True
    """A model was in training mode when it began."""
    items: ItemCount = field(default_factory=ItemCount)
    counted: bool = False
    """Its batches are counted as they are fetched."""
    iterator: weakref.ref[Any] | None = None
    fetched: int = 0
    fetched_all: bool = False
    """The last batch has been fetched, and may still have to be handed out."""
    ended: bool = False
    """The last batch has been handed out."""
    kept: list[weakref.ref[Any]] | None = field(default_factory=list)
    """A tensor of each batch that was fetched before the first block, as long as the loop keeps
    them all; None if it does not."""
    newest: weakref.ref[Any] | None = None
    """A tensor of the batch that was fetched last."""
    guessed: bool = False
    """It was read whole and not kept, so it may be that of an evaluation."""
    blocks: int = 0
    closed: bool = False
    """A block has been its last one, as far as was known."""

    @property
    def running(self) -> bool:
        """Whether the loop may still be in it, as far as can be known."""
        if not self.counted:
            return self.loader() is not None
        alive = self.iterator is not None and self.iterator() is not None
        return alive or self.is_behind

    @property
    def is_behind(self) -> bool:
        """Whether the loop has read ahead, and has blocks to run on what it has."""
        self.count()
        return self.items.outstanding > 0 and self.items.reads_ahead is True

    @property
    def was_read_whole(self) -> bool:
        """Whether a loop that trains has had all of its batches, and has run no block on them."""
        if self.blocks or not (self.counted and self.trains):
            return False
        self.count()
        return self.items.exhausted and self.items.outstanding > 0

    @property
    def is_kept(self) -> bool:
        """Whether all of its batches are still there."""
        return bool(self.kept) and all(batch() is not None for batch in self.kept or ())

    @property
    def is_in_doubt(self) -> bool:
        """Whether the loop has had all of its batches and kept none, and lacks blocks on some: it
        may have left out what came before its first block, which looks like reading ahead."""
        return self.is_behind and self.ended and (self.newest is None or self.newest() is None)

    @property
    def ended_unseen(self) -> bool:
        """Whether the pass has ended without a block that was known to be its last one."""
        self.count()
        return self.counted and self.ended and not self.closed

    def count_fetch(self, batch: Any) -> None:
        """One more batch was fetched."""
        self.fetched += 1
        found = _tensor(batch)
        self.newest = None if found is None else weakref.ref(found)
        if self.kept is not None and not self.blocks:
            if self.newest is None or (self.kept and self.kept[0]() is None):
                self.kept = None
            else:
                self.kept.append(self.newest)

    def count(self) -> int:
        """Count what has been handed out; how many batches that is."""
        loader = self.loader()
        self.ended |= self.fetched_all and getattr(loader, "end_of_dataloader", True)
        skipped = getattr(loader, "skip_batches", 0)
        self.items.handed_out = max(self.fetched - (not self.ended) - skipped, 0)
        self.items.exhausted = self.ended
        return self.items.handed_out

    def open_block(self, window: Window, ends_item: bool) -> bool:
        """A block begins; return whether it is the last one of the pass."""
        items = self.items
        if not self.counted:
            self.closed = self._open_uncounted(self.loader())
            return self.closed
        self.count()
        if items.reads_ahead is False:
            items.done = max(items.done, items.handed_out - 1)
        if self.guessed and not window.is_open and window.index + items.outstanding < window.steps:
            raise RuntimeError(
                f"a prepared loader was read to its end before its first block, and the last "
                f"{items.outstanding} of its {items.handed_out} batches would be a tail. They were "
                f"moved or rebuilt since, so it can't be seen whether the loop trains on them. "
                f'{ADVICE}, or say tail="carry" if it does not'
            )
        self.closed = items.open_block() and ends_item
        return self.closed

    def _open_uncounted(self, loader: Any) -> bool:
        """A pass that began before it could be watched, or of a loader that fetches otherwise."""
        if loader is None or not loader.end_of_dataloader:
            return False
        try:
            length = len(loader)
        except TypeError:
            return True
        if self.blocks and self.blocks + 1 < length - getattr(loader, "skip_batches", 0):
            raise RuntimeError(
                f"the prepared loader has handed out its last batch, and {self.blocks} of "
                f"{length} batches have had a block: the loop reads ahead, and this pass can't be "
                f"counted. {ADVICE}"
            )
        return True

    def end_block(self) -> None:
        """A block of the loop has ended well."""
        self.blocks += 1
        self.kept = None
        self.items.end_block()


def _tensor(batch: Any) -> Any:
    """Something in `batch` that a loader hands out as it is, if it stays on its device."""
    while isinstance(batch, (Sequence, Mapping)) and not isinstance(batch, str) and len(batch):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return batch if isinstance(batch, Tensor) else None


class _Counted:
    """The batches of a loader, counted as they are fetched."""

    def __init__(self, one: LoaderPass, iterator: Iterator[Any], dispatched: bool) -> None:
        self._pass = one
        self._iterator = iterator
        self._dispatched = dispatched

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._dispatched:  # on one process, for all; see _count_dispatched
            return next(self._iterator)
        try:
            item = next(self._iterator)
        except StopIteration:
            self._pass.ended = True
            raise
        self._pass.count_fetch(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class LoaderWatch:
    """The passes through the prepared loaders of an Accelerator, as they are announced.

    `trains`: whether the loop is one that trains now.
    """

    def __init__(self, gradient_state: Any, trains: Callable[[], bool]) -> None:
        self.passes: list[LoaderPass] = []
        self._state = gradient_state
        self._trains = trains
        for loader in gradient_state.dataloader_references:
            if loader is not None:
                self.passes.append(LoaderPass(weakref.ref(loader)))
        self.uninstall = weakref.finalize(self, _install(gradient_state, weakref.ref(self)))

    def announce(self, loader: Any) -> None:
        """A pass through `loader` begins."""
        others = [p for p in self.passes if p.loader() not in (None, loader)]
        waiting = [p for p in self.running() if p in others]
        self.passes = [
            p
            for p in self.passes
            if p in waiting or (p.was_read_whole and (p in others or p.is_kept))
        ]
        one = LoaderPass(weakref.ref(loader), self._trains())
        self.passes.append(one)
        dispatched = isinstance(loader, DataLoaderDispatcher)
        if not (dispatched or isinstance(loader, DataLoaderShard)):
            return
        names = ["base_dataloader", "skip_batches", *["_fetch_batches"] * dispatched]
        require(loader, names, "the end of the data", "accelerate")
        base = loader.base_dataloader

        def count() -> _Counted:
            del base.__iter__
            counted = _Counted(one, iter(base), dispatched)
            one.counted, one.iterator = True, weakref.ref(counted)
            if dispatched:
                _count_dispatched(one, loader, counted)
            return counted

        base.__iter__ = count  # asked for by this name, once, when the loader starts

    def running(self) -> list[LoaderPass]:
        """The passes that the loop may be in, in the order in which they began."""
        active = self._active()
        return [
            one
            for one in self.passes
            if one.running and (any(one.loader() is a for a in active) or one.is_behind)
        ]

    def next_to(self, one: LoaderPass) -> LoaderPass | None:
        """The newest pass that began after `one` and has handed out a batch, if any."""
        since = self.passes[self.passes.index(one) + 1 :] if one in self.passes else self.passes
        begun = [later for later in since if later.running and later.count()]
        return begun[-1] if begun else None

    def read_whole(self) -> list[LoaderPass]:
        """The passes that a loop which trains may have read whole before its first block: those
        whose batches it keeps, or else all."""
        whole = [one for one in self.passes if one.was_read_whole]
        return [one for one in whole if one.is_kept] or whole

    def _active(self) -> list[Any]:
        return [loader for loader in self._state.dataloader_references if loader is not None]


def _count_dispatched(one: LoaderPass, loader: Any, counted: _Counted) -> None:
    """Count the batches of a dispatcher: the first process fetches them and all get a part."""
    this, fetch_batches = weakref.ref(loader), type(loader)._fetch_batches

    def fetch(iterator: Any) -> Any:
        dispatcher: Any = this()
        batch, info = fetch_batches(dispatcher, iterator)
        one.fetched_all = bool(dispatcher._stop_iteration)
        if info[0] is not None:
            one.count_fetch(batch)
        return batch, info

    def restore() -> None:
        one.count()  # the next pass resets what the loader knows of its end
        dispatcher = this()  # whose length may be unknown, so it is not asked for its truth
        if dispatcher is not None and vars(dispatcher).get("_fetch_batches") is fetch:
            del dispatcher._fetch_batches

    loader._fetch_batches = fetch
    weakref.finalize(counted, restore)


def _install(state: Any, watch: weakref.ref[LoaderWatch]) -> Callable[[], None]:
    """Let `watch` hear of each pass; return what takes that back."""
    announced = state._add_dataloader

    def add(loader: Any) -> None:
        announced(loader)
        if (one := watch()) is not None:
            one.announce(loader)

    state._add_dataloader = add

    def restore() -> None:
        # others may have come on top since; theirs goes on calling this one, which is harmless
        if vars(state).get("_add_dataloader") is add:
            if getattr(announced, "__self__", None) is None:
                state._add_dataloader = announced
            else:
                del state._add_dataloader

    return restore
