"""The two operations whose weight gradient can be added to a sum without a copy of its size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accumplug.inplace.engine import (
    DisableTorchFunctionSubclass,
    is_observed,
    is_traced,
    will_execute,
)
from accumplug.inplace.sums import Part, Sum

PIECE = 2**20  # elements of the largest temporary where a product and its sum differ in dtype
DEVICE_PIECE = 2**24  # the same where a kernel's start costs more than a cache saves
WIDE = 2**22  # elements of a matrix that no cache holds
COLUMNS = 256  # of such a matrix that each thread multiplies at a time


class Product(torch.autograd.Function):
    """y = x @ matrix + bias, where x is 2-D and the matrix is the weight or its transpose.

    `low` is the weight in autocast's dtype, or None. The same tensors are saved, in the
    same order, as by torch's own addmm and mm (2.13): activation checkpointing pairs what a
    forward and its recomputation save by their order alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        total: Sum | Part,
        transposed: bool,
        weight: Tensor,
        x: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
    ) -> Tensor:
        with DisableTorchFunctionSubclass():
            used = weight.detach() if low is None else low
            matrix = used.t() if transposed else used
            y = multiply(x, matrix, bias)
        ctx.total, ctx.weight, ctx.transposed = total, weight, transposed
        ctx.biased = bias is not None
        saved = matrix if x.requires_grad else None
        ctx.save_for_backward(*((x, saved) if ctx.biased else (saved, x)))
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if dy is None:
            return (None,) * 6
        ctx.total.sum.forget_low()
        # Other people's hooks run while these are read (a checkpoint recomputes): as outside.
        x, matrix = ctx.saved_tensors if ctx.biased else ctx.saved_tensors[::-1]
        _, _, _, for_x, for_bias, _ = ctx.needs_input_grad
        with DisableTorchFunctionSubclass():
            if torch.is_grad_enabled():  # create_graph: the saved matrix has no history
                weight = ctx.weight.to(x.dtype)
                matrix = weight.t() if ctx.transposed else weight
            left, right = (dy.t(), x) if ctx.transposed else (x.t(), dy)
            dw = _deliver(
                ctx,
                dy,
                lambda total: add_product(total, left, right),
                lambda: left.mm(right),
            )
            dx = dy.mm(matrix.t()) if for_x else None
            return None, None, dw, dx, dy.sum(0) if for_bias else None, None


class Lookup(torch.autograd.Function):
    """y = weight[ids]; the row of `padding_idx` (-1 for none) gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, total: Sum | Part, weight: Tensor, ids: Tensor, padding_idx: int
    ) -> Tensor:
        ctx.total, ctx.weight, ctx.padding_idx = total, weight, padding_idx
        ctx.save_for_backward(ids)
        ctx.set_materialize_grads(False)
        with DisableTorchFunctionSubclass():
            return torch.embedding(weight, ids, padding_idx)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if dy is None:
            return (None,) * 4
        (ids,) = ctx.saved_tensors
        with DisableTorchFunctionSubclass():
            dw = _deliver(
                ctx,
                dy,
                lambda total: add_rows(total, ids, dy, ctx.padding_idx),
                lambda: torch.ops.aten.embedding_dense_backward(
                    dy, ids, ctx.weight.shape[0], ctx.padding_idx, False
                ),
            )
            return None, dw, None, None


def multiply(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """x @ matrix + bias.

    MKL (2024.2, as in torch 2.13) multiplies in fp32 by the transpose of a weight that is larger
    than the caches, an output head's, 1.2 to 1.9 times as fast if it is given a few columns at a
    time, and gives the same bits (measured with 1 and 2 threads on an AMD EPYC).
    """
    columns = COLUMNS * torch.get_num_threads()
    pieces = matrix.shape[1] // columns if _gains_from_pieces(x, matrix) else 0
    if pieces < 2:
        return x.mm(matrix) if bias is None else torch.addmm(bias, x, matrix)
    y = x.new_empty(x.shape[0], matrix.shape[1])
    for piece in range(pieces):
        # the last one takes the rest: a piece of a few columns would be rounded in another way
        start = piece * columns
        part = slice(start, None if piece == pieces - 1 else start + columns)
        if bias is None:
            torch.mm(x, matrix[:, part], out=y[:, part])
        else:
            torch.addmm(bias[part], x, matrix[:, part], out=y[:, part])
    return y


def _gains_from_pieces(x: Tensor, matrix: Tensor) -> bool:
    return (
        x.is_cpu
        and x.dtype is torch.float32
        and matrix.stride(0) == 1
        and matrix.numel() >= WIDE
        and matrix.shape[0] >= 2 * COLUMNS
        and not is_observed()  # who looks on sees one product
    )


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, with no temporary of the size of `total`.

    One GEMM with beta 1. torch (2.13) has none on the CPU that adds a half precision product to
    an fp32 matrix, so that one goes a few rows at a time, each piece small enough to stay in the
    cache. In fp16, which is not done in hardware there, it is multiplied in fp32.
    """
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    elif left.dtype is torch.float16 and total.is_cpu:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    elif not total.is_cpu and _widens(total.device, left.dtype, total.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        rows = max(1, (PIECE if total.is_cpu else DEVICE_PIECE) // right.shape[1])
        for piece, factor in zip(torch.split(total, rows), torch.split(left, rows), strict=True):
            piece.add_(factor.mm(right))


@functools.cache
def _widens(device: torch.device, dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Whether `device` has a GEMM that adds a product in `dtype` to a matrix in `wide`.

    Some versions of torch have the overload, and refuse a matrix in another dtype than the factors.
    """
    total = torch.zeros(8, 8, dtype=wide, device=device)
    factor = torch.zeros(8, 8, dtype=dtype, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=wide, out=total)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def add_rows(total: Tensor, ids: Tensor, rows: Tensor, padding_idx: int) -> None:
    """total[ids] += rows, in an order that is the same in every run."""
    ids = ids.reshape(-1)
    rows = rows.reshape(ids.shape[0], total.shape[1]).to(total.dtype)
    if padding_idx >= 0:
        rows = rows.masked_fill((ids == padding_idx).unsqueeze(1), 0)
    if total.is_cpu:
        total.index_add_(0, ids, rows)
    else:  # index_add_ is atomic there; index_put_ sorts
        total.index_put_((ids,), rows, accumulate=True)


def _deliver(
    ctx: Any, dy: Tensor, add: Callable[[Tensor], None], gradient: Callable[[], Tensor]
) -> Tensor | None:
    """Add the gradient in place, or return it for autograd, or neither if nobody wants it.

    The weight is the first tensor each Function here is given, so its edge is the first.
    """
    total = ctx.total.sum
    node = ctx.next_functions[0][0]
    wanted = node is not None and _accumulates(node)
    if wanted is False or (wanted and not total.weight.requires_grad):
        return None
    seen = ctx.weight._backward_hooks or ctx.weight.retains_grad or ctx.total.hooked()
    traced = torch.is_grad_enabled() or torch.is_anomaly_enabled() or is_traced(dy)
    if not wanted or seen or traced or (target := ctx.total.target()) is None:
        return gradient()
    add(target)
    total.added += 1
    return None


def _accumulates(node: Any) -> bool | None:
    """Whether this backward adds to the weight's `.grad`; None if autograd.grad asked for it.

    `will_execute` knows of `backward(inputs=...)`, and refuses a leaf that autograd.grad captures,
    with a RuntimeError.
    """
    view_runs = False
    while node.next_functions:  # from a view down to its weight
        view_runs = view_runs or will_execute(node)
        node = node.next_functions[0][0]
    try:
        return bool(will_execute(node)) or (None if view_runs else False)
    except RuntimeError:
        return None
