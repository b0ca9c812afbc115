"""Measuring windows of one size: time, memory, reductions, and the limit right after each."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accumplug.accumulator import Accumulator
from accumplug.analysis.sync_counter import Losses, call_loss, sync_counter
from accumplug.dataloading.batch_tree import Batch, items_in
from accumplug.noise.scale import NoiseEstimate, NoiseScale

__all__ = ["Bench", "Clock", "Measurement", "PeakMemory", "noise_between"]


@dataclass
class Measurement:
    """Seconds and losses of each measured window, in order.

    Attributes:
        window: seconds from before the first micro-batch to after the optimizer's step.
        passes: the part of them inside forward and backward passes.
        bare_pass: seconds of one forward and backward of the bare model: the mean over as many as
            the window has, right after it.
        losses: mean loss of the window.
        syncs: gradient reductions per update, counted.
        peak_memory: bytes.
    """

    window: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    bare_pass: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    syncs: float = 0.0
    world_size: int = 1
    peak_memory: int = 0


@dataclass
class Bench:
    """Trains and measures windows: the model, its loss, and micro-batches taken in turn.

    `model` is the bare model; `given` is the same, or in DDP with the user's settings.
    """

    model: nn.Module
    given: nn.Module
    micro_batches: Sequence[Batch]
    loss_fn: Losses
    memory: PeakMemory

    def __post_init__(self) -> None:
        self._batches = itertools.cycle(self.micro_batches)
        self._clock = Clock(next(self.model.parameters()).device)
        bare = self.given is self.model
        device = next(self.model.parameters()).device
        self._find_unused = bare and _on_any_rank(
            leaves_out_parameters(self.model, self.micro_batches, self.loss_fn), device
        )

    def measure(self, steps: int, updates: int, optimizer: Optimizer) -> Measurement:
        """Train `updates` windows of `steps` micro-batches, after one as a warm-up.

        With several ranks all windows run in DDP with a communication hook that counts. In a
        single process, where a training loop has no DDP to pay for, only the first window does.
        """
        found = Measurement()
        self.memory.restart()
        with sync_counter(self.given, find_unused_parameters=self._find_unused) as counter:
            found.world_size = dist.get_world_size()
            self._window(Accumulator(steps, optimizer=optimizer), counter.model, steps)
            if found.world_size > 1:
                before, accum = counter.syncs, Accumulator(steps, optimizer=optimizer)
                self._windows(found, accum, counter.model, steps, updates)
                found.syncs = (counter.syncs - before) / updates
            else:
                found.syncs = counter.syncs
        if found.world_size == 1:
            accum = Accumulator(steps, optimizer=optimizer)
            self._windows(found, accum, self.model, steps, updates)
        found.peak_memory = self.memory.bytes()
        return found

    def _windows(
        self, found: Measurement, accum: Accumulator, model: nn.Module, steps: int, updates: int
    ) -> None:
        for _ in range(updates):
            window, passes = self._window(accum, model, steps)
            found.window.append(window)
            found.passes.append(passes)
            found.losses.append(accum.last.loss if accum.last is not None else math.nan)
            found.bare_pass.append(self._bare_pass(steps))

    def _window(self, accum: Accumulator, model: nn.Module, steps: int) -> tuple[float, float]:
        """Train one window; return its seconds, and those inside forward and backward passes."""
        clock, marks = self._clock, []
        start = clock.mark()
        for micro_batch in itertools.islice(self._batches, steps):
            with accum(model, weight=items_in(micro_batch)):
                begin = clock.mark()
                accum.backward(call_loss(self.loss_fn, model, micro_batch))
                marks.append((begin, clock.mark()))
        whole = clock.seconds(start, clock.mark())
        return whole, sum(clock.seconds(*pair) for pair in marks)

    def _bare_pass(self, passes: int) -> float:
        """Time one forward and backward of the bare model that adds to an existing `.grad`."""
        first, *batches = itertools.islice(self._batches, passes + 1)
        torch.autograd.backward(call_loss(self.loss_fn, self.model, first))
        begin = self._clock.mark()
        for batch in batches:
            torch.autograd.backward(call_loss(self.loss_fn, self.model, batch))
        seconds = self._clock.seconds(begin, self._clock.mark()) / passes
        self.model.zero_grad(set_to_none=True)
        return seconds


def leaves_out_parameters(
    model: nn.Module, micro_batches: Sequence[Batch], loss_fn: Losses
) -> bool:
    """Say whether a loss does not reach every parameter, for which DDP would wait."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for micro_batch in micro_batches:
        loss = call_loss(loss_fn, model, micro_batch)
        if any(g is None for g in torch.autograd.grad(loss, parameters, allow_unused=True)):
            return True
    return False


def _on_any_rank(here: bool, device: torch.device) -> bool:
    """Say whether it is so on any rank; `device` is the model's, on which the ranks reduce."""
    if not dist.is_initialized():
        return here
    found = torch.tensor(float(here), device=device)
    dist.all_reduce(found)
    return bool(found)


def noise_between(
    model: nn.Module, micro_batches: Sequence[Batch], loss_fn: Losses
) -> NoiseEstimate | None:
    """Estimate the gradient noise scale at the model's weights from distinct micro-batches.

    They form windows of 4 (or of fewer, so that there are at least 2 windows); the small batch is
    the mean over the window's micro-batches. With fewer than 4 micro-batches it returns None.
    """
    per_window = min(4, len(micro_batches) // 2)
    if per_window < 2:
        return None
    parameters = [p for p in model.parameters() if p.requires_grad]
    scale = NoiseScale(decay=1 - 1e-9)
    for start in range(0, len(micro_batches) - per_window + 1, per_window):
        small, total = 0.0, [torch.zeros_like(p) for p in parameters]
        for micro_batch in micro_batches[start : start + per_window]:
            loss = call_loss(loss_fn, model, micro_batch)
            found = torch.autograd.grad(loss, parameters, materialize_grads=True)
            grads = [g.detach() for g in found]  # torch 2.8: its zeros require a gradient
            small += sum(float(g.double().square().sum()) for g in grads) / per_window
            torch._foreach_add_(total, grads, alpha=1 / per_window)
        big = sum(float(g.double().square().sum()) for g in total)
        items = items_in(micro_batches[start])
        scale.update(small, big, items, items * per_window)
    return scale.estimate


class Clock:
    """Measures time on a device: by events on CUDA, without waiting; else by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._type = device.type

    def mark(self) -> Any:  # a CUDA event, or seconds
        """Mark this moment in the device's work."""
        if self._type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event
        if self._type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks."""
        if self._type == "cuda":
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3
        return float(end - begin)


class PeakMemory:
    """The peak memory since `restart`; `meaning` says which memory."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self.meaning = "peak memory of PyTorch's CUDA allocator in the row"
        if self._cuda is None:
            restarts = self.restart()
            self.meaning = "peak resident memory of the process " + (
                "in the row" if restarts else "so far (this system can't restart the count)"
            )

    def restart(self) -> bool:
        """Restart the count; return whether the system can."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM falls to VmRSS
        except OSError:
            return False
        return True

    def bytes(self) -> int:
        """Return the peak in bytes."""
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda)
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            import resource  # macOS, which counts in bytes

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
