"""Counting gradient reductions where they happen: in a communication hook of DDP."""

# No `from __future__ import annotations`: DDP reads the hook's annotations, and wants no strings.

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, HashStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accumplug.analysis.batch_tree import items_in

__all__ = ["StepResult", "SyncCounter", "call_loss", "sync_counter", "train_one_optimizer_step"]

Loss = Callable[..., Any] | nn.Module
Losses = Loss | Mapping[str, Loss]


def call_loss(loss_fn: Losses, model: nn.Module, batch: Any) -> Tensor:
    """Give the loss of `model` on `batch`.

    `loss_fn` is called as `loss_fn(model, batch)`. A criterion of torch (`nn.CrossEntropyLoss()`,
    `torch.nn.functional.mse_loss`) is called as `loss_fn(model(inputs), targets)`, and then
    the batch has to be a pair. Several losses by name are summed.

    Raises:
        ValueError: it is not a 0-dim tensor, or has no gradient to give; or `loss_fn` can't be
            called so.
    """
    if isinstance(loss_fn, Mapping):
        if not loss_fn:
            raise ValueError("losses by name: give at least one loss")
        first, *others = (call_loss(one, model, batch) for one in loss_fn.values())
        return sum(others, first)
    if not callable(loss_fn):
        raise ValueError(f"loss_fn is a function or a criterion of torch, got {loss_fn!r}")
    value: Any
    if _is_criterion(loss_fn):
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise ValueError(
                "a criterion of torch needs a batch that is a pair (inputs, targets), got a "
                f"{type(batch).__name__}; write loss_fn(model, batch) for any other"
            )
        value = loss_fn(model(batch[0]), batch[1])
    else:
        value = loss_fn(model, batch)
    if not isinstance(value, Tensor) or value.dim() != 0:
        raise ValueError(f"the loss must be a 0-dim tensor, got {_described(value)}")
    if not value.requires_grad:
        raise ValueError("the loss reached no parameter: it has no gradient to give")
    return value


def _is_criterion(loss_fn: Any) -> bool:
    """Whether it is called on outputs and targets: a module, or one of torch.nn.functional."""
    inner = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    of_torch = getattr(inner, "__module__", "") == "torch.nn.functional"
    return isinstance(loss_fn, nn.Module) or of_torch


def _described(value: Any) -> str:
    """What a loss function gave in place of a loss, in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    inside = "; return its .loss" if isinstance(getattr(value, "loss", None), Tensor) else ""
    return f"a {type(value).__name__}{inside}"


@dataclass
class SyncCounter:
    """What `sync_counter` yields.

    Attributes:
        model: the model wrapped in DistributedDataParallel; train this one.
        syncs: backward passes whose gradients were reduced over the ranks.
        buckets: calls of the communication hook; a reduction has one for each DDP bucket.
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

    Under torchrun the reductions run over the process group that is there. In a single process
    a group of one rank is made (gloo, no network) and taken down again, so that the same
    reductions run and are seen. The count comes from a communication hook, not from
    bookkeeping. A model that is in DDP already is wrapped anew, with its settings, for the
    block: DDP takes one hook in its life and can't give it back.

    Args:
        find_unused_parameters: for a bare model with parameters that a loss does not reach; as
            for DDP.
    """
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


class _Transparent(DistributedDataParallel):
    """DDP that has the attributes of its model: a loss may use them, as it does without DDP."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _wrap(model: nn.Module, find_unused_parameters: bool) -> DistributedDataParallel:
    if not isinstance(model, DistributedDataParallel):
        return _Transparent(model, find_unused_parameters=find_unused_parameters)
    return _Transparent(
        model.module,
        process_group=model.process_group,
        find_unused_parameters=model.find_unused_parameters,
        gradient_as_bucket_view=model.gradient_as_bucket_view,
        forward_sync_buffers=model.forward_sync_buffers,
    )


def _count(state: tuple[SyncCounter, Any], bucket: GradBucket) -> Future[Tensor]:
    counter, group = state
    counter.buckets += 1
    counter.syncs += bucket.is_last()
    return allreduce_hook(group, bucket)


@dataclass(frozen=True)
class StepResult:
    """What `train_one_optimizer_step` did.

    Attributes:
        micro_batches: forward and backward passes on this rank.
        syncs: gradient reductions that ran, counted in a communication hook.
        loss: weighted mean over all micro-batches and ranks.
        grad_norm: norm of the gradient before clipping.
        stepped: whether the optimizer stepped (it does not on a gradient that is not finite).
    """

    micro_batches: int
    syncs: int
    loss: float
    grad_norm: float | None
    stepped: bool


def train_one_optimizer_step(
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: Sequence[Any],
    loss_fn: Losses,
    *,
    items: Callable[[Any], float] = items_in,
    max_grad_norm: float | None = None,
    scaler: Any = None,
    find_unused_parameters: bool = False,
) -> StepResult:
    """Train one window: all of `micro_batches`, one reduction over the ranks, one optimizer step.

    Args:
        loss_fn: `loss_fn(model, micro_batch)`, a mean over the micro-batch's items, or a criterion
            of torch for micro-batches that are (inputs, targets).
        items: counts what the loss is a mean over; rows by default.
        max_grad_norm: clip the gradient's norm to it.
        scaler: a `torch.amp.GradScaler`, for fp16.
        find_unused_parameters: for a bare model with parameters that the loss does not reach.

    Raises:
        ValueError: there is no micro-batch, or the loss is not one number with a gradient.
        RuntimeError: a parameter was reduced by nobody (see `find_unused_parameters`).
    """
    from accumplug.accumulator import Accumulator

    if not micro_batches:
        raise ValueError("an optimizer step needs at least one micro-batch, got none")
    with sync_counter(model, find_unused_parameters=find_unused_parameters) as counter:
        accum = Accumulator(
            len(micro_batches), optimizer=optimizer, max_grad_norm=max_grad_norm, scaler=scaler
        )
        for micro_batch in micro_batches:
            with accum(counter.model, weight=items(micro_batch)):
                accum.backward(call_loss(loss_fn, counter.model, micro_batch))
        last = accum.last
    assert last is not None
    return StepResult(last.micro_batches, counter.syncs, last.loss, last.grad_norm, last.stepped)
