"""Autograd's engine, called without the checks that a micro-batch has made already."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def run_backward(
    roots: Sequence[Tensor],
    grads: Sequence[Tensor],
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> None:
    """The same as `torch.autograd.backward`, for `grads` of the shapes of `roots`.

    torch 2.13 compares those shapes as if they were symbolic, which takes a fifth of all the
    time that accum spends on a micro-batch.
    """
    if create_graph or any(type(root) is not Tensor for root in roots):
        torch.autograd.backward(roots, grads, retain_graph, create_graph)
        return
    _engine_run_backward(
        tuple(roots),
        tuple(grads),
        bool(retain_graph),
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
