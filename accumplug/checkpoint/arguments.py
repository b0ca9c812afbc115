"""The arguments of a Checkpointer, checked before it takes hold of anything."""

from __future__ import annotations

import difflib
import os
import signal
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def check_count(name: str, value: Any, unit: str) -> None:
    """Raise unless `value` is an int of at least 1."""
    if type(value) is not int:
        raise TypeError(f"{name} is a number of {unit} (an int); got {value!r:.100}")
    if value < 1:
        raise ValueError(f"{name} is a number of {unit}, at least 1; got {value}")


def check_seconds(name: str, value: Any) -> None:
    """Raise unless `value` is a number above 0."""
    if type(value) not in (int, float):
        raise TypeError(f"{name} is a number of seconds; got {value!r:.100}")
    if not value > 0:
        raise ValueError(f"{name} is a number of seconds above 0; got {value}")


def check_frozen(frozen: Any, copy: bool) -> None:
    """Raise ValueError unless it is "link", or "skip" in a loop that doesn't need copies."""
    if frozen not in ("link", "skip"):
        raise ValueError(f'frozen is "link" or "skip"; got {frozen!r:.100}')
    if frozen == "skip" and copy:
        raise ValueError(
            'frozen="skip" relies on noticing each write into a frozen weight, and copy=True is '
            'for loops in which some go unnoticed; give frozen="link"'
        )


def check_directory(directory: Any) -> None:
    """Raise TypeError unless it is a path."""
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"directory is a path; got {directory!r:.100}")


def check_signals(signals: Any) -> tuple[int, ...]:
    """`signals` as numbers, if they are signals that can be handled here."""
    if not isinstance(signals, Sequence) or not all(isinstance(one, int) for one in signals):
        raise TypeError(f"signals is a sequence, like (signal.SIGTERM,); got {signals!r:.100}")
    if unknown := set(signals) - signal.valid_signals() | {signal.SIGKILL} & set(signals):
        raise ValueError(f"signals has {min(unknown)}, which no program can handle")
    if signals and threading.current_thread() is not threading.main_thread():
        raise ValueError("signals= needs the main thread; build the Checkpointer there")
    return tuple(signals)


def check_stateful(stateful: Mapping[str, Any], options: Collection[str]) -> None:
    """Raise TypeError for a keyword that is no object with a state: mistyped, most likely."""
    for name, thing in stateful.items():
        if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            continue
        near = difflib.get_close_matches(name, options, 1)
        if near:
            raise TypeError(f"unknown option {name!r}; did you mean {near[0]!r}?")
        raise TypeError(
            f"{name} is neither an option nor an object with state_dict and load_state_dict, but "
            f"a {type(thing).__name__}"
        )
