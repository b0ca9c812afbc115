"""The options of an Accumulator, checked against each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

TAILS = ("flush", "drop", "carry")
SYNCS = ("last", "every")
NONFINITES = ("skip_window", "skip_micro_batch", "raise")


@dataclass(frozen=True)
class Options:
    """What was given, in the form that is used."""

    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: Any
    max_grad_norm: float | None
    tail: str
    sync: str
    nonfinite: str
    accumulate_dtype: torch.dtype | None

    @classmethod
    def check(
        cls,
        optimizer: Any,
        scheduler: Any,
        scaler: Any,
        max_grad_norm: float | None,
        tail: str,
        sync: str,
        nonfinite: str,
        accumulate_dtype: torch.dtype | None,
    ) -> Options:
        """Raise ValueError for a value that is unknown or would be ignored."""
        for name, value, known in (
            ("tail", tail, TAILS),
            ("sync", sync, SYNCS),
            ("nonfinite", nonfinite, NONFINITES),
        ):
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}; got {value!r}")
        if accumulate_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(
                f"accumulate_dtype is torch.float32 (or float64), wide enough for a long sum, or "
                f"None for the parameters' own; got {accumulate_dtype}"
            )
        optimizers = tuple(inner(o) for o in _several(optimizer))
        schedulers = tuple(inner(s) for s in _several(scheduler))
        if optimizer is not None and not optimizers:
            raise ValueError(
                "optimizer= is empty, so nobody would step; give at least one, or leave it out "
                "where the loop steps"
            )
        if len({id(o) for o in optimizers}) < len(optimizers):
            raise ValueError(
                f"one optimizer is given twice among {len(optimizers)}; it would step twice"
            )
        for one in optimizers:
            if not isinstance(one, Optimizer):
                raise ValueError(f"optimizer is a torch Optimizer, got {type(one).__name__}")
            if isinstance(one, torch.optim.LBFGS):
                raise ValueError(
                    "LBFGS calls for the loss again and again (a closure), which a window can't "
                    "repeat; step it in the loop, on large batches"
                )
        if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
            raise ValueError(
                f"scaler is a torch.amp.GradScaler, or one like it; got {type(scaler).__name__}"
            )
        for one in schedulers:
            if not callable(getattr(one, "step", None)):
                raise ValueError(f"scheduler has a step method; {type(one).__name__} has none")
            if isinstance(one, ReduceLROnPlateau):
                raise ValueError(
                    "ReduceLROnPlateau needs a metric that accum does not have; call its "
                    "step(metric) yourself, e.g. in a function under @accum.on_update"
                )
        if not optimizers:
            _refuse_unused(schedulers, max_grad_norm, nonfinite)
        if max_grad_norm is not None and not (math.isfinite(max_grad_norm) and max_grad_norm > 0):
            raise ValueError(f"max_grad_norm is a finite number above 0; got {max_grad_norm!r}")
        return cls(
            optimizers, schedulers, scaler, max_grad_norm, tail, sync, nonfinite, accumulate_dtype
        )


def _refuse_unused(schedulers: tuple[Any, ...], max_grad_norm: Any, nonfinite: str) -> None:
    for name, given in (
        ("scheduler", bool(schedulers)),
        ("max_grad_norm", max_grad_norm is not None),
        ("nonfinite", nonfinite != "skip_window"),
    ):
        if given:
            raise ValueError(
                f"{name} acts where accum takes the step; give optimizer= as well, or do it in the "
                f"loop when micro.closes"
            )


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def inner(prepared: Any) -> Any:
    """The torch object inside of a prepared optimizer or scheduler; known by its attributes,
    so that a loop without Accelerate need not import it."""
    while hasattr(prepared, "gradient_state"):
        prepared = getattr(prepared, "optimizer", None) or prepared.scheduler
    return prepared
