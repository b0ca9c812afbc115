"""The command line: plan, check, sweep, inspect, report. It parses, calls and prints."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from accumplug._version import __version__

__all__ = ["main"]

GOOD, FAILED, BAD_INPUT = 0, 1, 2

DESCRIPTION = "Exact gradient accumulation: plan a run, prove it on your model, measure it."
EXIT_CODES = "exit codes: 0 good, 1 the check failed, 2 bad input"
TARGET = (
    "module:function or file.py:function, a function without arguments that returns "
    "(model, batch, loss); the loss is called as loss(model, batch), or is a criterion of torch "
    "and the batch a pair (inputs, targets). A fourth value may count the items of a batch (e.g. "
    "target tokens). Default: a built-in example"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code: 0 good, 1 the check failed, 2 bad input."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away (`| head`): nothing is wrong
        return GOOD
    except Exception as error:
        if options.traceback:
            raise
        print(f"accumplug {options.command}: error: {_one_line(error)}", file=sys.stderr)
        return BAD_INPUT


def _one_line(error: Exception) -> str:
    """Say an error in one line, with its place if it comes from outside of this package."""
    text = " ".join(str(error).split()) or type(error).__name__
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(frame.filename).is_relative_to(Path(__file__).parent)
    if ours or isinstance(error, OSError):
        return text
    return (
        f"{type(error).__name__}: {text} ({frame.filename}:{frame.lineno}; --traceback shows all)"
    )


class _Parser(argparse.ArgumentParser):
    """Like its parent, with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("accumplug", description=DESCRIPTION, epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"accumplug {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary, add in (
        ("plan", "steps from effective batch, micro-batch and ranks", _add_plan),
        ("check", "one large batch against the same batch accumulated, on your model", _add_check),
        ("sweep", "samples per second against the effective batch", _add_sweep),
        ("inspect", "what a checkpoint holds, and whether it is whole", _add_inspect),
        ("report", "one page of pictures from a run's metrics.jsonl", _add_report),
    ):
        command = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=EXIT_CODES
        )
        command.add_argument("--traceback", action="store_true", help="show errors in full")
        add(command)
    return parser


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument("effective_batch", type=int, help="items per update over all ranks")
    command.add_argument("micro_batch", type=int, help="items per forward pass on one rank")
    command.add_argument("--world-size", type=int, default=1, help="ranks (default: 1)")
    command.add_argument("--lr", type=float, help="scale this learning rate to the effective batch")
    command.add_argument(
        "--tuned-batch",
        type=int,
        help="items per update that --lr was tuned at (default: one pass)",
    )
    command.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from accumplug.noise import ONE_DEVICE
    from accumplug.plan import plan, scale_learning_rate

    effective, micro, ranks = options.effective_batch, options.micro_batch, options.world_size
    steps = plan(effective, micro, ranks)
    print(
        f"steps {steps}: {micro} items x {steps} micro-batches x {ranks} ranks = {effective} items"
    )
    if options.lr is None:
        return GOOD
    tuned = options.tuned_batch or micro * ranks
    scaled = scale_learning_rate(options.lr, tuned_batch=tuned, effective_batch=effective)
    betas = ", ".join(
        f"{beta} -> {moved:.4g}" if (moved := scaled.adam_beta(beta)) else f"{beta} -> out of reach"
        for beta in (0.9, 0.999)
    )
    print(
        f"\nlearning rate {options.lr:g} was tuned at {tuned} items per update; at "
        f"{scaled.factor:g} times as many:\n"
        f"  linear       {scaled.linear:<8.3g} SGD, with a warm-up (Goyal et al. 2017; Krizhevsky "
        f"2014)\n"
        f"  square root  {scaled.square_root:<8.3g} Adam and RMSprop (Malladi et al. 2022); betas "
        f"{betas}\n"
        f"Starting points to tune from, not laws. {ONE_DEVICE}"
    )
    return GOOD


def _add_check(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", nargs="?", default="example", help=TARGET)
    command.add_argument(
        "--splits",
        type=_sizes,
        action="append",
        metavar="A,B,...",
        help="sizes of the micro-batches, e.g. 8,8 or 3,13; may be given several times",
    )
    command.add_argument("--bound", type=float, default=1e-4, help="largest difference (1e-4)")
    command.add_argument("--sum", action="store_true", help="the loss is a sum over its items")
    command.add_argument("--eval", action="store_true", help="without dropout: model.eval()")
    command.add_argument(
        "--float64", action="store_true", help="in double precision, where rounding is 1e-16"
    )
    command.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    from accumplug.proof import equivalence_check
    from accumplug.target import load_target

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


def _add_sweep(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", nargs="?", default="example", help=TARGET)
    command.add_argument("--micro-batch", type=int, default=8, help="items per forward pass (8)")
    command.add_argument(
        "--steps", type=_sizes, default=(1, 2, 4, 8, 16, 32), help="e.g. 1,4,16 (1,2,4,8,16,32)"
    )
    command.add_argument(
        "--num-steps", type=int, default=100, help="micro-batches per row, at least 3 windows (100)"
    )
    command.add_argument("--output-dir", type=Path, default=Path("outputs"), help="(outputs)")
    command.add_argument("--no-picture", action="store_true", help="write the JSON only")
    command.set_defaults(run=_sweep)


def _sweep(options: argparse.Namespace) -> int:
    from accumplug.noise import ONE_DEVICE
    from accumplug.pieces import cut, items_in, take
    from accumplug.report import draw_curve, need_matplotlib
    from accumplug.sweep import sweep_effective_batches
    from accumplug.target import load_target

    if not options.no_picture:
        need_matplotlib()
    target = load_target(options.target)
    count, size = items_in(target.batch) // max(1, options.micro_batch), options.micro_batch
    if size < 1 or count < 1:
        raise ValueError(
            f"the batch of {items_in(target.batch)} items holds no micro-batch of {size} items"
        )
    micro_batches = cut(take(target.batch, slice(count * size)), [size] * count)
    curve = sweep_effective_batches(
        target.model,
        micro_batches,
        target.loss_fn,
        accum_steps=options.steps,
        num_steps=options.num_steps,
        output_dir=options.output_dir,
    )
    print(f"{curve.table()}\n\n{curve.sentence} {ONE_DEVICE}\n")
    print(f"measured on {curve.device}; MiB: {curve.memory_is}")
    print(options.output_dir / "accum-curve.json")
    if not options.no_picture:
        print(draw_curve(curve.as_json(), options.output_dir / "accum-curve.png"))
    return GOOD


def _add_inspect(command: argparse.ArgumentParser) -> None:
    command.add_argument("directory", type=Path, help="a checkpoint, or a directory of them")
    command.add_argument(
        "--verify", action="store_true", help="read every byte (default: files and sizes)"
    )
    command.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    from accumplug.checkpoint.inspect import inspect_command

    text, code = inspect_command(options.directory, verify=options.verify)
    print(text, file=sys.stderr if code == BAD_INPUT else sys.stdout)
    return code


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("metrics", type=Path, help="a run's metrics.jsonl")
    command.add_argument("--output", type=Path, help="the PNG (default: report.png beside it)")
    command.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from accumplug.report import report

    print(report(options.metrics, options.output))
    return GOOD


def _sizes(text: str) -> tuple[int, ...]:
    """Read "8,8" as (8, 8)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers") from None
