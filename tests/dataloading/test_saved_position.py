"""A saved position of any form is an error at the resume or is used; nothing else, and quickly."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accumplug.dataloading.position import DataPosition

ABSURD = (None, -1, 10**17, 10**12, 1.5, True, "x", [], {}, [1], {"x": 1}, torch.ones(2), {3: {}})


def loader() -> DataLoader[Any]:
    data: Any = [torch.tensor([float(i)]) for i in range(8)]
    return DataLoader(data, 1, shuffle=True, generator=torch.Generator().manual_seed(1))


def saved(redistributed: bool) -> dict[str, Any]:
    """The state after 3 of 8 items; or of one of two ranks that took them over."""
    position = DataPosition(loader(), generators=[random.Random(0), np.random.default_rng(0)])
    items = position.open(position.loader, 0)
    for count in range(1, 4):
        next(items)
        position.blocks_ran(count)
    state = copy.deepcopy(position.state(3, is_open=True))
    if redistributed:
        made = {"taken": [3], "lefts": [1, 1], "carries": False, "window": 4, "needs": "none"}
        new = {"world": 1, "made": [made], "rank": 0, "base": 3}
        state["start"] = {**state["start"], "states": None}
        state["start"]["deal"] |= new
        state |= {"starts": {}, "made": 0, "fingerprints": {}}
    return state


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Each place in the state where something stands."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, (list, tuple)) and len(value) <= 8:
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


def changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    key, *rest = path
    new = value if not rest else changed(state[key], tuple(rest), value)
    if isinstance(state, dict):
        return state | {key: new}
    return type(state)([*state[:key], new, *state[key + 1 :]])


def resume(state: Any) -> list[Any]:
    position = DataPosition(loader(), generators=[random.Random(0), np.random.default_rng(0)])
    position.load(state)
    items = position.open(position.loader, 3 if position.begun else 0)
    seen = [item for item, _ in itertools.islice(items, 1)]
    position.before_block()
    return seen + [item for item, _ in itertools.islice(items, 12)]


@pytest.mark.parametrize("redistributed", [False, True])
def test_what_was_saved_is_used(redistributed: bool) -> None:
    assert len(resume(saved(redistributed))) == (3 if redistributed else 5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("redistributed", [False, True])
def test_any_other_value_at_any_place_is_an_error_or_is_used(redistributed: bool) -> None:
    state = saved(redistributed)
    refused = 0
    for path in places(state):
        for value in ABSURD:
            try:
                resume(changed(state, path, value))
            except (TypeError, ValueError):  # TypeError: by load alone
                refused += 1
            except Exception as error:
                pytest.fail(f"{path} = {value!r}: {error!r}")
    assert refused > 300


def test_a_state_of_a_generator_that_can_not_be_restored_changes_nothing() -> None:
    state = saved(False)
    position = DataPosition(loader(), generators=[random.Random(0), np.random.default_rng(0)])
    before = torch.get_rng_state(), random.getstate()
    for broken in ({"python": (3, (1,) * 9, None)}, {"torch": torch.ones(3)}, {"given": [1, 2]}):
        with pytest.raises(TypeError, match="the state of a random generator"):
            position.load(state | {"now": state["now"] | broken})
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
