"""What prepared loaders have handed out, in an Accelerate loop that does not use `accum.batches`.

Read from accelerate 1.15, data_loader.py: a prepared loader announces each pass to the gradient
state (`_add_dataloader`), gets its batches from `base_dataloader.__iter__()` one ahead of the loop,
and stays announced for good if the loop is left by `break`. So each pass is met when it is
announced, and its batches are counted on their way; a pass whose iterator is gone was left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any  # Accelerate's loaders and states have no types

from accelerate.data_loader import DataLoaderShard

from accumplug.core.state import ItemCount
from accumplug.parallel.private import require


@dataclass
class LoaderPass:
    """One pass through one prepared loader."""

    loader: weakref.ref[Any]
    items: ItemCount = field(default_factory=ItemCount)
    counted: bool = False
    """Its batches go through a `_Counted`."""
    iterator: weakref.ref[Any] | None = None
    fetched: int = 0
    ended: bool = False
    """The loader has fetched its last batch."""
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
        self._count()
        return self.items.outstanding > 0 and self.items.reads_ahead is True

    def _count(self) -> None:
        skipped = getattr(self.loader(), "skip_batches", 0)
        self.items.handed_out = max(self.fetched - (not self.ended) - skipped, 0)
        self.items.exhausted = self.ended

    def open_block(self) -> bool:
        """A block begins; return whether it is the last one of the pass."""
        items = self.items
        if not self.counted:
            self.closed = self._open_uncounted(self.loader())
            return self.closed
        self._count()
        if items.reads_ahead is False:
            items.done = max(items.done, items.handed_out - 1)
        return items.open_block()

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
                f"counted. Let it go through `for batch in accum.batches(loader)`"
            )
        return True

    def end_block(self) -> None:
        """A block of the loop has ended well."""
        self.blocks += 1
        self.items.end_block()


class _Counted:
    """The batches of a loader, counted as they are fetched."""

    def __init__(self, one: LoaderPass, iterator: Iterator[Any]) -> None:
        self._pass = one
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            item = next(self._iterator)
        except StopIteration:
            self._pass.ended = True
            raise
        self._pass.fetched += 1
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class LoaderWatch:
    """The passes through the prepared loaders of an Accelerator, as they are announced."""

    def __init__(self, gradient_state: Any) -> None:
        self.passes: list[LoaderPass] = []
        self._state = gradient_state
        for loader in gradient_state.dataloader_references:
            if loader is not None:
                self.passes.append(LoaderPass(weakref.ref(loader)))
        self.uninstall = weakref.finalize(self, _install(gradient_state, weakref.ref(self)))

    def announce(self, loader: Any) -> None:
        """A pass through `loader` begins."""
        self.passes = [p for p in self.running() if p.loader() is not loader]
        one = LoaderPass(weakref.ref(loader))
        self.passes.append(one)
        if not isinstance(loader, DataLoaderShard):  # a dispatcher fetches for all processes
            return
        require(loader, ["base_dataloader", "skip_batches"], "the end of the data", "accelerate")
        base = loader.base_dataloader

        def count() -> _Counted:
            del base.__iter__
            counted = _Counted(one, iter(base))
            one.counted, one.iterator = True, weakref.ref(counted)
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

    def _active(self) -> list[Any]:
        return [loader for loader in self._state.dataloader_references if loader is not None]


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
