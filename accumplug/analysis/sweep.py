"""The throughput curve: samples per second against the effective batch, at one micro-batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from accumplug.analysis.bench import Bench, Measurement, PeakMemory, noise_between
from accumplug.analysis.curve import Curve, CurveRow
from accumplug.analysis.sync_counter import Losses, check_module
from accumplug.dataloading.batch_tree import Batch, items_in

__all__ = ["sweep_effective_batches"]


def sweep_effective_batches(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    loss_fn: Losses,
    *,
    accum_steps: Sequence[int] = (1, 2, 4, 8, 16, 32),
    num_steps: int = 100,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = AdamW,
    output_dir: str | Path | None = "outputs",
    noise: bool = True,
) -> Curve:
    """Measure updates of different sizes, made of micro-batches of one size.

    Every row starts from the model's weights, skips a first window as a warm-up and takes medians
    over the others. Afterwards the model has its weights, buffers and gradients back. Under
    torchrun all ranks call it, each with its own micro-batches.

    Args:
        model: the bare model, or a model in DDP, whose settings are kept.
        micro_batches: micro-batches of one size, taken in turn.
        loss_fn: as for `equivalence_check`.
        accum_steps: micro-batches per window and rank; one row for each number.
        num_steps: micro-batches per row, rounded up to whole windows and at least 3 of them.
        optimizer: makes the row's optimizer from the parameters.
        output_dir: the directory for accum-curve.json, which rank 0 writes; None writes nothing.
        noise: estimate the gradient noise scale from the micro-batches, if there are 4 or more.

    Returns:
        The `Curve`: its `rows`, their meaning in one `sentence`, and `table()`, `as_json()`,
        `write()` and `draw()`.

    Raises:
        TypeError: `model` is not a torch module, or a number of steps is not an int.
        ValueError: there is no micro-batch, their sizes differ, one is empty, or a number of steps
            is below 1.
    """
    check_module(model)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in (*accum_steps, num_steps)):
        raise TypeError(f"steps must be of type int, got {list(accum_steps)} and {num_steps!r}")
    sizes = sorted({items_in(micro_batch) for micro_batch in micro_batches})
    if len(sizes) != 1:
        raise ValueError(f"the sweep needs micro-batches of one size, got sizes {sizes}")
    if sizes[0] < 1:
        raise ValueError("the sweep needs micro-batches with items, got micro-batches of 0 items")
    if not accum_steps or min(accum_steps) < 1 or num_steps < 1:
        raise ValueError(f"steps must be at least 1, got {list(accum_steps)} and {num_steps}")
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    memory = PeakMemory(next(bare.parameters()).device)
    rows = []
    with _restored(bare) as restart:
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


def _row(steps: int, micro_batch: int, found: Measurement) -> CurveRow:
    """Turn a measurement into a row: medians, and rates computed from them."""
    effective = steps * micro_batch * found.world_size
    window, passes = statistics.median(found.window), statistics.median(found.passes)
    pairs = zip(found.bare_pass, found.window, strict=True)
    share = statistics.median(steps * bare / whole for bare, whole in pairs)
    return CurveRow(
        accum_steps=steps,
        micro_batch=micro_batch,
        effective_batch=effective,
        world_size=found.world_size,
        samples_per_sec=effective / window,
        median_step_ms=window * 1e3,
        forward_backward_ms=passes * 1e3,
        rest_ms=(window - passes) * 1e3,
        limit_samples_per_sec=effective / window / share,
        share_of_limit=share,
        updates=len(found.window),
        sync_calls=found.syncs,
        avg_loss=statistics.fmean(found.losses),
        peak_memory_mib=found.peak_memory / 2**20,
    )


@contextmanager
def _restored(model: nn.Module) -> Iterator[Callable[[], object]]:
    """Yield a function that restores weights and buffers, and restore them at the end."""
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
