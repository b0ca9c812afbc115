"""Checks that a saved position has the form that `DataPosition.state` gives, before it is used.

Whoever wrote the checkpoint may have been a stranger. A wrong form is a TypeError at the resume,
not an AttributeError in the middle of the first pass; no number makes a list of its length.
"""

from __future__ import annotations

from typing import Any

MOST = 10**15  # items of a pass
MALFORMED = (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""What using a value of another form than it should have may raise, besides a ValueError."""


def check(state: Any) -> None:
    """TypeError with what is wrong."""
    _dict(state, "the position")
    _each(state, {"ended": bool, "has_workers": bool, "starts": dict, "now": dict})
    _count(state.get("made"), "made")
    _numbers(state.get("numbers"))
    for number, start in state["starts"].items():
        _count(number, "the number of a fetch")
        _fetch(start)
    if state.get("origin") is not None:
        _fetch(state["origin"])
    if "protocol" not in state:
        raise TypeError("the position has no protocol")
    for number, crc in _dict(state.get("fingerprints", {}), "fingerprints").items():
        _count(number, "the number of a fingerprint")
        _count(crc, "a fingerprint")
    if (start := state["start"]) is not None:
        _start(start)
    elif state["ended"]:
        raise TypeError("a pass has ended that has not started")


def _fetch(start: Any) -> None:
    _each(_dict(start, "a fetch"), {"states": dict})
    if "protocol" not in start:
        raise TypeError("a fetch has no protocol")


def _start(start: Any) -> None:
    _dict(start, "start")
    _each(start, {"has_iterator": bool, "has_workers": bool, "deal": dict})
    _numbers(start.get("numbers"))
    deal = start["deal"]
    _count(deal.get("base"), "base")
    _each(deal, {"loader": dict, "made": list})
    if start["states"] is not None or not deal["made"]:
        _each(start, {"states": dict})
    if not deal["made"]:
        return
    ranks = _count(deal.get("world"), "world")
    for made in deal["made"]:
        _each(_dict(made, "an assignment"), {"taken": list, "lefts": list, "carries": bool})
        for number in made["taken"]:
            _count(number, "micro-batches of a rank")
        for number in made["lefts"]:
            _count(number, "micro-batches of a window", 10**6)
        if len(made["taken"]) != ranks or made["needs"] not in ("none", "one", "as many"):
            raise TypeError(f"an assignment is {made!r:.200} for {ranks} ranks")
        ranks = len(made["lefts"])
        if not _count(made.get("window"), "window"):
            raise TypeError("window is 0")
    if _count(deal.get("rank"), "rank") >= ranks:
        raise TypeError(f"rank {deal['rank']} of {ranks}")


def _dict(value: Any, name: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise TypeError(f"{name} is {value!r:.100}")
    return value


def _each(state: dict[Any, Any], kinds: dict[str, type]) -> None:
    for name, kind in kinds.items():
        if type(state.get(name)) is not kind:
            raise TypeError(f"{name} is {state.get(name)!r:.100}")


def _numbers(numbers: Any) -> None:
    for path, number in _dict(numbers, "numbers").items():
        if type(path) is not str or type(number) is not int:
            raise TypeError(f"a number is {number!r:.100} at {path!r:.100}")


def _count(value: Any, name: str, most: int = MOST) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise TypeError(f"{name} is {value!r:.100}")
    return value
