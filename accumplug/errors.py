"""The exceptions of accumplug."""

from __future__ import annotations


class TornWindowError(RuntimeError):
    """The open window's running sum can't be trusted; ``accum.discard()`` throws it away."""


class NonFiniteError(RuntimeError):
    """The gradient of a window is not finite and `nonfinite` is "raise"."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete or not one; the message names the file."""
