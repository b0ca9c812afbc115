"""The code in a Markdown document, found by the heading that it stands under, and run."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "outputs/skill-gradient-accumulation.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
)
"""Every document that promises code which runs."""


@dataclass(frozen=True)
class Block:
    """A fenced block: the heading above it, the language after its fence, its text and place."""

    heading: str
    language: str
    text: str
    path: Path
    line: int

    def code(self) -> CodeType:
        """The block compiled, so that a traceback shows the document's own lines."""
        return compile("\n" * (self.line - 1) + self.text, str(self.path), "exec")


class Document:
    """A Markdown file of this project."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = ROOT / name
        self.lines = self.path.read_text(encoding="utf-8").splitlines()
        self.blocks = list(_blocks(self.path, self.lines))

    def find(self, heading: str, number: int = 0, language: str = "python") -> Block:
        """The block of `language` with this `number`, from 0, under `heading`."""
        found = [b for b in self.blocks if (b.heading, b.language) == (heading, language)]
        assert len(found) > number, f"{self.name} has no {language} block {heading} {number}"
        return found[number]

    def run(self, heading: str, number: int = 0, /, **given: Any) -> dict[str, Any]:
        """Run a Python block with the names `given`; the answer has the names it defined."""
        names = {"__name__": "documented", **given}
        exec(self.find(heading, number).code(), names)
        return names

    def python(self) -> set[tuple[str, int]]:
        """Each Python block, as `run` names it."""
        headings = [b.heading for b in self.blocks if b.language == "python"]
        return {(heading, headings[:i].count(heading)) for i, heading in enumerate(headings)}

    def commands(self) -> list[str]:
        """The lines of its blocks of shell commands."""
        return [line for b in self.blocks if b.language == "bash" for line in b.text.splitlines()]

    def anchors(self) -> set[str]:
        """Its headings, in the form that links have."""
        titles = [re.sub(r"^#+ ", "", line) for line in self.lines if line.startswith("#")]
        return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}

    def links(self) -> list[str]:
        """The targets of its links and pictures."""
        text = re.sub(r"^```.*?^```$", "", "\n".join(self.lines), flags=re.MULTILINE | re.DOTALL)
        return re.findall(r"\]\(([^)\s]+)\)", text)


def run_by_tests(folder: Path) -> Counter[tuple[str, str, int]]:
    """The blocks that the test files in `folder` run: document, heading, number.

    Read from the source: `PAGE = Document("name")`, and `PAGE.run("heading", number, ...)` with
    constants inside of a function. A loop over numbers is written out, so that nothing hides.
    """
    found: Counter[tuple[str, str, int]] = Counter()
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = dict(_documents(tree))
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=target), attr="run"),
                    args=[ast.Constant(value=str(heading)), *rest],
                ) if target in names:
                    number = rest[0].value if rest and isinstance(rest[0], ast.Constant) else 0
                    found[names[target], heading, number] += 1
    return found


def _documents(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=target)],
                value=ast.Call(func=ast.Name(id="Document"), args=[ast.Constant(value=name)]),
            ):
                yield target, name


def _blocks(path: Path, lines: list[str]) -> Iterator[Block]:
    heading, fence, language, begin = "", "", "", 0
    for number, line in enumerate(lines, start=1):
        if not fence and (title := re.match(r"#+ (.*)", line)):
            heading = title[1].strip("`")
        if fence:
            if line.strip() == fence:
                yield Block(
                    heading, language, "\n".join(lines[begin - 1 : number - 1]), path, begin
                )
                fence = ""
        elif opening := re.match(r"(`{3,}|~{3,})(.*)", line):
            fence, language, begin = opening[1], opening[2].strip(), number + 1
    assert not fence, f"{path}: the block from line {begin} on has no end"
