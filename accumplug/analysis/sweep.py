"""The throughput curve: samples per second against the effective batch, at one micro-batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from accumplug.analysis.batch_tree import items_in
from accumplug.analysis.bench import Bench, Measured, PeakMemory, noise_between
from accumplug.analysis.curve import Curve as Curve
from accumplug.analysis.curve import CurveRow as CurveRow
from accumplug.analysis.sync_counter import Losses

__all__ = ["Curve", "CurveRow", "sweep_effective_batches"]


def sweep_effective_batches(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_fn: Losses,
    *,
    accum_steps: Sequence[int] = (1, 2, 4, 8, 16, 32),
    num_steps: int = 100,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = AdamW,
    output_dir: str | Path | None = "outputs",
    noise: bool = True,
) -> Curve:
    """Measure updates of different sizes, each of micro-batches of the same size.

    Every row starts from the model's weights, leaves out a first window as warm-up and takes
    medians over the others. The model gets its weights, buffers and gradients back. Under torchrun
    all ranks call it, each with micro-batches of its own.

    Args:
        model: bare, or in DDP, whose settings are kept.
        micro_batches: micro-batches of one size, taken in turn.
        loss_fn: as for `equivalence_check`.
        accum_steps: micro-batches per window and rank, one row each.
        num_steps: micro-batches per row, rounded up to whole windows and at least 3 of them.
        optimizer: makes the row's optimizer from the parameters.
        output_dir: where accum-curve.json is written (by rank 0); None writes nothing.
        noise: estimate the gradient noise scale from the micro-batches, if there are 4 or more.

    Returns:
        The `Curve`: `rows` of numbers, `sentence`, what they mean, `table()`, `as_json()`, `write`.

    Raises:
        ValueError: no micro-batch, or not all of one size, or steps below 1.
    """
    sizes = sorted({items_in(micro_batch) for micro_batch in micro_batches})
    if len(sizes) != 1:
        raise ValueError(f"the sweep needs micro-batches of one size, got sizes {sizes}")
    if not accum_steps or min(accum_steps) < 1 or num_steps < 1:
        raise ValueError(f"steps must be at least 1, got {list(accum_steps)} and {num_steps}")
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    memory = PeakMemory(next(bare.parameters()).device)
    rows = []
    with _as_it_was(bare) as restart:
        bench = Bench(bare, model, micro_batches, loss_fn, memory)
        estimate = noise_between(bare, micro_batches, loss_fn) if noise else None
        for steps in sorted(set(accum_steps)):
            restart()
            updates = max(3, math.ceil(num_steps / steps))
            found = bench.measure(steps, updates, optimizer(bare.parameters()))
            rows.append(_row(steps, sizes[0], found))
    curve = Curve(tuple(rows), _device(bare), memory.meaning, estimate)
    if output_dir is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        curve.write(Path(output_dir) / "accum-curve.json")
    return curve


def _row(steps: int, micro_batch: int, found: Measured) -> CurveRow:
    """Turn what was measured into a row: medians, and rates from them."""
    effective = steps * micro_batch * found.world_size
    whole, inside = statistics.median(found.whole), statistics.median(found.inside)
    pairs = zip(found.alone, found.whole, strict=True)
    share = statistics.median(steps * alone / window for alone, window in pairs)
    return CurveRow(
        accum_steps=steps,
        micro_batch=micro_batch,
        effective_batch=effective,
        world_size=found.world_size,
        samples_per_sec=effective / whole,
        median_step_ms=whole * 1e3,
        forward_backward_ms=inside * 1e3,
        rest_ms=(whole - inside) * 1e3,
        limit_samples_per_sec=effective / whole / share,
        share_of_limit=share,
        updates=len(found.whole),
        sync_calls=found.syncs,
        avg_loss=statistics.fmean(found.losses),
        peak_memory_mib=found.peak_memory / 2**20,
    )


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[Callable[[], Any]]:
    """Give a way back to the weights and buffers at the start, and take it at the end."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    try:
        yield lambda: model.load_state_dict(saved)
    finally:
        model.load_state_dict(saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _device(model: nn.Module) -> str:
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
