"""Counting gradient reductions where they happen: in a communication hook of DDP."""

# No `from __future__ import annotations`: DDP reads the hook's annotations, and wants no strings.

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import GradBucket, HashStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accumplug.accumulator import Accumulator
from accumplug.dataloading.batch_tree import Batch, items_in

__all__ = ["Losses", "StepResult", "SyncCounter", "sync_counter", "train_one_optimizer_step"]

Loss: TypeAlias = Callable[..., Tensor] | nn.Module
Losses: TypeAlias = Loss | Mapping[str, Loss]
IGNORED = -100  # the default ignore_index of torch's losses


def call_loss(loss_fn: Losses, model: nn.Module, batch: Batch) -> Tensor:
    """Compute the loss of `model` on `batch`.

    `loss_fn` is called as `loss_fn(model, batch)`. A criterion of torch (`nn.CrossEntropyLoss()`,
    `torch.nn.functional.mse_loss`) is called as `loss_fn(model(inputs), targets)`, which needs a
    batch that is a pair. A mapping of named losses is summed.

    Raises:
        TypeError: `loss_fn` is neither of them, or returns something that is no tensor.
        ValueError: the loss is no 0-dim tensor, or does not require a gradient.
    """
    if isinstance(loss_fn, Mapping):
        if not loss_fn:
            raise ValueError("loss_fn is an empty mapping: give at least one loss")
        first, *others = (call_loss(one, model, batch) for one in loss_fn.values())
        return sum(others, first)
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function or a criterion of torch, got {loss_fn!r}")
    value: Any  # the user's function may return anything
    if is_criterion(loss_fn):
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise ValueError(
                "a criterion of torch needs a batch that is a pair (inputs, targets), got a "
                f"{type(batch).__name__}; for other batches write loss_fn(model, batch)"
            )
        value = loss_fn(model(batch[0]), batch[1])
    else:
        value = loss_fn(model, batch)
    if not isinstance(value, Tensor):
        inside = "; return its .loss" if isinstance(getattr(value, "loss", None), Tensor) else ""
        raise TypeError(f"the loss must be a 0-dim tensor, got a {type(value).__name__}{inside}")
    if value.dim() != 0:
        shape = tuple(value.shape)
        raise ValueError(f"the loss must be a 0-dim tensor, got a tensor of shape {shape}")
    if not value.requires_grad:
        raise ValueError("the loss does not depend on any parameter that requires a gradient")
    return value


def is_criterion(loss_fn: Losses) -> bool:
    """Say whether a loss takes outputs and targets: a module, or one of torch.nn.functional."""
    inner = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    of_torch = getattr(inner, "__module__", "") == "torch.nn.functional"
    return isinstance(loss_fn, nn.Module) or of_torch


def ignored_label(loss_fn: Losses) -> int | None:
    """Return the label that a criterion of torch ignores, and None for any other loss."""
    if isinstance(loss_fn, partial):
        options = loss_fn.keywords
        return options.get("ignore_index", ignored_label(loss_fn.func))
    if loss_fn in (F.cross_entropy, F.nll_loss):
        return IGNORED
    label = getattr(loss_fn, "ignore_index", None)
    return label if isinstance(label, int) else None


def _count_items(loss_fn: Losses, batch: Batch) -> float:
    """Count the targets that a criterion does not ignore, or the rows for any other loss."""
    ignored = None if isinstance(loss_fn, Mapping) else ignored_label(loss_fn)
    if ignored is None or not isinstance(batch, list | tuple) or len(batch) != 2:
        return items_in(batch)
    targets = batch[1]
    return items_in(batch) if targets.is_floating_point() else int((targets != ignored).sum())


@dataclass
class SyncCounter:
    """The counter that `sync_counter` yields.

    Attributes:
        model: the model wrapped in DistributedDataParallel; train this one.
        syncs: backward passes whose gradients were reduced over the ranks.
        buckets: calls of the communication hook; a reduction makes one call per DDP bucket.
    """

    model: nn.Module
    syncs: int = 0
    buckets: int = 0


@contextmanager
def sync_counter(
    model: nn.Module, *, find_unused_parameters: bool = False
) -> Iterator[SyncCounter]:
    """Count the gradient reductions that really run in this block.

    >>> with sync_counter(model) as counter:
    ...     train(counter.model)
    >>> print(counter.syncs)

    Under torchrun the reductions run over the existing process group. In a single process a
    group of one rank is made (gloo, no network) and destroyed afterwards, so that the same
    reductions run and are counted. The count comes from a communication hook, not from
    bookkeeping. A model that is already in DDP is wrapped again with the same settings, because
    DDP accepts one hook and never gives it back.

    Args:
        model: the bare model, or a model in DDP.
        find_unused_parameters: for a bare model with parameters that a loss does not reach; as
            in DDP.

    Raises:
        TypeError: `model` is not a torch module.
    """
    check_module(model)
    made_group = not dist.is_initialized()
    if made_group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    counter = SyncCounter(model)
    try:
        counter.model = wrapped = _wrap(model, find_unused_parameters)
        wrapped.register_comm_hook((counter, wrapped.process_group), _count)
        yield counter
    finally:
        counter.model = model  # the reducer has to go before its group
        if made_group:
            dist.destroy_process_group()


def check_module(model: nn.Module) -> None:
    """Raise a TypeError if `model` is not a torch module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}")


class _TransparentDDP(DistributedDataParallel):
    """DDP with the attributes of its model, as a loss may use them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _wrap(model: nn.Module, find_unused_parameters: bool) -> DistributedDataParallel:
    if not isinstance(model, DistributedDataParallel):
        return _TransparentDDP(model, find_unused_parameters=find_unused_parameters)
    settings = {"find_unused_parameters", "gradient_as_bucket_view", "forward_sync_buffers"}
    kept = {name: getattr(model, name) for name in settings if hasattr(model, name)}
    return _TransparentDDP(model.module, process_group=model.process_group, **kept)


def _count(state: tuple[SyncCounter, ProcessGroup], bucket: GradBucket) -> Future[Tensor]:
    counter, group = state
    counter.buckets += 1
    counter.syncs += bucket.is_last()
    return allreduce_hook(group, bucket)


@dataclass(frozen=True)
class StepResult:
    """The result of `train_one_optimizer_step`.

    Attributes:
        micro_batches: forward and backward passes on this rank.
        syncs: gradient reductions, counted in a communication hook.
        loss: weighted mean over all micro-batches and ranks.
        grad_norm: norm of the gradient before clipping.
        stepped: whether the optimizer stepped; it does not if the gradient is not finite.
    """

    micro_batches: int
    syncs: int
    loss: float
    grad_norm: float | None
    stepped: bool


def train_one_optimizer_step(
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    loss_fn: Losses,
    *,
    items: Callable[[Batch], float] | None = None,
    max_grad_norm: float | None = None,
    scaler: GradScaler | None = None,
    find_unused_parameters: bool = False,
) -> StepResult:
    """Train one window: all `micro_batches`, one reduction over the ranks, one optimizer step.

    Args:
        model: the bare model, or a model in DDP.
        optimizer: an optimizer of the model's parameters.
        micro_batches: the micro-batches of the window.
        loss_fn: `loss_fn(model, micro_batch)`, a mean over the items of the micro-batch, or a
            criterion of torch for micro-batches that are (inputs, targets).
        items: counts the items that the loss is a mean over. By default the rows, or, for a
            criterion of torch that ignores a label (-100), the targets that it does not ignore.
        max_grad_norm: clip the gradient to this norm.
        scaler: a `torch.amp.GradScaler`, for fp16.
        find_unused_parameters: for a bare model with parameters that the loss does not reach.

    Raises:
        TypeError: `model` is not a torch module, or the loss is not a tensor.
        ValueError: there is no micro-batch, or the loss is not one number with a gradient.
        RuntimeError: no rank reduced a parameter (see `find_unused_parameters`).
    """
    if not micro_batches:
        raise ValueError("an optimizer step needs at least one micro-batch, got none")
    with sync_counter(model, find_unused_parameters=find_unused_parameters) as counter:
        accum = Accumulator(
            len(micro_batches), optimizer=optimizer, max_grad_norm=max_grad_norm, scaler=scaler
        )
        for micro_batch in micro_batches:
            weight = items(micro_batch) if items else _count_items(loss_fn, micro_batch)
            with accum(counter.model, weight=weight):
                accum.backward(call_loss(loss_fn, counter.model, micro_batch))
        last = accum.last
    assert last is not None
    return StepResult(last.micro_batches, counter.syncs, last.loss, last.grad_norm, last.stepped)
