"""Names of torch that are not public, looked up before anything is done with them."""

from __future__ import annotations

from collections.abc import Iterable

from accumplug.errors import MovedError


def require(owner: object, names: Iterable[str], purpose: str) -> None:
    """Raise MovedError unless `owner` has all of its private `names`."""
    for name in names:
        if not hasattr(owner, name):
            raise MovedError(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}", purpose)
