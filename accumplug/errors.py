"""The exceptions of accumplug."""

from __future__ import annotations

import sys


class TornWindowError(RuntimeError):
    """The open window's running sum can't be trusted; ``accum.discard()`` throws it away."""


class NonFiniteError(RuntimeError):
    """The gradient of a window is not finite and `nonfinite` is "raise"."""


class CheckpointError(ValueError):
    """A checkpoint that can't be used; the message names the file."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is proven to be damaged or incomplete: no later attempt can read it."""


class OverwrittenError(RuntimeError):
    """What was being saved has been written to before it was on disk."""


class LeaseHeldError(RuntimeError):
    """Another run that lives writes into the directory."""


class MovedError(RuntimeError):
    """A private part of a library is gone, or means something else than in the versions that
    accumplug was tested with.

    Args:
        name: the private part.
        purpose: what it is read for.
        library: the library, which has been imported.
    """

    def __init__(self, name: str, purpose: str, library: str = "torch") -> None:
        super().__init__(
            f"{library} {sys.modules[library].__version__} moved {name}, which accumplug reads for "
            f"{purpose}. Use a version of it that was tested (docs/versions.md)"
        )


class OptionTypeError(TypeError, ValueError):
    """An argument of a wrong type. A ValueError too, which it was in the first version."""
