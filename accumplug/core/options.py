"""The options of an Accumulator, checked against each other."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accumplug.errors import OptionTypeError
from accumplug.parallel.private import require

Tail: TypeAlias = Literal["flush", "drop", "carry"]
Sync: TypeAlias = Literal["last", "every"]
NonFinite: TypeAlias = Literal["skip_window", "skip_micro_batch", "raise"]
Reduction: TypeAlias = Literal["mean", "sum"]

T = TypeVar("T")


class Scaler(Protocol):
    """A `torch.amp.GradScaler`, or one like it."""

    def is_enabled(self) -> bool: ...
    def scale(self, outputs: Tensor) -> Tensor: ...
    def unscale_(self, optimizer: Optimizer) -> None: ...
    def step(self, optimizer: Optimizer) -> object: ...
    def update(self, new_scale: float | Tensor | None = None) -> None: ...
    def get_scale(self) -> float: ...
    def get_backoff_factor(self) -> float: ...


class Scheduler(Protocol):
    """A learning-rate scheduler of torch, or one like it, whose `step` needs no argument."""

    def step(self) -> None: ...


@dataclass(frozen=True)
class Options:
    """The options of an Accumulator after validation."""

    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Scheduler, ...]
    scaler: Scaler | None
    max_grad_norm: float | None
    tail: Tail
    sync: Sync
    nonfinite: NonFinite
    accumulate_dtype: torch.dtype | None

    def shared(self) -> dict[str, object]:
        """The options that have to be the same on all ranks, as JSON values."""
        dtype = self.accumulate_dtype and str(self.accumulate_dtype)
        given = {"optimizer": len(self.optimizers), "scaler": self.scaler is not None}
        names = ("sync", "tail", "nonfinite", "max_grad_norm")
        return {n: getattr(self, n) for n in names} | {"accumulate_dtype": dtype} | given

    @classmethod
    def check(
        cls,
        optimizer: Any,  # prepared ones are unwrapped here
        scheduler: Any,  # as well
        scaler: Any,  # of any make, see below
        max_grad_norm: float | None,
        tail: Tail,
        sync: Sync,
        nonfinite: NonFinite,
        accumulate_dtype: torch.dtype | None,
    ) -> Options:
        """Raise OptionTypeError for a wrong type, ValueError for a value that is unknown or
        would be ignored."""
        for name, value, known in (
            ("tail", tail, get_args(Tail)),
            ("sync", sync, get_args(Sync)),
            ("nonfinite", nonfinite, get_args(NonFinite)),
        ):
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}; got {value!r}")
        if accumulate_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(
                f"accumulate_dtype is torch.float32 (or float64), wide enough for a long sum, or "
                f"None for the parameters' own; got {accumulate_dtype}"
            )
        optimizers = tuple(unprepared(o) for o in _sequence(optimizer))
        schedulers = tuple(unprepared(s) for s in _sequence(scheduler))
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
            _check_optimizer(one)
        if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
            raise OptionTypeError(
                f"scaler is a torch.amp.GradScaler, or one like it; got {type(scaler).__name__}"
            )
        for scheduler in schedulers:
            _check_scheduler(scheduler, optimizers)
        if not optimizers:
            _refuse_unused(schedulers, max_grad_norm, nonfinite)
        _check_norm(max_grad_norm)
        return cls(
            optimizers, schedulers, scaler, max_grad_norm, tail, sync, nonfinite, accumulate_dtype
        )


def _check_optimizer(one: object) -> None:
    if any(c.__name__ == "DPOptimizer" for c in type(one).__mro__):
        raise ValueError(PER_SAMPLE)
    if not isinstance(one, Optimizer):
        raise OptionTypeError(f"optimizer is a torch Optimizer, got {type(one).__name__}")
    if isinstance(one, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS calls for the loss again and again (a closure), which a window can't "
            "repeat; step it in the loop, on large batches"
        )


PER_SAMPLE = (
    "per-sample clipping (Opacus: GradSampleModule, DPOptimizer) keeps a gradient for each sample "
    "and divides by a batch size of its own, which a window's weights would contradict; accumulate "
    "with Opacus' own BatchMemoryManager, or train without per-sample clipping"
)


def _check_scheduler(one: Scheduler, optimizers: Sequence[Optimizer]) -> None:
    if not callable(getattr(one, "step", None)):
        raise OptionTypeError(f"scheduler has a step method; {type(one).__name__} has none")
    if isinstance(one, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau needs a metric that accum does not have; call its "
            "step(metric) yourself, e.g. in a function under @accum.on_update"
        )
    if needed := _needed_arguments(one.step):
        raise ValueError(
            f"{type(one).__name__}.step needs the argument {', '.join(needed)}, which accum does "
            f"not have; leave scheduler= out and call its step(...) yourself, e.g. in a function "
            f"under @accum.on_update"
        )
    owner = unprepared(getattr(one, "optimizer", None))
    if optimizers and isinstance(owner, Optimizer) and all(owner is not o for o in optimizers):
        raise ValueError(
            f"{type(one).__name__} schedules an optimizer that is not among the "
            f"{len(optimizers)} given as optimizer=; its learning rates would never be used"
        )


def _needed_arguments(step: Callable[..., object]) -> list[str]:
    """Names of the arguments without which `step` can't be called."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _check_norm(max_grad_norm: object) -> None:
    if max_grad_norm is None:
        return
    if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, (int, float)):
        raise OptionTypeError(f"max_grad_norm is a number; got {type(max_grad_norm).__name__}")
    if not (math.isfinite(max_grad_norm) and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm is a finite number above 0; got {max_grad_norm!r}")


def _refuse_unused(schedulers: Sequence[object], max_grad_norm: object, nonfinite: str) -> None:
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


def _sequence(given: T | Sequence[T] | None) -> tuple[T, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)  # type: ignore[return-value]


def unprepared(prepared: Any) -> Any:  # Accelerate's or torch's, whatever was given
    """The torch object inside of a prepared optimizer or scheduler; known by its attributes,
    so that a loop without Accelerate need not import it."""
    while hasattr(prepared, "gradient_state"):
        kind = "optimizer" if isinstance(prepared, Optimizer) else "scheduler"
        require(prepared, [kind], "the object that was prepared", "accelerate")
        prepared = getattr(prepared, kind)
    return prepared
