"""The user's own model, batch and loss, named on the command line as `module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from accumplug.analysis.batch_tree import items_in, mapped
from accumplug.analysis.example import example
from accumplug.analysis.sync_counter import Losses

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
        ValueError: there is no such function, it takes arguments, or it returns something else.
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
    if _wants_arguments(function):
        raise ValueError(f"{name} must take no arguments")
    found = function()
    if not isinstance(found, tuple) or len(found) not in (3, 4):
        values = f"{len(found)} values" if isinstance(found, tuple) else f"a {type(found).__name__}"
        raise ValueError(f"{name} must return (model, batch, loss), got {values}")
    if not isinstance(found[0], nn.Module):
        raise ValueError(f"{name} must return a torch model first, got a {type(found[0]).__name__}")
    if len(found) == 4 and not callable(found[3]):
        raise ValueError(
            f"the fourth value of {name} is a function that counts the items of a batch, got an "
            f"{type(found[3]).__name__}"
        )
    return Target(*found)


def _wants_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # it has no signature to look at
        return False
    return False


def _import(place: str) -> Any:
    """Import a module by name, from the working directory too, or a file by path."""
    try:
        return _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except SystemExit as error:
        raise ValueError(
            f"{place} ends the process when it is imported: its script belongs under "
            'if __name__ == "__main__"'
        ) from error


def _import_module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no module {name} in this environment or directory") from error
    return importlib.import_module(name)


def _import_file(path: Path) -> Any:
    """Import a file whatever its name, which may be that of another module."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    path = path.resolve()
    if (name := f"accumplug target {path}") in sys.modules:
        return sys.modules[name]
    sys.path[:0] = [str(path.parent), str(Path.cwd())]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
