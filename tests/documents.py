"""The code in a Markdown document, found by the heading that it stands under, and run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[1]


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
        self.path = ROOT / name
        self.lines = self.path.read_text(encoding="utf-8").splitlines()
        self.blocks = list(_blocks(self.path, self.lines))

    def find(self, heading: str, number: int = 0, language: str = "python") -> Block:
        """The block of `language` with this `number`, from 0, under `heading`."""
        found = [b for b in self.blocks if (b.heading, b.language) == (heading, language)]
        assert len(found) > number, f"{self.path.name} has no {language} block {heading} {number}"
        return found[number]

    def run(self, heading: str, number: int = 0, /, **given: Any) -> dict[str, Any]:
        """Run a Python block with the names `given`; what it has defined is in the answer."""
        names = {"__name__": "documented", **given}
        exec(self.find(heading, number).code(), names)
        return names

    def python(self, *, after: str = "", before: str = "") -> set[tuple[str, int]]:
        """Each Python block, as `run` names it; those between two lines, if these are given."""
        begin = self.lines.index(after) if after else 0
        end = self.lines.index(before) if before else len(self.lines)
        blocks = [b for b in self.blocks if b.language == "python" and begin < b.line <= end]
        headings = [b.heading for b in blocks]
        return {(heading, headings[:i].count(heading)) for i, heading in enumerate(headings)}


def _blocks(path: Path, lines: list[str]) -> Any:
    heading, language, begin = "", None, 0
    for number, line in enumerate(lines, start=1):
        if language is None and (title := re.match(r"#+ (.*)", line)):
            heading = title[1].strip("`")
        if not line.startswith("```"):
            continue
        if language is None:
            language, begin = line[3:].strip(), number + 1
        else:
            yield Block(heading, language, "\n".join(lines[begin - 1 : number - 1]), path, begin)
            language = None
