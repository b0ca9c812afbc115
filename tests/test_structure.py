"""The structure of the package: which file may import which, and what no file may do.

Each rule is one test. They read the source alone, so they import nothing of it.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "accumplug"
ROWS = (
    ("cli", "trainers"),
    ("analysis", "checkpoint"),
    ("accumulator",),
    ("integrations", "dataloading"),
    ("loop",),
    ("core", "storage"),
    ("parallel", "inplace", "noise"),
    ("errors",),
)
"""Rooms, from the top down: a file imports from its own room and from the rows below it."""
TRAINERS = {f"accumplug.integrations.{name}" for name in ("transformers", "lightning")}
HEIGHT = {room: -row for row, rooms in enumerate(ROWS) for room in rooms}
MODULES = {
    ".".join(("accumplug", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in PACKAGE.rglob("*.py")
    if path.parent != PACKAGE or path.stem in HEIGHT
}


def nodes(path: Path) -> Iterator[ast.AST]:
    """Every node of a file's syntax tree."""
    return ast.walk(ast.parse(path.read_text()))


def room(module: str) -> str:
    """The folder of a module in the package, or the name of a file that is beside the folders.

    Integrations that a user imports stand on everything; nothing of the package imports them.
    """
    if module in TRAINERS:
        return "trainers"
    return module.split(".")[1]


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports anywhere, under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in nodes(path):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: a relative import"
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inside & MODULES.keys()) or {str(node.module)}
    return found & MODULES.keys()


IMPORTS = {module: imports(path) for module, path in MODULES.items()}


def place(path: Path, node: ast.AST) -> str:
    """Where a node stands, and its text."""
    return f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:90]}"


def is_accumulator(node: ast.AST) -> bool:
    """Whether an expression is called as an Accumulator is: accum, self.accum, self._accum."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.strip("_") in ("accum", "accumulator")


def test_every_file_is_in_a_room_of_the_layout() -> None:
    """A new folder has to be given its row."""
    assert {room(module) for module in MODULES} == HEIGHT.keys()


def test_imports_run_one_way() -> None:
    """From a room to a lower row; never up, and never to a neighbour in the same row."""
    wrong = [
        f"{module} imports {target}"
        for module, targets in sorted(IMPORTS.items())
        for target in sorted(targets)
        if room(module) != room(target) and HEIGHT[room(target)] >= HEIGHT[room(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_is_in_an_import_circle() -> None:
    """Neither at run time nor for a type checker."""
    graphlib.TopologicalSorter(IMPORTS).prepare()


def test_nobody_reaches_into_an_accumulator() -> None:
    """`accum._x` is read and written in accumulator.py, as `self._x`, and nowhere else."""
    wrong = [
        place(path, node)
        for path in MODULES.values()
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and is_accumulator(node.value)
    ]
    assert not wrong, f"{len(wrong)} places:\n" + "\n".join(wrong)


def test_the_parts_of_an_accumulator_are_not_given_it() -> None:
    """Below the Accumulator only the life cycle of a block knows it."""
    lower = [r for r in HEIGHT if HEIGHT[r] < HEIGHT["accumulator"]]
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(argument)}"
        for module, path in MODULES.items()
        if room(module) in lower and path.stem not in ("micro_batch", "lifecycle")
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.arg.strip("_") in ("accum", "accumulator")
    ]
    assert not wrong, f"{len(wrong)} places:\n" + "\n".join(wrong)


def test_the_heap_and_the_stack_are_not_searched() -> None:
    """What would be found there is said by the user, or asked of public objects."""
    searches = {"get_objects", "get_referrers", "currentframe", "_getframe", "f_code", "co_name"}
    wrong = [
        place(path, node)
        for path in PACKAGE.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in searches
    ]
    assert not wrong, "\n".join(wrong)


def lines_of_code(path: Path) -> int:
    """Lines that are neither blank nor a comment nor of a docstring."""
    text = path.read_text()
    prose = {
        line
        for node in nodes(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        1 for n, line in lines if n not in prose and line.strip() and line.lstrip()[0] != "#"
    )


def test_the_core_can_be_read_in_an_afternoon() -> None:
    """core, loop, parallel, accumulator and errors: what trains, in at most 3,550 lines of code."""
    rooms = ("core", "loop", "parallel", "accumulator", "errors")
    assert sum(lines_of_code(MODULES[m]) for m in MODULES if room(m) in rooms) <= 3550


def test_errors_are_in_one_file() -> None:
    """Every exception class that a user can meet."""
    wrong = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in MODULES.values()
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and path.stem != "errors"
        and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    ]
    assert not wrong, "\n".join(wrong)


def test_what_trains_says_why_a_type_is_any() -> None:
    """In a comment on the line, or where a file imports it."""
    wrong = []
    for module, path in MODULES.items():
        lines = path.read_text().splitlines()
        if room(module) not in ("core", "loop", "parallel") or any(
            line.startswith("from typing import") and "Any" in line and "#" in line
            for line in lines
        ):
            continue
        wrong += [
            f"{path.name}:{number} {line}"
            for number, line in enumerate(lines, 1)
            if re.search(r"\bAny\b", line) and not ("#" in line or line.startswith("from typing"))
        ]
    assert not wrong, "\n".join(wrong)


def test_every_file_says_its_purpose() -> None:
    """In its first line, which ends with a full stop."""
    first = {path: ast.get_docstring(ast.parse(path.read_text())) for path in MODULES.values()}
    wrong = [str(p) for p, text in first.items() if not (text or "").split("\n")[0].endswith(".")]
    assert not wrong, "\n".join(wrong)


def test_folders_of_tests_mirror_those_of_the_package() -> None:
    """Or are named after what the tests in them need."""
    needs = {"ranks", "recipes", "docs", "simulated_cuda", "cuda"}
    folders = {path.parent for path in Path(__file__).parent.rglob("test_*.py")}
    assert {f.name for f in folders - {Path(__file__).parent}} <= HEIGHT.keys() | needs


def test_every_slow_test_exists() -> None:
    """tests/slow.txt names no test that has been renamed or deleted since."""
    tests = Path(__file__).parent
    functions = {
        node.name
        for path in tests.rglob("test_*.py")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
    }
    assert set((tests / "slow.txt").read_text().split()) <= functions
