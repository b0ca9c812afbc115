"""Autograd's engine, called without the checks that a micro-batch has made already."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def run_backward(
    roots: Sequence[Tensor],
    grads: Sequence[Tensor],
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> None:
    """The same as `torch.autograd.backward`, for `grads` of the shapes of `roots`.

    torch compares those shapes as if they were symbolic, which takes a fifth of all the time that
    accum spends on a micro-batch.
    """
    engine = None if create_graph else _engine()
    for root in roots:
        engine = engine if type(root) is Tensor else None
    if engine is None:
        torch.autograd.backward(roots, grads, retain_graph, create_graph)
    else:
        _run(engine, roots, grads, retain_graph)


def _run(
    engine: Callable[..., object],
    roots: Sequence[Tensor],
    grads: Sequence[Tensor],
    retain_graph: bool | None,
) -> None:
    engine(
        tuple(roots),
        tuple(grads),
        bool(retain_graph),
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@functools.cache
def _engine() -> Callable[..., object] | None:
    """The private function behind `torch.autograd.backward` (2.8 to 2.15), if it still is that."""
    engine: Callable[..., object] | None
    engine = getattr(torch.autograd.graph, "_engine_run_backward", None)
    leaf = torch.zeros((), device="cpu", requires_grad=True)
    try:
        with torch.enable_grad():
            _run(engine, [leaf * 2], [torch.ones_like(leaf)], None)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        return None
    return None if leaf.grad is None else engine
