"""A loss over all rows of a large batch, through micro-batches (GradCache, arXiv 2101.06983).

In-batch negatives make the loss of 64 rows no mean over the losses of 8 times 8. But it needs
only the embeddings of all rows at once, which are small. So they are computed first without a
graph, the loss gives a gradient for each of them, and each micro-batch runs again with a graph
and hands its part of that gradient on to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from accumplug.dataloading.batch_tree import items_in, leaves, take
from accumplug.parallel.group import DataParallelGroup

Embed = Callable[[Any], "Tensor | Sequence[Tensor]"]


class Blocks(Protocol):
    """What runs micro-batches: an Accumulator."""

    def __call__(
        self, model: nn.Module, *models: nn.Module, weight: Any = 1
    ) -> AbstractContextManager[Any]: ...

    def split(self, batch: Any, size: int) -> Iterator[Any]: ...

    def backward(self, loss: Tensor, *, reduction: Any) -> None: ...


class RandomState:
    """The random numbers that one forward began with, on the CPU and the devices of its batch."""

    def __init__(self, batch: Any) -> None:
        self._host = torch.get_rng_state()
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
        self._devices, self._states = get_device_states(*tensors)
        kinds = {t.device.type for t in tensors} - {"cpu", "meta"}
        self._kind = next(iter(kinds), None)

    def restore(self) -> None:
        """Let the next forward draw the same numbers."""
        torch.set_rng_state(self._host)
        if self._kind is not None:
            set_device_states(self._devices, self._states, device_type=self._kind)


def contrastive(
    blocks: Blocks,
    group: DataParallelGroup,
    models: Sequence[nn.Module],
    batch: Any,
    size: int,
    loss: Callable[..., Tensor],
    embed: Embed | None,
) -> Tensor:
    """See `Accumulator.contrastive`."""
    embed = _caller(models[0]) if embed is None else embed
    rows = items_in(batch)
    states, found = [], []
    with torch.no_grad():
        for start in range(0, rows, size):
            part = take(batch, slice(start, start + size))
            states.append(RandomState(part))
            found.append(_sides(embed(part)))
    torch.clear_autocast_cache()  # torch 2.8 to 2.10 would reuse its casts, which have no graph
    own = [torch.cat(side).requires_grad_() for side in zip(*found, strict=True)]
    value, gradients, everyone, used = _loss_of_all(group, own, rows, loss)
    begin = 0
    for part in blocks.split(batch, size):
        count = items_in(part)
        state = states[begin // size]
        with blocks(*models, weight=count):
            state.restore()
            sides = _sides(embed(part))
            pairs = zip(sides, gradients, strict=True)
            products = [(s * g[begin : begin + count]).sum() for s, g in pairs]
            surrogate = everyone * torch.stack(products).sum()
            for parameter, gradient in used:  # every rank has all of it: the sum is over its rows
                surrogate = surrogate + count * (parameter * gradient).sum()
            # its value is the loss, for the log; its gradient is that of the embeddings
            surrogate = surrogate - surrogate.detach() + count * value
            blocks.backward(surrogate, reduction="sum")
        begin += count
    return value


def _caller(model: nn.Module) -> Embed:
    """Call the model with a batch: a tensor, the tensors of a tuple, or those of a mapping."""

    def call(part: Any) -> Any:
        if isinstance(part, Mapping):
            return model(**part)
        return model(*part) if isinstance(part, (tuple, list)) else model(part)

    return call


def _sides(embeddings: Any) -> tuple[Tensor, ...]:
    sides = (embeddings,) if isinstance(embeddings, Tensor) else tuple(embeddings)
    if not all(isinstance(side, Tensor) for side in sides):
        kinds = ", ".join(type(side).__name__ for side in sides)
        raise ValueError(f"embed returns a tensor of rows, or several; got {kinds}")
    return sides


def _loss_of_all(
    group: DataParallelGroup, own: list[Tensor], rows: int, loss: Callable[..., Tensor]
) -> tuple[Tensor, Sequence[Tensor], int, list[tuple[Tensor, Tensor]]]:
    """The loss over the rows of all ranks, its gradient for this rank's, and how many there are;
    and for what else the loss has used: a temperature that is learnt."""
    everyone, counts = rows, [rows]
    sides = own
    if group.size > 1:
        counts = _counts(group, rows, own[0].device)
        everyone = sum(counts)
        sides = [_gather(group, side, counts) for side in own]
    with torch.enable_grad():
        value = loss(*sides)
        if value.numel() != 1:
            raise ValueError(f"loss returns one element, a mean over rows; got {value.numel()}")
        used = _leaves_behind(value, own)
        gradients = torch.autograd.grad(value, [*own, *used])
    mine, theirs = gradients[: len(own)], gradients[len(own) :]
    return value.detach(), mine, everyone, list(zip(used, theirs, strict=True))


def _leaves_behind(value: Tensor, known: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that `value` has a gradient for, but those in `known`."""
    seen: set[Any] = set()
    found: dict[int, Tensor] = {}
    nodes = [value.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        nodes += [following for following, _ in node.next_functions]
    return [leaf for key, leaf in found.items() if key not in {id(one) for one in known}]


def _counts(group: DataParallelGroup, rows: int, device: torch.device) -> list[int]:
    """How many rows each rank has."""
    own = torch.tensor([rows], device=device)
    all_counts = [torch.empty_like(own) for _ in range(group.size)]
    dist.all_gather(all_counts, own, group=group.group)
    return torch.cat(all_counts).tolist()


def _gather(group: DataParallelGroup, side: Tensor, counts: list[int]) -> Tensor:
    """The rows of all ranks in the order of ranks; those of this one keep their graph."""
    padded = side.detach().new_zeros(max(counts), *side.shape[1:])
    padded[: len(side)] = side.detach()
    places = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(places, padded, group=group.group)
    found = [place[:count] for place, count in zip(places, counts, strict=True)]
    found[group.rank] = side
    return torch.cat(found)
