"""DistributedDataParallel: when it reduces a gradient, and how it is made to.

Everything that touches DistributedDataParallel's private parts is in this file
(read from torch 2.13, torch/nn/parallel/distributed.py and reducer.cpp).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any  # of private parts, and of what hooks are given

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from accumplug.parallel.private import require

PRIVATE = (
    "_check_sync_bufs_post_fwd",
    "_check_sync_bufs_pre_fwd",
    "_comm_hooks",
    "_get_ddp_logging_data",
    "_sync_buffers",
    "require_forward_param_sync",
)
REDUCER = (
    "_check_reducer_finalized",
    "_get_zeros_like_grad_buckets",
    "_rebuild_buckets",
    "_reset_state",
    "_update_process_group",
    "get_backward_stats",
    "prepare_for_backward",
    "prepare_for_forward",
)


def check_names(ddp: DistributedDataParallel) -> None:
    """Raise MovedError if this torch has not all that is read here, before anything is done."""
    require(ddp, PRIVATE, "the moment at which DDP reduces")
    require(ddp.reducer, REDUCER, "the moment at which DDP reduces")


def ddp_modules(model: nn.Module) -> list[DistributedDataParallel]:
    """The DistributedDataParallel modules in `model`: itself, nested, or inside a compiled one."""
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


def has_sparse_gradients(ddp: DistributedDataParallel) -> bool:
    """Whether DDP expects sparse gradients, which a rank without a backward can't stand in for."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return any(isinstance(m, kinds) and m.sparse for m in ddp.module.modules())


def reduced_parameters(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that `ddp` reduces."""
    ignored = ddp.parameters_to_ignore
    return [p for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored]


def handled_parameters(ddps: Iterable[DistributedDataParallel]) -> set[int]:
    """Ids of the parameters that `ddps` reduce, or were told to ignore.

    A parameter that was frozen when its module was wrapped belongs to no reducer, and is reduced by
    nobody if it is unfrozen later. Only the reducer's buckets tell; looking at them takes as much
    memory as the gradients, for a moment before there are any.
    """
    handled: set[int] = set()
    for ddp in ddps:
        parameters = dict(ddp.module.named_parameters())
        handled |= {id(p) for n, p in parameters.items() if n in ddp.parameters_to_ignore}
        if has_sparse_gradients(ddp):
            handled |= {id(p) for p in reduced_parameters(ddp)}
        else:
            buckets = ddp.reducer._get_zeros_like_grad_buckets()
            handled |= {id(p) for bucket in buckets for p in bucket.parameters()}
    return handled


def before_forward(ddp: DistributedDataParallel) -> None:
    """Run the collectives that hide in the first forward of a window, before it.

    DDP broadcasts its buffers in the first forward after a reduction (and once its new bucket
    order). Done here, on all ranks and in one order, a rank that runs no forward in the window
    leaves nobody waiting.
    """
    rebuild_buckets(ddp)
    if ddp._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
        ddp._sync_buffers()  # type: ignore[no-untyped-call]
    leave_buffers(ddp)


def leave_buffers(ddp: DistributedDataParallel) -> None:
    """Keep the forwards of this window from broadcasting buffers again."""
    if not ddp._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
        ddp.require_forward_param_sync = False


@contextmanager
def buffers_once(ddp: DistributedDataParallel) -> Iterator[None]:
    """Keep forwards from broadcasting the buffers, as `before_forward` has done on all ranks.

    In a synced block DDP would do it again in each forward after the first one.
    """
    if not ddp._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
        broadcasts, ddp.broadcast_buffers = ddp.broadcast_buffers, False
        try:
            yield
        finally:
            ddp.broadcast_buffers = broadcasts
    else:
        yield


@contextmanager
def others_unsynced(own: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Keep every DDP module except `own` from reducing in a block."""
    spared: list[DistributedDataParallel] = []
    ids = {id(ddp) for ddp in own}

    def spare(module: nn.Module, arguments: Any) -> None:
        if not isinstance(module, DistributedDataParallel) or id(module) in ids:
            return
        if module.require_backward_grad_sync:
            module.require_backward_grad_sync = False
            spared.append(module)

    handle = register_module_forward_pre_hook(spare)
    try:
        yield
    finally:
        handle.remove()
        for module in spared:
            module.require_backward_grad_sync = True


def in_order(
    ddps: Iterable[DistributedDataParallel], parameters: Iterable[nn.Parameter]
) -> list[DistributedDataParallel]:
    """`ddps` by the place of their first one among `parameters`, the same on all ranks."""
    place = {id(p): i for i, p in enumerate(parameters)}
    last = len(place)
    return sorted(ddps, key=lambda d: min(place.get(id(p), last) for p in d.parameters()))


class _Nothing(torch.autograd.Function):
    """A graph whose backward gives no parameter a gradient, but runs the hooks behind each."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None,) * ctx.count


def reduce_now(ddp: DistributedDataParallel) -> None:
    """Average `.grad` over the ranks through `ddp`'s own buckets and hooks, with no forward.

    A backward that gives nothing to any parameter makes the reducer do what it does in a synced
    backward; other ranks may be in a real one, or here. With find_unused_parameters it takes a
    parameter as used if it has a `.grad`, so one that no rank has used stays without.
    """
    parameters = reduced_parameters(ddp)
    rebuild_buckets(ddp)
    ddp.reducer.prepare_for_forward()
    if ddp.find_unused_parameters:
        # at least one has to start the reducer; if it has no .grad it does not count as used
        parameters = [p for p in parameters if p.grad is not None] or parameters[-1:]
    nothing = _Nothing.apply(*parameters)  # type: ignore[no-untyped-call]
    ddp.reducer.prepare_for_backward([nothing] if ddp.find_unused_parameters else [])
    nothing.backward()
    ddp.require_forward_param_sync = True


def reduction_times(ddps: Iterable[DistributedDataParallel]) -> list[list[int]]:
    """Values that differ before and after a backward if, and only if, it has reduced.

    Nanoseconds at which each parameter became ready in the last backward that did.
    """
    return [ddp.reducer.get_backward_stats() for ddp in ddps]


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Let `ddp` put its buckets into the order of its first backward. All ranks have to be here."""
    ddp.reducer._rebuild_buckets()


def mark_used(ddp: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
    """Let `ddp` know that `parameters` were used in micro-batches that ran in another process.

    With find_unused_parameters it keeps marks since the last reduction, and a parameter without
    one is not reduced. A backward of zeros that is not synced sets them.
    """
    own = {id(p) for p in reduced_parameters(ddp)}
    used = [p for p in parameters if id(p) in own]
    if ddp.find_unused_parameters and used:
        grads = [p.grad for p in used]  # which may be sparse
        for parameter in used:
            parameter.grad = None
        with ddp.no_sync():
            torch.autograd.backward(used, [p.new_zeros(()).expand_as(p) for p in used])
        for parameter, grad in zip(used, grads, strict=True):
            parameter.grad = grad


def forget_marks(ddp: DistributedDataParallel, unfinished: bool = False) -> None:
    """Let `ddp` forget which parameters a window has used that is thrown away, and a backward
    that did not end; if `unfinished`, a synced forward without a backward. Not where it need not:
    it forgets that its buckets were rebuilt as well."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        ddp.reducer._reset_state()
    else:
        if ddp.find_unused_parameters:
            ddp.reducer._reset_state()
        elif unfinished:
            _finish_alone(ddp)


def _finish_alone(ddp: DistributedDataParallel) -> None:
    """End a synced forward without a backward on this rank alone, by a reduction over itself."""
    rebuilt = ddp._get_ddp_logging_data().get("has_rebuilt_buckets")  # type: ignore[no-untyped-call]
    if ddp._comm_hooks or not rebuilt or dist.get_world_size(ddp.process_group) == 1:
        ddp.reducer._reset_state()
    else:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        try:
            ddp.reducer._update_process_group(alone)
            reduce_now(ddp)
        finally:
            ddp.reducer._update_process_group(ddp.process_group)
            dist.destroy_process_group(alone)
    leave_buffers(ddp)


def check_reduced(ddp: DistributedDataParallel) -> None:
    """Raise RuntimeError if the backward that has just ended left `ddp` unreduced.

    Without find_unused_parameters DDP waits for every parameter; one that the closing
    micro-batch did not use leaves the whole window's gradients local, and DDP itself says so
    only in the next forward, after the optimizer has stepped on them.
    """
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        names = [n for n, p in ddp.module.named_parameters() if p.requires_grad]
        missing = [
            names[int(i)]
            for line in str(error).splitlines()
            if line.strip().startswith("Parameter indices")
            for i in line.split(":")[-1].split()
            if i.isdigit() and int(i) < len(names)
        ]
        raise RuntimeError(
            f"the gradients of this window were not reduced over the ranks: the closing "
            f"micro-batch used no {', '.join(missing) or 'gradient of some parameters'}. "
            f"Wrap the model with DistributedDataParallel(..., find_unused_parameters=True)"
        ) from error


def bucket_order(ddp: DistributedDataParallel) -> list[str] | None:
    """The names of the parameters of `ddp.module`, in the order of its buckets.

    None with sparse gradients: torch 2.13 can't show a bucket that has one.
    """
    if has_sparse_gradients(ddp):
        return None
    names = {id(p): n for n, p in ddp.module.named_parameters()}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return [names[id(p)] for bucket in buckets for p in bucket.parameters()]


def settle_buckets(ddp: DistributedDataParallel, order: list[str]) -> None:
    """Give a new `ddp` the buckets that another process had found. All ranks have to be here.

    DDP rebuilds its buckets once, after the first backward that it has reduced, in the order in
    which the gradients came. A process that resumes would reduce its first update with those from
    before that, which rounds differently on three ranks or more.
    """
    if ddp.find_unused_parameters or _has_stateful_hook(ddp) or bucket_order(ddp) == order:
        return  # with find_unused_parameters it never rebuilds
    parameters = dict(ddp.module.named_parameters())
    if unknown := set(order) - parameters.keys():
        raise ValueError(f"the checkpoint has reduced {min(unknown)}, which the model has not")
    grads = {name: p.grad for name, p in parameters.items()}
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    for name in order:  # one backward each: a single one would take them in an order of its own
        parameter = parameters[name]
        parameter.grad = None
        torch.autograd.backward([parameter], [parameter.new_zeros(()).expand_as(parameter)])
    ddp.reducer._rebuild_buckets()
    for name, parameter in parameters.items():
        parameter.grad = grads[name]


def _has_stateful_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook would count that as a step (PowerSGD does)."""
    states = [state for _, state in ddp._comm_hooks]
    return any(state is not None and not isinstance(state, dist.ProcessGroup) for state in states)
