"""What setup.cfg declares is imported, and what is imported is declared."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = {"build", "furo", "mypy", "myst-parser", "pytest-timeout", "pytest-xdist", "ruff", "sphinx"}
TOOLS |= {"tensorboard", "twine"}
"""Declared, and used without an import: run by .ci/run or pytest, or by Accelerate's --track."""
OWN = {path.stem for folder in ("tests", "recipes") for path in (ROOT / folder).rglob("*.py")}
OWN |= {"accumplug"} | {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}


LAZY = (".import_module", ".importorskip")


def declared() -> dict[str, set[str]]:
    """The distributions of each extra; those of the package itself are under ""."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    found = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    return {extra: set(re.findall(r"^[\w-]+", text, re.MULTILINE)) for extra, text in found.items()}


DECLARED = declared()


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The distributions that a file imports, and whether that happens when it is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_once = {id(node) for node in run_at_import(tree)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(LAZY):
            names = [str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)]
        for name in names:
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names | OWN:
                yield top.removesuffix("_fabric"), id(node) in at_once


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes outside of functions, and of what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        if later or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            continue
        yield child
        yield from run_at_import(child)


def imported(folder: str, *, at_once: bool = False) -> set[str]:
    """The distributions that the files in a folder import; or only those at once."""
    files = (ROOT / folder).rglob("*.py")
    return {name for path in files for name, early in imports(path) if early or not at_once}


def test_the_package_declares_what_it_imports() -> None:
    """At once: its own dependencies, or in integrations/NAME.py the extra NAME. Lazily: any
    extra that a user can install for it."""
    optional = {"plots", "transformers", "lightning"}
    for path in (ROOT / "accumplug").rglob("*.py"):
        own = path.stem if path.parent.name == "integrations" else ""
        for name, at_once in imports(path):
            extras = {"", own} if at_once else {"", own} | optional
            allowed = set().union(*(DECLARED.get(extra, set()) for extra in extras))
            assert name in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_the_package_imports_what_it_declares() -> None:
    """Nobody installs a package that is not used."""
    assert DECLARED[""] <= imported("accumplug")


def test_the_tests_declare_what_they_import() -> None:
    """`pip install accumplug[test]` runs all of them but TRL's, which need its 280 MB."""
    skipped = {"trl", "datasets"}
    assert imported("tests") - skipped <= DECLARED[""] | DECLARED["test"]


def extras_of(recipe: str) -> tuple[str, ...]:
    """The extras that a recipe needs, as its first lines or the documents name them."""
    if recipe.startswith("benchmark"):
        return ("benchmark",)
    return ("lora", "recipes") if recipe == "finetune_lora" else ("recipes",)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.py")), ids=lambda p: p.stem)
def test_a_recipe_imports_what_its_extra_brings(path: Path) -> None:
    """`pip install accumplug[recipes]` runs all recipes but the benchmark and the LoRA one."""
    allowed = DECLARED[""].union(*(DECLARED[extra] for extra in extras_of(path.stem)))
    assert {name for name, _ in imports(path)} <= allowed


def test_every_extra_is_used() -> None:
    """By an import of the package, a recipe or a test, or as a tool."""
    used = imported("accumplug") | imported("recipes") | imported("tests") | TOOLS
    assert set().union(*DECLARED.values()) <= used


def test_every_declared_tool_and_dependency_has_a_known_good_version() -> None:
    """constraints.txt pins all that any extra brings."""
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert set().union(*DECLARED.values()) <= pinned


def test_every_folder_of_the_package_is_packed() -> None:
    """A folder with code has an `__init__.py`, or it would not be in the wheel."""
    folders = {path.parent for path in (ROOT / "accumplug").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_the_source_is_that_of_the_oldest_python() -> None:
    """No syntax that Python 3.10, which setup.cfg allows, can't read."""
    for path in (ROOT / "accumplug").rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
