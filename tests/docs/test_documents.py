"""Every page: its code is run, its links arrive, its commands are the right ones."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from documents import PAGES, ROOT, Document, run_by_tests

RUN = run_by_tests(Path(__file__).parent)
COMMANDS = {
    'pip install -q -e ".[recipes]" -c constraints.txt && accelerate launch recipes/train.py',
    'pip install -q -e ".[test]" -c constraints.txt && python -m pytest -q -n 2',
    "torchrun --nproc_per_node 2 recipes/train_ddp.py --checkpoint-every 50 --resume",
}
"""The commands beside `accumplug ...`: .ci/run takes the first two from README.md, and
tests/recipes/test_train_resume.py kills and resumes the third."""


@pytest.mark.parametrize("name", PAGES)
def test_every_python_block_is_run_by_a_test(name):
    """There is no block of code in the page that no test in this folder runs."""
    tested = {(heading, number) for page, heading, number in RUN if page == name}
    assert Document(name).python() == tested


@pytest.mark.parametrize("name", PAGES)
def test_code_is_python_or_a_shell_command(name):
    """No block hides from the tests behind another language; a picture or a table of contents
    (`{...}`) has no code."""
    languages = {b.language for b in Document(name).blocks if not b.language.startswith("{")}
    assert languages <= {"python", "bash"}


@pytest.mark.parametrize("name", PAGES)
def test_every_command_is_run_by_a_test(name):
    """`accumplug ...` by test_command_line.py or test_skill.py, the others as COMMANDS says."""
    others = {line for line in Document(name).commands() if not line.startswith("accumplug ")}
    assert others <= COMMANDS
    assert not others or name in ("README.md", "docs/checkpoints.md")


@pytest.mark.parametrize("name", PAGES)
def test_links_arrive(name):
    """Each link to a file of the project has that file, and each `#anchor` its heading; the
    pages that Sphinx builds link to each other alone."""
    page = Document(name)
    for link in page.links():
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), link
        assert not name.startswith("docs/") or target.is_relative_to(ROOT / "docs"), link
        assert not anchor or anchor in Document(target.relative_to(ROOT).as_posix()).anchors(), link


def test_each_page_is_reached_from_the_index():
    """Every page of docs/ stands in a table of contents, and README.md links to it."""
    index = Document("docs/index.md")
    listed = {
        f"docs/{line}.md"
        for block in index.blocks
        if block.language == "{toctree}"
        for line in block.text.splitlines()
        if line and not line.startswith(":")
    }
    pages = {name for name in PAGES if name.startswith("docs/")} - {"docs/index.md"}
    assert listed == pages
    assert {link.partition("#")[0] for link in Document("README.md").links()} >= pages


def test_readme_is_short_enough_to_be_read():
    """At most 200 lines."""
    assert len(Document("README.md").lines) <= 200


@pytest.mark.parametrize("name", ["run", "test"])
def test_ci_finds_the_two_commands(name):
    """The line that .ci/run takes out of README.md is one command that installs, then runs."""
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^readme_command\(\) .*$", script, re.MULTILINE)[0]
    found = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{function}\nreadme_command {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout
    extra, command = {
        "run": ("recipes", "accelerate launch recipes/train.py"),
        "test": ("test", "python -m pytest -q -n 2"),
    }[name]
    assert found == f'pip install -q -e ".[{extra}]" -c constraints.txt && {command}\n'


def test_the_tree_shows_each_folder_and_nothing_that_is_gone():
    """In ARCHITECTURE.md each path exists, and each folder of the package and recipe is there."""
    folder, shown = "", set()
    for line in Document("ARCHITECTURE.md").find("Files", language="").text.splitlines():
        if not line.startswith(" "):
            folder = line.split()[0] if "/ " in line else ""
            shown.add(line.split()[0])
        shown |= {folder + name for name in re.findall(r"(?<= )[a-z_]+(?:\.py|/(?= ))", line)}
    gone = [path for path in shown if not (ROOT / path).exists()]
    assert not gone
    modules = {
        f"{f}/{p.name}" for f in ("accumplug", "recipes") for p in (ROOT / f).glob("[!_]*.py")
    }
    there = modules | {f"accumplug/{p.parent.name}/" for p in ROOT.glob("accumplug/*/__init__.py")}
    missing = there - shown
    assert not missing


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", *PAGES])
def test_files_that_a_page_names_exist(name):
    """Each path in code, of the project or of the package. `train.py` and `runs/` are a user's."""
    code = re.findall(r"`([^`\n]+)`", "\n".join(Document(name).lines))
    paths = {
        p for text in code for p in re.findall(r"[\w./-]+(?:\.(?:py|txt|cfg|md)|/)(?![\w.])", text)
    }
    paths -= {p for p in paths if p == "train.py" or p.startswith("runs/")}
    gone = [p for p in paths if not (ROOT / p).exists() and not (ROOT / "accumplug" / p).exists()]
    assert not gone
