"""The user's model, batch and loss, named on the command line as `module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from accumplug.analysis.sync_counter import Losses
from accumplug.dataloading.batch_tree import Batch, mapped

__all__ = ["Target", "example", "load_target"]

BUILT_IN = "example"


@dataclass(frozen=True)
class Target:
    """A model, a batch, a loss (or a mapping of named ones), and perhaps a count of items."""

    model: nn.Module
    batch: Batch
    loss_fn: Losses
    items: Callable[[Batch], float] | None = None

    def double(self) -> Target:
        """Return the same in double precision; integers are kept."""

        def doubled(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return NotImplemented
            return value.double() if value.is_floating_point() else value

        return replace(self, model=self.model.double(), batch=mapped(self.batch, doubled))


def load_target(name: str) -> Target:
    """Call the function with this name, e.g. `my_package.train:parts` or `train.py:parts`.

    It takes no argument and returns (model, batch, loss), or (model, batch, loss, items).
    `example` is built in.

    Raises:
        ValueError: there is no such function, it takes arguments, or it returns something else.
    """
    if name == BUILT_IN:
        return example(items=256)
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
            f"the fourth value of {name} must be a function that counts the items of a batch, got "
            f"{found[3]!r}"
        )
    return Target(*found)


def example(items: int = 64, width: int = 512, seed: int = 0) -> Target:
    """Make a classifier with LayerNorm, a made-up batch that it can learn, and its loss.

    The batch holds `items` vectors of 784 numbers in 10 classes; `width` is the hidden size (0.7
    million parameters at 512). Nothing is downloaded, and no other random state changes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(784, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, 10),
        )
        inputs = torch.randn(items, 784)
        targets = (inputs @ torch.randn(784, 10)).argmax(1)
    return Target(model, (inputs, targets), nn.CrossEntropyLoss())


def _wants_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # it has no signature
        return False
    return False


def _import(place: str) -> ModuleType:
    """Import a module by name (also from the working directory), or a file by path."""
    try:
        return _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except SystemExit as error:
        raise ValueError(
            f"{place} ends the process when it is imported: move its script under "
            'if __name__ == "__main__"'
        ) from error


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no module {name} in this environment or directory") from error
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, since its name may be that of another module."""
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
