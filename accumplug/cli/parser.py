"""The command line: its commands and options, and errors in one line."""

from __future__ import annotations

import argparse
import functools
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from accumplug._version import __version__
from accumplug.cli import commands
from accumplug.cli.commands import BAD_INPUT, GOOD

__all__ = ["main"]

DESCRIPTION = "Exact gradient accumulation: plan a run, prove it on your model, measure it."
INTERRUPTED = 130  # the exit code of a shell for Ctrl-C
LONGEST = 500  # characters of an error
EXIT_CODES = "exit codes: 0 good, 1 the check failed, 2 bad input"
TARGET = (
    "module:function or file.py:function, a function without arguments that returns "
    "(model, batch, loss); the loss is called as loss(model, batch), or is a criterion of torch "
    "and the batch a pair (inputs, targets). A fourth value may count the items of a batch (e.g. "
    "target tokens). Default: a built-in example"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 good, 1 the check failed, 2 bad input."""
    options = make_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    with warnings.catch_warnings():
        warnings.showwarning = functools.partial(_warn, f"accumplug {options.command}")
        try:
            return run(options)
        except BrokenPipeError:
            sys.stderr.close()  # the reader has gone (`| head`): nothing is wrong
            return GOOD
        except KeyboardInterrupt:
            print(f"accumplug {options.command}: interrupted", file=sys.stderr)
            return INTERRUPTED
        except Exception as error:
            if options.traceback:
                raise
            sys.stderr.write(f"accumplug {options.command}: error: {_one_line(error)}\n")
            return BAD_INPUT


def _warn(command: str, message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning in one line, as errors are printed."""
    print(f"{command}: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    """Describe an error in one line, with its place if it comes from outside of this package."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0] + " ..."
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(frame.filename).is_relative_to(Path(__file__).parents[1])
    if ours or isinstance(error, OSError):
        return text
    place = f"{frame.filename}:{frame.lineno}"
    return f"{type(error).__name__}: {text} ({place}; --traceback shows all)"


class _Parser(argparse.ArgumentParser):
    """An argument parser with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = _Parser("accumplug", description=DESCRIPTION, epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"accumplug {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary, add in (
        ("plan", "steps from effective batch, micro-batch and ranks", _add_plan),
        ("check", "one large batch against the same batch accumulated, on your model", _add_check),
        ("sweep", "samples per second against the effective batch", _add_sweep),
        ("inspect", "the content of a checkpoint, and whether it is whole", _add_inspect),
        ("export", "the weights of a checkpoint as model.safetensors", _add_export),
        ("report", "one page of pictures from the log of a run", _add_report),
    ):
        command = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=EXIT_CODES
        )
        command.add_argument("--traceback", action="store_true", help="show errors in full")
        add(command)
    return parser


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument("effective_batch", type=int, help="items per update over all ranks")
    command.add_argument(
        "micro_batch", type=int, nargs="?", help="items per forward pass on one rank"
    )
    command.add_argument("--world-size", type=int, help="ranks (default: 1, or torchrun's)")
    command.add_argument(
        "--fit",
        metavar="TARGET",
        help="instead of micro_batch: find the largest one that fits in memory, by running your "
        "model (a target as of `accumplug check`); under torchrun each rank tries its own device "
        "and all take the smallest answer",
    )
    command.add_argument(
        "--device", help="device for --fit (default: the rank's own accelerator, or cpu)"
    )
    command.add_argument("--lr", type=float, help="scale this learning rate to the effective batch")
    command.add_argument(
        "--tuned-batch",
        type=int,
        help="items per update at which --lr was tuned (default: one micro-batch on each rank)",
    )
    command.set_defaults(run=commands.run_plan)


def _add_check(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", nargs="?", default="example", help=TARGET)
    command.add_argument(
        "--splits",
        type=_sizes,
        action="append",
        metavar="A,B,...",
        help="sizes of the micro-batches, e.g. 8,8 or 3,13; can be given several times (default: "
        "halves, quarters, three uneven pieces)",
    )
    command.add_argument(
        "--bound",
        type=float,
        help="largest allowed difference (default: 1e-4, or 4 times the rounding of the coarsest "
        "number format: 0.03 for bfloat16, 4e-3 for float16 and TF32)",
    )
    command.add_argument("--sum", action="store_true", help="the loss is a sum over its items")
    command.add_argument("--eval", action="store_true", help="check without dropout: model.eval()")
    command.add_argument(
        "--float64", action="store_true", help="check in double precision, which rounds to 1e-16"
    )
    command.set_defaults(run=commands.run_check)


def _add_sweep(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", nargs="?", default="example", help=TARGET)
    command.add_argument("--micro-batch", type=int, default=8, help="items per forward pass (8)")
    command.add_argument(
        "--steps",
        type=_sizes,
        metavar="A,B,...",
        default=(1, 2, 4, 8, 16, 32),
        help="micro-batches per window, one row each (1,2,4,8,16,32)",
    )
    command.add_argument(
        "--num-steps", type=int, default=100, help="micro-batches per row, at least 3 windows (100)"
    )
    command.add_argument(
        "--output-dir",
        type=Path,
        default=Path("outputs"),
        help="directory for accum-curve.json and accum-curve.png (outputs)",
    )
    command.add_argument("--no-picture", action="store_true", help="write accum-curve.json only")
    command.set_defaults(run=commands.run_sweep)


def _add_inspect(command: argparse.ArgumentParser) -> None:
    command.add_argument("directory", type=Path, help="a checkpoint, or a directory of them")
    command.add_argument(
        "--verify", action="store_true", help="check every byte (default: files and their sizes)"
    )
    command.set_defaults(run=commands.run_inspect)


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("directory", type=Path, help="a checkpoint, or a directory of them")
    command.add_argument("output", type=Path, help="the directory of model.safetensors")
    command.set_defaults(run=commands.run_export)


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "metrics", type=Path, help="a log with one JSON object per line, e.g. metrics.jsonl"
    )
    command.add_argument(
        "--output", type=Path, help="path of the PNG file (default: report.png beside the log)"
    )
    command.set_defaults(run=commands.run_report)


def _sizes(text: str) -> tuple[int, ...]:
    """Parse "8,8" as (8, 8)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers") from None
