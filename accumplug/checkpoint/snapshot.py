"""A run taken apart into the parts of a checkpoint, copied, or left where they have not changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from accumplug.accumulator import Accumulator
from accumplug.checkpoint.division import BASE, STILL, keys_of
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
    sharded tensors too. Weights and the optimizers' moments stay as they are inside of a window,
    and frozen ones for longer (division.py), so they are linked from the checkpoint before, unless
    somebody has written into them.
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
        self._copies = self.copies_all = copy
        """Whether weights and moments are copied, not read from where they are."""
        self._buffers = HostBuffers() if background else None
        self._objects = HostBuffers()
        self._live = LiveTensors()
        self._guard = StepGuard()
        self._fingerprints: dict[str, Fingerprint] = {}
        self._tree: Any = None
        self._weights: Collection[int] = ()
        """Where the parameters are in memory."""
        self._leaves_out = False
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
        if self._train_state.is_sharded or self._rank == 0:
            link += self._take_large(parts, again, source)
        if self._live.sources:
            self._guard.watch(self._live)
        return Job(
            self._position(), parts, tuple(link), source if link else None, again, self._live
        )

    def is_saved(self, ranks: int, still: Mapping[str, list[Any]]) -> None:
        """The run is as it was when it was saved by `ranks` ranks: it has just been resumed.

        `still`: the keys that were in each part that held still.
        """
        if self._train_state.is_sharded and ranks != self._accum.parts.group.size:
            return  # cut into other pieces
        parts = self._linkable_parts()
        names = (BASE, *STILL.values())
        if still != {name: keys_of(get()) for name, _, get in parts if name in names}:
            return  # other weights are frozen now
        self._fingerprints = {name: fingerprint for name, fingerprint, _ in parts}
        self._unchecked = set(self._fingerprints)

    def forget(self) -> None:
        """The last `take` has become no checkpoint."""
        self._fingerprints, self._tree = {}, None
        self.leave()

    def leave(self) -> None:
        """Nothing is in flight."""
        self._guard.leave()
        self._live.close()

    def _take_large(
        self, parts: dict[str, Encoded], again: dict[str, Encoded], source: Path | None
    ) -> list[str]:
        """Weights and moments: put into `parts` or, unchanged, into `again`; or to be linked.

        Of shards only rank 0 knows whether the last `take` has become a checkpoint to link from,
        and a file of another process is checked before it is linked, so they are in `again`.
        """
        link, before, sharded = [], self._fingerprints, self._train_state.is_sharded
        self._fingerprints = {}
        for name, fingerprint, get in self._linkable_parts():
            self._fingerprints[name] = fingerprint
            same = before.get(name) == fingerprint and (sharded or source is not None)
            if same and not sharded and name not in self._unchecked:
                link.append(name)
                continue
            own = f"{name}-{self._rank}" if sharded else name
            (again if same else parts)[own] = self._held_still(own, encode(get(), own))
            self._unchecked.discard(name)
        return link

    def _linkable_parts(self) -> list[tuple[str, Fingerprint, Callable[[], Any]]]:
        """Name, fingerprint and state of each large part.

        The parts of `STILL` are as they were while they have the same fingerprint, the others
        within one update. Under copy=True no fingerprint is trusted for longer than that.
        """
        train_state, updates = self._train_state, self._accum.updates
        division, since = train_state.divide(), updates if self._copies else -1
        self._weights, self._leaves_out = division.weights.keys(), bool(division.left_out)
        weights, moments = train_state.weights, train_state.optimizer_states
        parts: list[tuple[str, Fingerprint, Callable[[], Any]]] = [
            (
                "model",
                (updates, *division.weights_fingerprint()),
                lambda: _one(division.split_weights(weights())[0]),
            ),
            (
                "optimizer",
                (updates, division.indices, *train_state.optimizer_fingerprint()),
                lambda: _one(division.split_moments(moments())[0]),
            ),
        ]
        if frozen := division.frozen_fingerprint():
            parts.append(
                ("frozen", (since, *frozen), lambda: _one(division.split_weights(weights())[1]))
            )
        if division.left_out:
            marks = division.left_out.values()
            parts.append((BASE, (*marks,), lambda: _one(train_state.left_out(division))))
        if resting := division.moments_fingerprint():
            parts.append(
                ("moments", (since, *resting), lambda: _one(division.split_moments(moments())[1]))
            )
        return parts

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
        if part.startswith(("model", "frozen")):
            weights = self._weights
            still = {n: t for n, t in still.items() if t.data_ptr() in weights}
        for name, tensor in still.items():
            self._live.add(name, tensor)
        rest = {n: t for n, t in encoded.tensors.items() if n not in still}
        held = still | self._buffers.copy(part, Encoded(None, rest)).tensors
        return Encoded(encoded.tree, {name: held[name] for name in encoded.tensors})

    def _position(self) -> State:
        accum = self._accum
        position = {
            "update": accum.updates,
            "micro_batch": accum.micro_batches,
            "epoch": accum.epoch,
            "position": accum.parts.state.position,
            "pending": accum.pending,
            "steps": accum.steps
            if accum.parts.state.window is None
            else accum.parts.state.window.steps,
        }
        return position | {"frozen": "left out"} if self._leaves_out else position


def _one(states: list[Any]) -> Any:
    """One model's state as it is, so that its file names the parameters; several in a list."""
    return states[0] if len(states) == 1 else states
