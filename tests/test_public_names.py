"""The names of `accumplug`: all that a user meets is there, and none stands for two things."""

import builtins
import dataclasses
import importlib
import inspect
import pkgutil
import re
import types
import typing

import pytest

import accumplug

PUBLIC = {name: getattr(accumplug, name) for name in accumplug.__all__}
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(accumplug.__path__, "accumplug.")
    if not module.name.endswith("__main__")
)
NOT_FOR_USERS = {
    "Accumulator.observe_pass",
    "Accumulator.parts",
    "Checkpointer.must_stop",
    "Checkpointer.open_pass",
    "Batches.__init__",
    "MicroBatch.__init__",
}
"""Calls between the rooms of the package: what they take and return is documented there."""
RAISED = re.compile(r"^\s*Raises:\n((?:\s+.*\n?)+)", re.MULTILINE)


def callables():
    """Yield the public functions, and the public methods and properties of public classes."""
    for name, thing in PUBLIC.items():
        if not inspect.isclass(thing):
            yield name, thing
            continue
        if dataclasses.is_dataclass(thing):
            yield f"{name} (its fields)", thing
        for key, member in ((key, inspect.getattr_static(thing, key)) for key in dir(thing)):
            function = inspect.unwrap(getattr(member, "fget", None) or member)
            ours = str(getattr(function, "__module__", "")).startswith("accumplug")
            if ours and (not key.startswith("_") or key in ("__init__", "__call__", "__enter__")):
                yield f"{name}.{key}", function


CALLABLES = {name: call for name, call in callables() if name not in NOT_FOR_USERS}


def classes_in(annotation):
    """Yield the classes of an annotation, whatever it is nested in."""
    if inspect.isclass(annotation) and not isinstance(annotation, types.GenericAlias):
        yield annotation
    if inspect.isclass(origin := typing.get_origin(annotation)):
        yield origin
    for argument in typing.get_args(annotation):
        for inner in argument if isinstance(argument, list) else [argument]:
            yield from classes_in(inner)


@pytest.mark.parametrize("name", CALLABLES)
def test_classes_that_public_calls_take_or_return_are_public(name):
    """Each class of this package in the annotations can be imported from accumplug."""
    hints = typing.get_type_hints(CALLABLES[name])
    classes = {c for hint in hints.values() for c in classes_in(hint)}
    ours = {c.__name__ for c in classes if c.__module__.startswith("accumplug")}
    assert ours <= PUBLIC.keys()


def test_the_walk_over_annotations_sees_the_classes_that_users_meet():
    """A walk that finds nothing would pass: these are seen."""
    seen = set()
    for function in CALLABLES.values():
        for hint in typing.get_type_hints(function).values():
            seen |= {c.__name__ for c in classes_in(hint)}
    assert {"WindowResult", "Curve", "EquivalenceResult", "StepResult", "NoiseEstimate"} <= seen
    assert {"Difference", "CurveRow", "SyncCounter", "InplaceReport", "MicroBatch"} <= seen


@pytest.mark.parametrize("name", [name for name in CALLABLES if CALLABLES[name].__doc__])
def test_errors_that_public_calls_raise_can_be_caught_by_name(name):
    """Each error in a "Raises:" section is Python's, or can be imported from accumplug."""
    for section in RAISED.findall(inspect.cleandoc(CALLABLES[name].__doc__) + "\n"):
        for error in re.findall(r"^\s+(\w+): ", section, re.MULTILINE):
            assert hasattr(builtins, error) or error in PUBLIC, error


def test_every_error_of_the_package_is_public():
    """errors.py has all of them."""
    errors = importlib.import_module("accumplug.errors")
    own = {n for n, c in vars(errors).items() if getattr(c, "__module__", "") == errors.__name__}
    assert own <= PUBLIC.keys()


def test_no_public_name_is_the_name_of_a_module():
    """`import accumplug.x` gives a module or fails; it never gives a function."""
    inside = {name.split(".")[1] for name in MODULES}
    assert not inside & PUBLIC.keys()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_found_under_its_own_name(name):
    """Nothing in a package has the name of a module in it."""
    found = accumplug
    importlib.import_module(name)
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert inspect.ismodule(found)


def test_what_is_public_is_listed_once_and_in_order():
    """`from accumplug import *` gives these names and no others."""
    assert accumplug.__all__ == sorted(set(accumplug.__all__))
    space = {}
    exec("from accumplug import *", space)
    assert space.keys() - {"__builtins__"} == set(accumplug.__all__)
