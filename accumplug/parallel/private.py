"""Names of torch, and of trainers, that are not public, looked up before they are used."""

from __future__ import annotations

from collections.abc import Iterable

from accumplug.errors import MovedError


def require(owner: object, names: Iterable[str], purpose: str, library: str = "torch") -> None:
    """Raise MovedError unless `owner` has all of its private `names`."""
    for name in names:
        if not hasattr(owner, name):
            place = getattr(owner, "__name__", type(owner).__name__)
            raise MovedError(f"{place}.{name}", purpose, library)
