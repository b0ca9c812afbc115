"""Weights and moments that hold still from one update to the next, told from those that don't.

They are parts of a checkpoint of their own, so that an update rewrites the others alone. A frozen
weight, and the moments of one, hold still: no optimizer has it, or it requires no gradient. That
they do is not taken for granted: a part is linked only while its tensors are the same ones, nobody
has written into them (as torch counts it), and `SAMPLES` words of each are what they were.

Frozen weights may be left out altogether: what the model was when its Checkpointer was built, and
still is, has to be there again when the run is resumed, and is compared by checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accumplug.checkpoint import optimizer_state
from accumplug.checkpoint.model_state import Fingerprint
from accumplug.errors import CheckpointError
from accumplug.parallel import fsdp
from accumplug.storage.codec import is_dense
from accumplug.storage.layout import Checkpoint, read_part
from accumplug.storage.live import SAMPLES
from accumplug.storage.safetensors_io import digest

Mark = tuple[int, int, bytes]
"""Of a tensor that holds still: where it is, its version, and samples of it."""

BASE = "base"
"""The part that describes the weights that are left out."""

STILL = {"model": "frozen", "optimizer": "moments"}
"""Of each large part, the one beside it that holds still."""


class Division:
    """What of a run holds still, as it is now.

    Args:
        parameters: of all models; of a sharded one the shards.
        optimizers: those whose states are saved in the part "optimizer".
        holders: everything that steps on parameters, the optimizers too.
        sharded: each rank has a part of the parameters.
        base: the marks of frozen weights that are left out for as long as they have them.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizers: Sequence[Optimizer],
        holders: Iterable[Any],
        sharded: bool,
        base: Collection[Mark] = (),
    ) -> None:
        trained = set()
        for holder in holders:
            for group in holder.param_groups:
                for p in group["params"]:
                    if p.requires_grad:
                        trained.add((fsdp.local(p) if sharded else p).data_ptr())
        parts = parameters if not sharded else map(fsdp.local, parameters)
        self.weights = {p.data_ptr(): p for p in parts}
        """This rank's part of each parameter, by its place in memory."""
        self.weights.pop(0, None)  # of no element
        frozen = [self.weights[place] for place in self.weights if place not in trained]
        self.marks = _marks(frozen) if frozen else []
        """Of the frozen ones."""
        self.left_out: dict[int, Mark] = {}
        """Those of them that are not saved, by their places."""
        if base:
            self.left_out = {mark[0]: mark for mark in self.marks if mark in base}
        self.places = frozenset(self.weights) - trained - self.left_out.keys()
        """Where those are that are saved."""
        self._moments: list[dict[int, Any]] = []
        for optimizer in optimizers:
            index, states = 0, {}
            for group in optimizer.param_groups:
                for p in group["params"]:
                    place = (fsdp.local(p) if sharded else p).data_ptr()
                    if place not in trained and place and p in optimizer.state:
                        states[index] = optimizer.state[p]
                    index += 1
            self._moments.append(states)
        self.indices = tuple(map(tuple, self._moments))
        """Of each optimizer the parameters whose moments hold still."""

    def weights_fingerprint(self) -> Fingerprint:
        """Of all weights, and which of them are frozen; of no buffers, which a forward changes."""
        return (
            self.places,
            *self.left_out,
            *[(place, p._version) for place, p in self.weights.items()],
        )

    def frozen_fingerprint(self) -> Fingerprint:
        """Of the frozen weights that are saved; () if there are none."""
        if not self.places:
            return ()
        return tuple([mark for mark in self.marks if mark[0] in self.places])

    def moments_fingerprint(self) -> Fingerprint:
        """Of the moments that hold still; () if there are none."""
        if not any(self._moments):
            return ()
        marks = _marks(list(_tensors(self._moments)))
        return self.indices, *optimizer_state.fingerprint(self._moments), *marks

    def split_weights(self, states: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The models' state_dicts, without the frozen weights and those alone that are saved."""
        if not self.marks:
            return list(states), []
        kept, count = list(states), len(states)
        if self.left_out:
            kept, _ = _split(states, [lambda _, value: _place(value) in self.left_out] * count)
        return _split(kept, [lambda _, value: _place(value) in self.places] * count)

    def describe_left_out(
        self, states: Sequence[Any], digests: dict[Mark, str]
    ) -> list[dict[str, Any]]:
        """By model and name what the weights are that are left out. `digests` are kept there."""
        found: list[dict[str, Any]] = []
        for state in states:
            found.append({})
            for name, value in state.items():
                if (mark := self.left_out.get(_place(value))) is not None:
                    if mark not in digests:
                        digests[mark] = digest(fsdp.local(value))
                    found[-1][name] = described(value, digests[mark])
        return found

    def split_moments(self, states: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The optimizers' states, without the moments that hold still and those alone."""

        def rests(moments: dict[int, Any]) -> Callable[[Any, Any], bool]:
            # torch gives the states themselves; an optimizer of another make may number others
            return lambda index, value: index in moments and moments[index] is value

        if not any(self._moments):
            return list(states), []
        return _split(states, [rests(moments) for moments in self._moments])


def _place(value: Any) -> int:
    return fsdp.local(value).data_ptr() if isinstance(value, Tensor) else 0


def described(tensor: Tensor, checksum: str) -> dict[str, Any]:
    """Of a weight that is left out, or of this rank's part of it, what a resume compares."""
    own = fsdp.local(tensor)
    return {"dtype": f"{own.dtype}", "shape": list(own.shape), "checksum": checksum}


def _split(
    states: Sequence[Any], rules: Sequence[Callable[[Any, Any], bool]]
) -> tuple[list[Any], list[Any]]:
    """Each state without what its rule takes, and that alone."""
    changing, still = [], []
    for state, rests in zip(states, rules, strict=True):
        rest = {key: value for key, value in state.items() if rests(key, value)}
        still.append(rest)
        changing.append(_without(state, rest))
    return changing, still


def _without(state: Any, rest: dict[Any, Any]) -> Any:
    if not rest:
        return state
    kept = type(state)((key, value) for key, value in state.items() if key not in rest)
    if metadata := getattr(state, "_metadata", None):
        kept._metadata = metadata
    return kept


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield fsdp.local(value)
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _marks(tensors: Sequence[Tensor]) -> list[Mark]:
    """Of each tensor its place, its version, and some elements that are spread over it.

    On a GPU it waits for them, once for each dtype.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    spread: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        count, tensor = tensor.numel(), tensor.detach()
        if count and not is_dense(tensor.shape, tensor.stride()):
            tensor = tensor.reshape(-1)
        step = max(1, count // SAMPLES)
        spread.append(tensor.as_strided((-(-count // step),), (step,)))
        kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
    samples = [b""] * len(spread)
    for indices in kinds.values():
        found = torch.cat([spread[index] for index in indices]).cpu().view(torch.uint8)
        data, start = found.numpy().tobytes(), 0
        for index in indices:
            end = start + spread[index].numel() * spread[index].dtype.itemsize
            samples[index], start = data[start:end], end
    return [(t.data_ptr(), t._version, s) for t, s in zip(tensors, samples, strict=True)]


class JoinedParts:
    """Reads the large parts of a checkpoint, each with what is in the part beside it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.still: dict[str, list[Any]] = {}
        """The keys that were found in each part that holds still, of the first rank read."""

    def read(self, part: str, *, mapped: bool = False) -> Any:
        """The state that was saved as `part` of `STILL`, of one rank or of all."""
        name, dash, rank = part.partition("-")
        state = read_part(self._checkpoint, part, mapped=mapped)
        beside = f"{STILL[name]}{dash}{rank}"
        if beside not in self._checkpoint.parts:
            return state
        still = read_part(self._checkpoint, beside, mapped=mapped)
        self.still.setdefault(STILL[name], keys_of(still))
        try:
            return _join(state, still)
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._checkpoint.path}: {beside} doesn't fit {part}"
            ) from error


def keys_of(still: Any) -> list[Any]:
    """Of a part that holds still the keys of each model or optimizer."""
    each = still if isinstance(still, list) else [still]
    return [list(state) for state in each if isinstance(state, dict)]


def _join(state: Any, still: Any) -> Any:
    if isinstance(state, list):
        return [_join(one, other) for one, other in zip(state, still, strict=True)]
    state.update(still)
    return state
