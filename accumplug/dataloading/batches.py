"""What `Accumulator.batches` returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from accumplug.core.state import LoopState

T = TypeVar("T")


class Batches(Iterator[T]):
    """One pass, as `Accumulator.batches` returns it. It has the length of the loader, if any.

    It keeps its `owner` alive, which the loop may have no other name for.
    """

    def __init__(
        self, owner: object, state: LoopState, loader: Iterable[T], items: Iterator[T]
    ) -> None:
        self._owner = owner
        self._state = state
        self._loader = loader
        self._items = items

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return next(self._items)

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return len(self._loader)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the item in hand is the last one, as Accelerate's loaders say it."""
        data_pass = self._state.data_pass
        return data_pass is not None and data_pass.items.exhausted
