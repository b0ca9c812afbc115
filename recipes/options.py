"""What the training recipes are told: the command line, and the learning rate's course."""

from __future__ import annotations

import argparse
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

AGAIN = 75  # EX_TEMPFAIL of sysexits.h
"""The exit code of a run that a signal has ended, and that the same command goes on with."""


class OneLineParser(argparse.ArgumentParser):
    """Errors are one line, said by one rank, and exit with 2."""

    def error(self, message: str) -> NoReturn:
        said = f"{self.prog}: error: {' '.join(message.split())}\n"
        self.exit(2, said if os.environ.get("RANK", "0") == "0" else None)


def training_options(description: str | None, output_dir: str) -> OneLineParser:
    """The options that both training recipes have."""
    parser = OneLineParser(
        description=(description or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="a folder of text files, or a .jsonl with a field text in each line; "
        "without it the texts of Python's own help system",
    )
    parser.add_argument(
        "--effective-batch", type=positive, default=32, help="sequences per update, over all ranks"
    )
    parser.add_argument(
        "--micro-batch", type=positive, default=8, help="sequences per forward pass of one rank"
    )
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--max-updates", type=positive, default=300, help="optimizer updates")
    parser.add_argument(
        "--noise-scale", action="store_true", help="estimate how large a batch still pays"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data's order")
    parser.add_argument("--output-dir", type=Path, default=Path(output_dir))
    parser.add_argument(
        "--checkpoint-every",
        type=positive,
        metavar="N",
        help="save every N micro-batches into checkpoints/ of the output directory, and end with "
        f"exit code {AGAIN} after a save if SIGTERM or SIGUSR1 comes",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint if there is one; signals save the run as well",
    )
    for package in ("tqdm", "matplotlib"):
        if find_spec(package) is None:
            parser.error(f"needs {package}: pip install 'accumplug[recipes]'")
    return parser


class Settings:
    """What a run has to keep when it goes on, for a Checkpointer to save and compare: some of its
    options, and `numbers` by name."""

    def __init__(self, args: argparse.Namespace, numbers: dict[str, int]) -> None:
        names = ("effective_batch", "micro_batch", "mixed_precision", "seed")
        self.options = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
        self.options |= numbers

    def state_dict(self) -> dict[str, Any]:
        """What they are."""
        return self.options

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError if another one was saved."""
        for name, here in self.options.items():
            if state[name] != here:
                raise ValueError(
                    f"the checkpoint is of a run whose {name} is {state[name]}, and here it is "
                    f"{here}; keep it, or give another --output-dir"
                )


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def warm_up_and_decay(updates: int, max_updates: int) -> float:
    """The share of the peak learning rate after so many updates: up in a straight line over the
    first fifteenth, then down to a twentieth along a cosine."""
    warm_up = max(1, max_updates // 15)
    if updates < warm_up:
        return (updates + 1) / warm_up
    done = min(1.0, (updates - warm_up) / max(1, max_updates - warm_up))
    return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2
