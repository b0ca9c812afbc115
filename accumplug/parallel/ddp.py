"""Ranks: who they are, and when a gradient is reduced over them.

Everything that touches DistributedDataParallel's private parts is in this file
(read from torch 2.13, torch/nn/parallel/distributed.py and reducer.cpp).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumplug.parallel.group import DataParallelGroup


def ddp_modules(model: nn.Module) -> list[DistributedDataParallel]:
    """The DistributedDataParallel modules in `model`: itself, nested, or inside a compiled one."""
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


def find_ddp_modules(parameters: Iterable[nn.Parameter]) -> list[DistributedDataParallel]:
    """The live DDP modules that hold any of `parameters`, in the order of those.

    For a rank that takes part in a window before it has ever run a forward: all it knows is
    its optimizer. Looks through all objects of the process, so only for that.
    """
    parameters = list(parameters)
    ids = {id(p) for p in parameters}
    gc.collect()  # a wrapper that is garbage must not be joined
    found = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    found = [ddp for ddp in found if any(id(p) in ids for p in ddp.parameters())]
    return in_order(found, parameters)


def has_sparse_gradients(ddp: DistributedDataParallel) -> bool:
    """Whether DDP expects sparse gradients, which a rank without a backward can't stand in for."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return any(isinstance(m, kinds) and m.sparse for m in ddp.module.modules())


def reduced_parameters(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that `ddp` reduces."""
    ignored = ddp.parameters_to_ignore
    return [p for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored]


def before_forward(ddp: DistributedDataParallel) -> None:
    """Run the collectives that hide in the first forward of a window, before it.

    DDP broadcasts its buffers in the first forward after a reduction (and once its new bucket
    order). Done here, on all ranks and in one order, a rank that runs no forward in the window
    leaves nobody waiting.
    """
    rebuild_buckets(ddp)
    if ddp._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
        ddp._sync_buffers()  # type: ignore[no-untyped-call]
    if not ddp._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
        ddp.require_forward_param_sync = False


@contextmanager
def buffers_once(ddp: DistributedDataParallel) -> Iterator[None]:
    """Let no forward broadcast the buffers: `before_forward` has, on all ranks.

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


def reduce_sums(ddps: Sequence[DistributedDataParallel], ranks: DataParallelGroup) -> None:
    """Average `.grad` over the ranks in its own dtype, which DDP's buckets can't hold.

    In flat buckets of DDP's usual 25 MiB, one after the other. A parameter that no rank has used
    stays without a gradient.
    """
    parameters = [p for ddp in ddps for p in reduced_parameters(ddp)]
    marks = ranks.sum([float(p.grad is not None) for p in parameters])
    used = [p for p, mark in zip(parameters, _numbers(marks), strict=True) if mark]
    for bucket in _buckets(used):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        grads = [p.grad for p in bucket if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in grads]).div_(ranks.size)
        if ranks.size > 1:
            dist.all_reduce(flat, group=ranks.group)
        offset = 0
        for grad in grads:
            grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
            offset += grad.numel()
    for ddp in ddps:
        ddp.require_forward_param_sync = True


def reduction_times(ddps: Iterable[DistributedDataParallel]) -> list[list[int]]:
    """What differs before and after a backward if, and only if, it has reduced.

    Nanoseconds at which each parameter became ready in the last backward that did.
    """
    return [ddp.reducer.get_backward_stats() for ddp in ddps]


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Let `ddp` put its buckets into the order of its first backward. All ranks have to be here."""
    ddp.reducer._rebuild_buckets()


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split into runs of one dtype and device, of at most 25 MiB (or one parameter) each."""
    buckets: list[list[nn.Parameter]] = []
    kind, room = None, 0
    for parameter in parameters:
        size = parameter.numel() * 4
        if kind != (kind := (parameter.grad_dtype, parameter.device)) or size > room:
            buckets.append([])
            room = 25 * 2**20
        buckets[-1].append(parameter)
        room -= size
    return buckets


def _numbers(sums: Tensor | list[Any]) -> list[Any]:
    return sums if isinstance(sums, list) else sums.tolist()


def mark_used(ddp: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
    """Let `ddp` know that `parameters` were used in micro-batches that ran in another process.

    With find_unused_parameters it keeps marks since the last reduction, and a parameter without
    one is not reduced. A backward of zeros that is not synced sets them.
    """
    own = {id(p) for p in reduced_parameters(ddp)}
    used = [p for p in parameters if id(p) in own]
    if ddp.find_unused_parameters and used:
        with ddp.no_sync():
            torch.autograd.backward(used, [p.new_zeros(()).expand_as(p) for p in used])


def forget_marks(ddp: DistributedDataParallel) -> None:
    """Let `ddp` forget which parameters a window has used that is thrown away, and a backward
    that did not end. Not where it need not: it forgets that its buckets were rebuilt as well."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        ddp.reducer._reset_state()
    else:
        if ddp.find_unused_parameters:
            ddp.reducer._reset_state()


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
