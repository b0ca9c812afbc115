"""Weights and moments that hold still from one update to the next, told from those that don't.

They are parts of a checkpoint of their own, so that an update rewrites the others alone. A frozen
weight, and the moments of one, hold still: no optimizer has it, or it requires no gradient. That
they do is not taken for granted: a part is linked only while its tensors are the same ones, nobody
has written into them (as torch counts it), and `SAMPLES` words of each are what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accumplug.checkpoint import optimizer_state
from accumplug.checkpoint.model_state import Fingerprint, fingerprint
from accumplug.errors import CheckpointError
from accumplug.parallel import fsdp
from accumplug.storage.codec import is_dense
from accumplug.storage.layout import Checkpoint, read_part
from accumplug.storage.live import SAMPLES

STILL = {"model": "frozen", "optimizer": "moments"}
"""Of each large part, the one beside it that holds still."""


class Division:
    """What of a run holds still, as it is now.

    Args:
        parameters: of all models; of a sharded one the shards.
        optimizers: those whose states are saved in the part "optimizer".
        holders: everything that steps on parameters, the optimizers too.
        sharded: each rank has a part of the parameters.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizers: Sequence[Optimizer],
        holders: Iterable[Any],
        sharded: bool,
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
        self._frozen = [p for place, p in self.weights.items() if place not in trained]
        self.places = frozenset(self.weights) - trained
        """Where the frozen ones are."""
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
        self.indices = tuple([tuple(states) for states in self._moments])
        """Of each optimizer the parameters whose moments hold still."""

    def weights_fingerprint(self) -> Fingerprint:
        """Of all weights, and which of them are frozen; of no buffers, which a forward changes."""
        return self.places, *[(place, p._version) for place, p in self.weights.items()]

    def frozen_fingerprint(self) -> Fingerprint:
        """Of the frozen weights; () if there are none."""
        return (*map(fingerprint, self._frozen), _samples(self._frozen)) if self._frozen else ()

    def moments_fingerprint(self) -> Fingerprint:
        """Of the moments that hold still; () if there are none."""
        if not any(self._moments):
            return ()
        tensors = list(_tensors(self._moments))
        return self.indices, *optimizer_state.fingerprint(self._moments), _samples(tensors)

    def split_weights(self, states: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The models' state_dicts, without the frozen weights and those alone."""
        if not self.places:
            return list(states), []
        return _split(states, [self._is_frozen] * len(states))

    def split_moments(self, states: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The optimizers' states, without the moments that hold still and those alone."""

        def rests(moments: dict[int, Any]) -> Callable[[Any, Any], bool]:
            # torch gives the states themselves; an optimizer of another make may number others
            return lambda index, value: index in moments and moments[index] is value

        if not any(self._moments):
            return list(states), []
        return _split(states, [rests(moments) for moments in self._moments])

    def _is_frozen(self, name: str, value: Any) -> bool:
        return isinstance(value, Tensor) and fsdp.local(value).data_ptr() in self.places


def _split(
    states: Sequence[Any], rules: Sequence[Callable[[Any, Any], bool]]
) -> tuple[list[Any], list[Any]]:
    changing, still = [], []
    for state, rests in zip(states, rules, strict=True):
        rest = {key: value for key, value in state.items() if rests(key, value)}
        still.append(rest)
        changing.append(_without(state, rest) if rest else state)
    return changing, still


def _without(state: Any, rest: dict[Any, Any]) -> Any:
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


def _samples(tensors: Sequence[Tensor]) -> bytes:
    """Some elements of each tensor, spread over it. On a GPU it waits for them once."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        count, tensor = tensor.numel(), tensor.detach()
        if count and not is_dense(tensor.shape, tensor.stride()):
            tensor = tensor.reshape(-1)
        step = max(1, count // SAMPLES)
        spread = tensor.as_strided((-(-count // step),), (step,))
        kinds.setdefault((tensor.device, tensor.dtype), []).append(spread)
    found = [torch.cat(each).cpu() for each in kinds.values()]
    return b"".join(each.view(torch.uint8).numpy().tobytes() for each in found)


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
