"""A run taken apart into the parts of a checkpoint, copied, or left where they have not changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accumplug.accumulator import Accumulator
from accumplug.checkpoint.model_state import Fingerprint
from accumplug.checkpoint.step_guard import StepGuard
from accumplug.checkpoint.train_state import State, TrainState
from accumplug.checkpoint.window_state import capture
from accumplug.dataloading.position import DataPosition
from accumplug.storage.codec import Encoded, encode
from accumplug.storage.commit import Job
from accumplug.storage.host_buffers import HostBuffers
from accumplug.storage.live import LiveTensors


class Snapshot:
    """Takes one save after the other.

    Rank 0 saves what is the same on all ranks; each rank saves what is its own, its shards of
    sharded tensors too. Weights and the optimizers' moments stay as they are inside of a window, so
    they are linked from the checkpoint before, unless somebody has written into them.
    """

    def __init__(
        self,
        accum: Accumulator,
        train_state: TrainState,
        order: DataPosition,
        rank: int,
        background: bool,
        copy: bool,
    ) -> None:
        self._accum = accum
        self._train_state = train_state
        self._order = order
        self._rank = rank
        self.copies_all = copy
        """Whether weights and moments are copied, not read from where they are."""
        self._buffers = HostBuffers() if background else None
        self._objects = HostBuffers()
        self._live = LiveTensors()
        self._guard = StepGuard()
        self._fingerprints: dict[str, Fingerprint] = {}
        self._tree: Any = None
        self._unchecked: set[str] = set()
        """Parts that another process has written, until they are linked for the first time."""

    def take(self, source: Path | None, data_pass: State | None, more: State) -> Job:
        """The next save, in a pass of that state, with `more` in this rank's part.

        `source`: the checkpoint that the last `take` has become, if it has become one. What is
        returned does not change until the next `take`, but for its live tensors, which an
        optimizer's step releases.
        """
        parts, link = {}, []
        self._live = LiveTensors()
        state = capture(self._accum, self._train_state, self._order, data_pass) | more
        parts[f"rank-{self._rank}"] = self._copied(f"rank-{self._rank}", encode(state))
        if self._train_state.stateful:
            name = f"objects-{self._rank}"
            if (others := self._changed_objects(name, source)) is None:
                link.append(name)
            else:
                parts[name] = others
        if self._rank == 0:
            progress = encode(self._train_state.progress(), "progress")
            parts["progress"] = self._copied("progress", progress)
        again: dict[str, Encoded] = {}
        if self._train_state.is_sharded:
            again = self._shards(parts)
        elif self._rank == 0:
            for name, fingerprint, get in self._linkable_parts():
                same = source is not None and self._fingerprints.get(name) == fingerprint
                if same and name not in self._unchecked:
                    link.append(name)
                    continue
                (again if same else parts)[name] = self._held_still(name, encode(get(), name))
                self._unchecked.discard(name)
                self._fingerprints[name] = fingerprint
        if self._live.sources:
            self._guard.watch(self._live)
        return Job(
            self._position(), parts, tuple(link), source if link else None, again, self._live
        )

    def is_saved(self, ranks: int) -> None:
        """The run is as it was when it was saved by `ranks` ranks: it has just been resumed."""
        if self._train_state.is_sharded and ranks != self._accum.parts.group.size:
            return  # cut into other pieces
        self._fingerprints = {name: fingerprint for name, fingerprint, _ in self._linkable_parts()}
        self._unchecked = set(self._fingerprints)

    def forget(self) -> None:
        """The last `take` has become no checkpoint."""
        self._fingerprints, self._tree = {}, None
        self.leave()

    def leave(self) -> None:
        """Nothing is in flight."""
        self._guard.leave()
        self._live.close()

    def _shards(self, parts: dict[str, Encoded]) -> dict[str, Encoded]:
        """Put this rank's shards of weights and moments into `parts`; return what is unchanged.

        Only rank 0 knows whether the last `take` has become a checkpoint, to be linked from.
        """
        again: dict[str, Encoded] = {}
        for name, fingerprint, get in self._linkable_parts():
            own, same = f"{name}-{self._rank}", self._fingerprints.get(name) == fingerprint
            (again if same else parts)[own] = self._held_still(own, encode(get(), own))
            self._fingerprints[name] = fingerprint
        return again

    def _linkable_parts(self) -> list[tuple[str, Fingerprint, Callable[[], Any]]]:
        train_state, updates = self._train_state, self._accum.updates
        return [
            (
                "model",
                (updates, *train_state.weights_fingerprint()),
                lambda: _one(train_state.weights()),
            ),
            (
                "optimizer",
                (updates, *train_state.optimizer_fingerprint()),
                lambda: _one(train_state.optimizer_states()),
            ),
        ]

    def _changed_objects(self, name: str, source: Path | None) -> Encoded | None:
        encoded = encode(self._train_state.object_states(), name)
        same = encoded.tree == self._tree and self._objects.holds(name, encoded)
        if same and source is not None and self._rank == 0:
            return None
        self._tree = encoded.tree
        return self._objects.copy(name, encoded)

    def _copied(self, name: str, encoded: Encoded) -> Encoded:
        return encoded if self._buffers is None else self._buffers.copy(name, encoded)

    def _held_still(self, part: str, encoded: Encoded) -> Encoded:
        """Weights or moments, which stay where they are, and copies of buffers and counts."""
        if self._buffers is None or self.copies_all:
            return self._copied(part, encoded)
        still = {n: t for n, t in encoded.tensors.items() if self._live.takes(t)}
        if part.startswith("model"):
            weights = self._train_state.places()
            still = {n: t for n, t in still.items() if t.data_ptr() in weights}
        for name, tensor in still.items():
            self._live.add(name, tensor)
        rest = {n: t for n, t in encoded.tensors.items() if n not in still}
        held = still | self._buffers.copy(part, Encoded(None, rest)).tensors
        return Encoded(encoded.tree, {name: held[name] for name in encoded.tensors})

    def _position(self) -> State:
        accum = self._accum
        return {
            "update": accum.updates,
            "micro_batch": accum.micro_batches,
            "epoch": accum.epoch,
            "position": accum.parts.state.position,
            "pending": accum.pending,
            "steps": accum.steps
            if accum.parts.state.window is None
            else accum.parts.state.window.steps,
        }


def _one(states: list[Any]) -> Any:
    """One model's state as it is, so that its file names the parameters; several in a list."""
    return states[0] if len(states) == 1 else states
