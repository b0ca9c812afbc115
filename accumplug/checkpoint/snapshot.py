"""A run taken apart into the parts of a checkpoint, copied, or left where they have not changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accumplug.accumulator import Accumulator
from accumplug.checkpoint.train_state import Stamp, State, Subject
from accumplug.checkpoint.window_state import take
from accumplug.dataloading.position import Order
from accumplug.storage.codec import Encoded, encode
from accumplug.storage.commit import Job
from accumplug.storage.host_buffers import Memory


class Snapshot:
    """Takes one save after the other.

    Rank 0 saves what is the same on all ranks; each rank saves what is its own, its pieces of
    sharded tensors too. Weights and the optimizers' moments stay as they are inside of a window, so
    they are linked from the checkpoint before, unless somebody has written into them.
    """

    def __init__(
        self, accum: Accumulator, subject: Subject, order: Order, rank: int, copies: bool
    ) -> None:
        self._accum = accum
        self._subject = subject
        self._order = order
        self._rank = rank
        self._memory = Memory() if copies else None
        self._others = Memory()
        self._stamps: dict[str, Stamp] = {}
        self._held: dict[str, Encoded] = {}
        self._tree: Any = None

    def take(self, source: Path | None, more: State) -> Job:
        """The next save, with `more` in this rank's part.

        `source`: the checkpoint that the last `take` has become, if it has become one. What is
        returned does not change until the next `take`.
        """
        parts, link = {}, []
        state = take(self._accum, self._subject, self._order) | more
        parts[f"rank-{self._rank}"] = self._copied(f"rank-{self._rank}", encode(state))
        if self._subject.stateful:
            name = f"objects-{self._rank}"
            if (others := self._changed_others(name, source)) is None:
                link.append(name)
            else:
                parts[name] = others
        if self._rank == 0:
            parts["progress"] = encode(self._subject.progress(), "progress")
        again: dict[str, Encoded] = {}
        if self._subject.is_sharded:
            again = self._pieces(parts)
        elif self._rank == 0:
            for name, stamp, get in self._big():
                if source is not None and self._stamps.get(name) == stamp:
                    link.append(name)
                    continue
                parts[name] = self._copied(name, encode(get(), name))
                self._stamps[name] = stamp
        return Job(self._position(), parts, tuple(link), source if link else None, again)

    def is_saved(self, ranks: int) -> None:
        """The run is as it was when it was saved by `ranks` ranks: it has just been resumed."""
        if self._subject.is_sharded and ranks != self._accum._ranks.size:
            return  # cut into other pieces
        self._stamps = {name: stamp for name, stamp, _ in self._big()}

    def forget(self) -> None:
        """The last `take` has become no checkpoint."""
        self._stamps, self._tree = {}, None

    def _pieces(self, parts: dict[str, Encoded]) -> dict[str, Encoded]:
        """Put this rank's pieces of weights and moments into `parts`; return what is unchanged.

        That is kept, as only rank 0 knows whether the last `take` has become a checkpoint.
        """
        again: dict[str, Encoded] = {}
        for name, stamp, get in self._big():
            own, same = f"{name}-{self._rank}", self._stamps.get(name) == stamp
            if not same or own not in self._held:
                self._held[own] = self._copied(own, encode(get(), own))
            (again if same else parts)[own] = self._held[own]
            self._stamps[name] = stamp
        return again

    def _big(self) -> list[tuple[str, Stamp, Callable[[], Any]]]:
        subject, updates = self._subject, self._accum.updates
        return [
            ("model", (updates, *subject.weights_stamp()), lambda: _one(subject.weights())),
            ("optimizer", (updates, *subject.moments_stamp()), lambda: _one(subject.moments())),
        ]

    def _changed_others(self, name: str, source: Path | None) -> Encoded | None:
        encoded = encode(self._subject.others(), name)
        same = encoded.tree == self._tree and self._others.holds(name, encoded)
        if same and source is not None and self._rank == 0:
            return None
        self._tree = encoded.tree
        return self._others.copy(name, encoded)

    def _copied(self, name: str, encoded: Encoded) -> Encoded:
        return encoded if self._memory is None else self._memory.copy(name, encoded)

    def _position(self) -> State:
        accum = self._accum
        return {
            "update": accum.updates,
            "micro_batch": accum.micro_batches,
            "epoch": accum.epoch,
            "position": accum.position,
            "pending": accum.pending,
            "steps": accum.steps if accum._window is None else accum._window.steps,
        }


def _one(states: list[Any]) -> Any:
    """One model's state as it is, so that its file names the parameters; several in a list."""
    return states[0] if len(states) == 1 else states
