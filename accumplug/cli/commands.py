"""The commands of the command line: each calls, prints and returns an exit code."""

from __future__ import annotations

import argparse
import os
import sys

import torch

from accumplug.analysis.equivalence import equivalence_check
from accumplug.analysis.memory_fit import Trial, launched_ranks, rank_device
from accumplug.analysis.plan import largest_micro_batch, plan, scale_learning_rate
from accumplug.analysis.plotting import need_matplotlib
from accumplug.analysis.report import report
from accumplug.analysis.sweep import sweep_effective_batches
from accumplug.analysis.user_target import load_target
from accumplug.checkpoint.export import export
from accumplug.dataloading.batch_tree import cut, items_in, take
from accumplug.noise.scale import ONE_DEVICE
from accumplug.storage.inspect import inspect_command

__all__ = ["BAD_INPUT", "FAILED", "GOOD"]

GOOD, FAILED, BAD_INPUT = 0, 1, 2


def run_plan(options: argparse.Namespace) -> int:
    """Print the steps, and where a tuned learning rate may start."""
    if (options.micro_batch is None) == (options.fit is None):
        raise ValueError("give either a micro-batch or --fit module:function")
    if options.tuned_batch is not None and options.lr is None:
        raise ValueError("--tuned-batch goes with --lr")
    if options.device is not None and options.fit is None:
        raise ValueError("--device goes with --fit")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = launched if options.world_size is None else options.world_size
    micro = options.micro_batch
    if options.fit is not None:
        micro, ranks = _largest_micro_batch(options)
    effective = options.effective_batch
    steps = plan(effective, micro, ranks)
    text = (
        f"steps {steps}: {_many(micro, 'item')} x {_many(steps, 'micro-batch', 'es')} x "
        f"{_many(ranks, 'rank')} = {_many(effective, 'item')}"
    )
    if options.lr is not None:
        text += "\n\n" + _learning_rate(options, micro * ranks)
    if _is_first_rank():
        print(text)
    return GOOD


def _many(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _largest_micro_batch(options: argparse.Namespace) -> tuple[int, int]:
    """Return the largest micro-batch that fits on the devices of all ranks, and the ranks."""
    device = rank_device(options.device)
    trial = Trial(load_target(options.fit), device)
    with launched_ranks() as (launched, smallest):
        ranks = launched if options.world_size is None else options.world_size
        return largest_micro_batch(trial, options.effective_batch, ranks, agree=smallest), ranks


def _learning_rate(options: argparse.Namespace, one_pass: int) -> str:
    """Say where a tuned learning rate may start at the effective batch."""
    tuned = one_pass if options.tuned_batch is None else options.tuned_batch
    scaled = scale_learning_rate(
        options.lr, tuned_batch=tuned, effective_batch=options.effective_batch
    )
    betas = ", ".join(
        f"{beta} -> {moved:.4g}" if (moved := scaled.adam_beta(beta)) else f"{beta} -> out of reach"
        for beta in (0.9, 0.999)
    )
    return (
        f"learning rate {options.lr:g} was tuned at {tuned} items per update; at "
        f"{scaled.factor:g} times as many:\n"
        f"  linear       {scaled.linear:<8.3g} SGD, with a warm-up (Goyal et al. 2017; Krizhevsky "
        f"2014)\n"
        f"  square root  {scaled.square_root:<8.3g} Adam and RMSprop (Malladi et al. 2022); betas "
        f"{betas}\n"
        f"Starting points to tune from, not laws. {ONE_DEVICE}"
    )


def run_check(options: argparse.Namespace) -> int:
    """Print the result of the equivalence check; return 1 if it failed."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("the check is for a single process; run it without torchrun")
    target = load_target(options.target)
    if options.float64:
        target = target.double()
    if options.eval:
        target.model.eval()
    result = equivalence_check(
        target.model,
        target.batch,
        target.loss_fn,
        splits=options.splits,
        items=target.items,
        reduction="sum" if options.sum else "mean",
        bound=options.bound,
    )
    numbers = sum(parameter.numel() for parameter in target.model.parameters())
    print(f"checked {options.target}: {type(target.model).__name__} of {numbers:,} parameters")
    print(result)
    return GOOD if result.passed else FAILED


def run_sweep(options: argparse.Namespace) -> int:
    """Measure, write and draw the throughput curve, and print it."""
    if not options.no_picture:
        need_matplotlib()
    rank_device()
    target = load_target(options.target)
    count, size = items_in(target.batch) // max(1, options.micro_batch), options.micro_batch
    if size < 1 or count < 1:
        raise ValueError(
            f"the batch of {items_in(target.batch)} items holds no micro-batch of {size} items"
        )
    micro_batches = cut(take(target.batch, slice(count * size)), [size] * count)
    with launched_ranks(None if torch.accelerator.is_available() else "gloo"):
        curve = sweep_effective_batches(
            target.model,
            micro_batches,
            target.loss_fn,
            accum_steps=options.steps,
            num_steps=options.num_steps,
            output_dir=options.output_dir,
        )
    if not _is_first_rank():
        return GOOD
    print(f"{curve.table()}\n\n{curve.sentence} {ONE_DEVICE}\n")
    print(f"measured on {curve.device}; MiB: {curve.memory_is}")
    print(options.output_dir / "accum-curve.json")
    if not options.no_picture:
        print(curve.draw(options.output_dir / "accum-curve.png"))
    return GOOD


def run_inspect(options: argparse.Namespace) -> int:
    """Print what a checkpoint holds; return 1 if it is damaged."""
    text, code = inspect_command(options.directory, verify=options.verify)
    if code == BAD_INPUT:
        print(f"accumplug inspect: error: {text}", file=sys.stderr)
    else:
        print(text)
    return code


def run_export(options: argparse.Namespace) -> int:
    """Write the weights of a checkpoint, and print the paths of the files."""
    for path in export(options.directory, options.output):
        print(path)
    return GOOD


def run_report(options: argparse.Namespace) -> int:
    """Draw a run's log, and print the path of the picture."""
    print(report(options.metrics, options.output))
    return GOOD
