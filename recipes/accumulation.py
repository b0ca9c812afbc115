"""Gradient accumulation in one sitting: prove it, take one step, measure what it buys.

    python recipes/accumulation.py
    python recipes/accumulation.py --exercise all

The lesson compares one large batch with the same batch in micro-batches, takes one optimizer
step and counts its reductions, sweeps the effective batch at a fixed micro-batch, and leaves
accum-curve.json and accum-curve.png in --output-dir. An exercise runs instead of the lesson.
It reads from top to bottom, and needs nothing but this package: the data is made up.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.optim import SGD, AdamW

from accumplug import (
    Accumulator,
    equivalence_check,
    sweep_effective_batches,
    sync_counter,
    train_one_optimizer_step,
)

MICRO_BATCH = 8
STEPS = 4
BOUND = 1e-4  # what the lesson asks of the largest difference
LOSS = nn.CrossEntropyLoss()


def make(width: int = 512) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A classifier, and 256 made-up samples that it can learn."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, width),
        nn.LayerNorm(width),  # not BatchNorm, which would see micro-batches
        nn.GELU(),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.GELU(),
        nn.Linear(width, 10),
    )
    inputs = torch.randn(256, 784)
    return model, inputs, (inputs @ torch.randn(784, 10)).argmax(1)


def micro_batches(
    inputs: torch.Tensor, targets: torch.Tensor, size: int = MICRO_BATCH
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def lesson(num_steps: int, output_dir: Path) -> bool:
    model, inputs, targets = make()
    items = MICRO_BATCH * STEPS

    print(f"1. One batch of {items} against {STEPS} micro-batches of {MICRO_BATCH}")
    batch = inputs[:items], targets[:items]
    splits = [(MICRO_BATCH,) * STEPS, (1, 2, 4, 8, items - 15)]
    result = equivalence_check(model, batch, LOSS, splits=splits, bound=BOUND)
    print(result)

    print("\n2. One optimizer step")
    step = train_one_optimizer_step(
        model, AdamW(model.parameters()), micro_batches(*batch), LOSS, max_grad_norm=1.0
    )
    print(
        f"{step.micro_batches} micro-batches, {step.syncs} gradient reduction, one optimizer step; "
        f"loss {step.loss:.4f}, gradient norm {step.grad_norm:.4f} before clipping"
    )

    print(f"\n3. The effective batch, at micro-batches of {MICRO_BATCH}")
    curve = sweep_effective_batches(
        model,
        micro_batches(inputs, targets),
        LOSS,
        accum_steps=(1, 2, 4, 8, 16, 32),
        num_steps=num_steps,
        output_dir=output_dir,
    )
    print(f"{curve.table()}\n\n{curve.sentence}\n(measured on {curve.device}; times are medians)\n")
    print(curve.draw(output_dir / "accum-curve.png"))
    print(output_dir / "accum-curve.json")
    return result.passed and step.syncs == 1


def wrong_scale() -> bool:
    """Without the division the gradient is STEPS times too large: plain SGD leaves at once."""
    start, inputs, targets = make(width=64)
    left = {}
    for name, optimizer, divide in (
        ("SGD, loss / steps", SGD, True),
        ("SGD, no division", SGD, False),
        ("AdamW, no division", AdamW, False),
    ):
        reference, model = copy.deepcopy(start), copy.deepcopy(start)
        steppers = [optimizer(m.parameters(), lr=1e-3) for m in (reference, model)]
        gaps = []
        for x, y in micro_batches(inputs, targets, MICRO_BATCH * STEPS)[:3]:
            LOSS(reference(x), y).backward()
            for small in micro_batches(x, y):
                loss = LOSS(model(small[0]), small[1])
                (loss / STEPS if divide else loss).backward()
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
            gaps.append(largest_gap(reference, model))
        left[name] = gaps
        print(f"{name:<20} largest weight difference after steps 1, 2, 3: {show(gaps)}")
    print("AdamW divides by the gradient's own size, so it hides the factor: compare with SGD, or")
    print("compare gradients. Clipping, eps and weight decay still see it.")
    right, wrong, hidden = left.values()
    return right[0] < 1e-6 < wrong[0] and hidden[0] < wrong[0]


def adamw() -> bool:
    """AdamW's moments and step count advance once per window, not once per micro-batch."""
    model, inputs, targets = make(width=64)
    optimizer = AdamW(model.parameters())
    accum = Accumulator(steps=STEPS, optimizer=optimizer)
    counts = []
    for x, y in micro_batches(inputs, targets)[: 2 * STEPS]:
        with accum(model) as micro:
            accum.backward(LOSS(model(x), y))
        state = optimizer.state[model[0].weight]
        counts.append(int(state["step"]) if state else 0)
        print(f"micro-batch {micro.index + 1} of {STEPS}: AdamW's step is {counts[-1]}")
    return counts == [0, 0, 0, 1, 1, 1, 1, 2]


def ddp() -> bool:
    """Two processes: the reductions of a window fall from STEPS to 1."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(one_rank, (folder,), nprocs=2, join=False, start_method="spawn")
        deadline = time.monotonic() + 180
        try:
            while not ranks.join(timeout=5):
                if time.monotonic() > deadline:
                    raise TimeoutError("the two ranks did not end within 3 minutes")
        finally:
            for process in ranks.processes:
                process.kill()
        told = [torch.load(Path(folder) / f"{rank}.pt") for rank in (0, 1)]
    for rank, (world, plain, deferred, gap) in enumerate(told):
        print(
            f"rank {rank} of {world}, {STEPS} micro-batches: {plain} reductions in a plain loop, "
            f"{deferred} with an Accumulator; the gradients differ by {gap:.1e}"
        )
    return all((world, plain, deferred) == (2, STEPS, 1) for world, plain, deferred, _ in told)


def one_rank(rank: int, folder: str) -> None:
    """What each of the two processes does, each on samples of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    model, inputs, targets = make(width=64)
    mine = micro_batches(inputs, targets)[rank::2][:STEPS]
    with sync_counter(model) as counter:
        for x, y in mine:
            (LOSS(counter.model(x), y) / STEPS).backward()
        plain = counter.syncs
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with sync_counter(model) as counter:
        accum = Accumulator(steps=STEPS)  # no optimizer: the gradient stays to be looked at
        for x, y in mine:
            with accum(counter.model):
                accum.backward(LOSS(counter.model(x), y))
        deferred = counter.syncs
    pairs = zip(expected, model.parameters(), strict=True)
    gap = max(float((a - b.grad).abs().max()) for a, b in pairs)
    torch.save((dist.get_world_size(), plain, deferred, gap), Path(folder) / f"{rank}.pt")
    del counter  # DDP has to go before its process group
    dist.destroy_process_group()


def splits() -> bool:
    """2 x 8 and 4 x 4 are the same sum in another order: the difference is rounding."""
    model, inputs, targets = make(width=64)
    gaps = {}
    for dtype in (torch.float32, torch.float64):
        batch = inputs[:16].to(dtype), targets[:16]
        result = equivalence_check(model.to(dtype), batch, LOSS, splits=[(8,) * 2, (4,) * 4])
        for split, gap in result.splits.items():
            gaps[dtype, split] = gap.relative
            print(f"{dtype}, {len(split)} x {split[0]}: relative difference {gap.relative:.1e}")
    print(
        "Adding the same numbers in another order rounds differently: by about 1e-7 of the\n"
        "gradient in float32, 1e-16 in float64. That it shrinks with the precision shows that it\n"
        f"is rounding and not the formula; the bound of {BOUND:g} leaves room for larger models."
    )
    return all(
        gap < (1e-5 if dtype == torch.float32 else 1e-13) for (dtype, _), gap in gaps.items()
    )


def out_of_memory() -> bool:
    """A micro-batch that does not fit: drop the window, halve the micro-batch, repeat it."""
    model, inputs, targets = make(width=64)
    x, y = inputs[:32], targets[:32]

    def forward(small: torch.Tensor) -> torch.Tensor:
        if len(small) > 4:  # stands for a device that holds 4 samples
            raise torch.OutOfMemoryError("pretended")
        return model(small)

    accum, size = Accumulator(steps=2), 16
    while not accum.windows:
        try:
            for small, label in micro_batches(x, y, size):
                with accum(model):
                    accum.backward(LOSS(forward(small), label))
        except torch.OutOfMemoryError:
            accum.discard()
            model.zero_grad()
            size //= 2
            accum.steps = 32 // size
            print(f"out of memory: the window starts again as {accum.steps} x {size}")
    found = [parameter.grad for parameter in model.parameters()]
    expected = torch.autograd.grad(LOSS(model(x), y), list(model.parameters()))
    gap = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    print(f"{accum.steps} x {size} fits; its gradient is that of one batch of 32 within {gap:.1e}")
    return gap < BOUND


def largest_gap(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def show(numbers: list[float]) -> str:
    return ", ".join(f"{number:.1e}" for number in numbers)


EXERCISES = {
    "wrong-scale": wrong_scale,
    "adamw": adamw,
    "ddp": ddp,
    "splits": splits,
    "out-of-memory": out_of_memory,
}


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main() -> int:
    parser = OneLineParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--num-steps",
        type=int,
        default=100,
        help="micro-batches per row of the sweep, rounded up to whole windows, at least 3 (100)",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="(outputs)")
    parser.add_argument("--exercise", choices=[*EXERCISES, "all"], help="instead of the lesson")
    args = parser.parse_args()
    if args.num_steps < 1:
        parser.error(f"--num-steps must be at least 1, got {args.num_steps}")
    if args.exercise is None:
        return 0 if lesson(args.num_steps, args.output_dir) else 1
    right = True
    for name in EXERCISES if args.exercise == "all" else [args.exercise]:
        print(f"\n{name}: {EXERCISES[name].__doc__}")
        right = EXERCISES[name]() and right
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
