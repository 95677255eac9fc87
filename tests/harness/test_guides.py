"""Does every command in the guides do what the guide says, and print what it shows?

In a guide a `python` block that begins with `# name.py`, or a block that begins with `# name.txt`, is a file. A
`console` block holds commands (`$ ...`), each followed by what it prints: `...` stands for anything, a line `...` for
any lines, and `[exit code N]` ends what a command prints if N is not 0.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.subjects.reference_page import page
from harness.subjects.stages import STAGES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = ("ten-lines", "validate-a-change", "reproduce-a-bug-report", "every-night")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w-]+\.(?:py|txt))\n")


@dataclass
class Command:
    """One command of a guide and what it must print."""

    line: str
    shown: list[str] = field(default_factory=list)
    code: int = 0


def steps(text: str) -> Iterator[tuple[str, str] | Command]:
    """Files (name, content) and commands of a guide, in order."""
    for kind, body in BLOCK.findall(text):
        named = FILE.match(body)
        if kind == "console":
            yield from _commands(body)
        elif named:
            yield named[1], body[named.end() :] if named[1].endswith(".py") else body


def _commands(body: str) -> list[Command]:
    commands: list[Command] = []
    for line in body.splitlines():
        code = re.fullmatch(r"\[exit code (\d)\]", line)
        if line.startswith("$ "):
            commands.append(Command(line[2:]))
        elif code:
            commands[-1].code = int(code[1])
        else:
            commands[-1].shown.append(line)
    return commands


def matches(shown: list[str], printed: str) -> str | None:
    """The first shown line that was not printed in its place; None if all were."""
    lines, at, anywhere = printed.splitlines(), 0, False
    for pattern in shown:
        if pattern.strip() == "...":
            anywhere = True
            continue
        regex = re.compile(".*".join(re.escape(part) for part in pattern.rstrip().split("...")))
        last = len(lines) if anywhere else at + 1
        found = next((i for i in range(at, min(last, len(lines))) if regex.fullmatch(lines[i].rstrip())), None)
        if found is None:
            return pattern
        at, anywhere = found + 1, False
    return None


@pytest.fixture(scope="module")
def path_with_commands(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH on which `mlacheck`, `pytest` and `python` are those of this environment."""
    folder = tmp_path_factory.mktemp("bin")
    for name, arguments in (
        ("mlacheck", "-m harness.cli"),
        ("pytest", "-m pytest -p no:cacheprovider"),
        ("python", ""),
    ):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_does_every_command_of_a_guide_print_what_it_shows(guide: str, tmp_path: Path, path_with_commands: str) -> None:
    variables = {
        "PATH": path_with_commands,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "300",
        "PROFILE": "quick",
        "LIMIT": "2",
    }
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CI"))} | variables
    count = 0
    for step in steps((DOCS / f"{guide}.md").read_text(encoding="utf-8")):
        if isinstance(step, tuple):
            (tmp_path / step[0]).write_text(step[1])
            continue
        count += 1
        done = subprocess.run(
            ["sh", "-c", step.line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
        )
        printed = done.stdout + done.stderr
        assert done.returncode == step.code, f"{step.line}\n{printed[-3000:]}"
        missing = matches(step.shown, printed)
        if missing is not None and matches(step.shown, done.stderr + done.stdout) is None:
            missing = None  # the two streams came in the other order
        assert missing is None, f"{step.line}\nmust print: {missing}\nprinted:\n{printed[-3000:]}"
    assert count >= 5


def test_are_the_tables_of_the_reference_page_those_of_the_code() -> None:
    text = (DOCS / "subjects.md").read_text(encoding="utf-8")
    assert page(text) == text, "run: python -m harness.subjects.reference_page docs/subjects.md"
    for stage in STAGES:
        assert f"### `{stage}`" in text


@pytest.mark.parametrize("file", sorted(DOCS.glob("*.md")), ids=lambda file: file.name)
def test_does_every_link_between_the_guides_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", file.read_text(encoding="utf-8")):
        assert (DOCS / target).exists(), target


def test_can_a_guide_be_wrong() -> None:
    assert matches(["a", "...", "c 1...3"], "a\nb\nc 123\n") is None
    assert matches(["a", "c"], "a\nb\nc\n") == "c"
    assert matches(["...", "d"], "a\nb\n") == "d"
