"""The user's own model, batch and loss, named on the command line as `module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from accumplug.counting import Losses
from accumplug.example import example
from accumplug.pieces import items_in, mapped

__all__ = ["Target", "load_target"]

BUILT_IN = "example"


@dataclass(frozen=True)
class Target:
    """What the function gave: a model, a batch, a loss (or several by name), what counts items."""

    model: nn.Module
    batch: Any
    loss_fn: Losses
    items: Callable[[Any], float] = items_in

    def double(self) -> Target:
        """Give the same in double precision; whole numbers stay what they are."""

        def doubled(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return NotImplemented
            return value.double() if value.is_floating_point() else value

        return replace(self, model=self.model.double(), batch=mapped(self.batch, doubled))


def load_target(name: str) -> Target:
    """Call the function that `name` names, e.g. `my_package.train:parts` or `train.py:parts`.

    It takes no argument and returns (model, batch, loss), or (model, batch, loss, items).
    `example` is the built-in one.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    if name == BUILT_IN:
        model, batch, loss = example(items=256)
        return Target(model, batch, loss)
    place, colon, function_name = name.rpartition(":")
    if not colon or not place or not function_name:
        raise ValueError(f"{name!r} is not of the form module:function or file.py:function")
    function = getattr(_import(place), function_name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {function_name!r}")
    found = function()
    if not isinstance(found, tuple) or len(found) not in (3, 4):
        values = f"{len(found)} values" if isinstance(found, tuple) else f"a {type(found).__name__}"
        raise ValueError(f"{name} must return (model, batch, loss), got {values}")
    if not isinstance(found[0], nn.Module):
        raise ValueError(f"{name} must return a torch model first, got a {type(found[0]).__name__}")
    return Target(*found)


def _import(place: str) -> Any:
    """Import a module by name, from the working directory too, or a file by path."""
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ValueError(f"there is no file {place}")
        sys.path.insert(0, str(path.resolve().parent))
        place = path.stem
    else:
        sys.path.insert(0, str(Path.cwd()))
    try:
        if importlib.util.find_spec(place) is None:
            raise ModuleNotFoundError(place)
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no module {place} in this environment or directory") from error
    return importlib.import_module(place)
