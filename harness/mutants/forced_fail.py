"""Is a mutant's place ever run? Its forced-fail variant raises there, so that a case which gets there cannot pass.

A mutant that no case reaches would survive whatever the judge can do: that is an error of the table, not a
survivor. The variant is made by machine from the patch: the innermost statement of a function that the patch
changes gets a `raise` in front of it. In a compiled Triton kernel the `raise` is a compile error that quotes the
line, and just as good.
"""

from __future__ import annotations

import ast
from pathlib import Path

from harness.mutants.mutant import Mutant, MutantError, Patch

REACHED = "forced fail of mutant"
"""Every message of a forced fail holds this text and the mutant's name."""


def forced_texts(mutant: Mutant, folder: Path) -> dict[str, str]:
    """New text of each file in which the mutant changes a function; raises MutantError if it changes none."""
    lines: dict[str, list[int]] = {}
    for patch in mutant.patches:
        text = (folder / patch.file).read_text(encoding="utf-8")
        lines.setdefault(patch.file, []).append(changed_line(text, patch))
    texts = {}
    for file, numbers in lines.items():
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        places = [place for number in numbers if (place := _innermost(tree, number)) is not None]
        for body, index in sorted(places, key=lambda place: -place[1]):
            body.insert(index, ast.parse(f"raise RuntimeError('{REACHED} {mutant.name}')").body[0])
        if places:
            texts[file] = ast.unparse(ast.fix_missing_locations(tree))
    if not texts:
        raise MutantError(f"mutant {mutant.name}: no patch changes a function, so that its reach cannot be shown")
    return texts


def changed_line(text: str, patch: Patch) -> int:
    """Line (from 1) of `text` that the patch changes first, or in front of which it puts something."""
    same = next((i for i, (a, b) in enumerate(zip(patch.old, patch.new, strict=False)) if a != b), None)
    if same is None:
        same = len(patch.old) if len(patch.new) > len(patch.old) else len(patch.new)
    at = text.index(patch.old) + same
    while text[at : at + 1] == "\n" and text[at - 1 : at] == "\n":  # an empty line is no statement
        at += 1
    return text.count("\n", 0, at) + 1


def _innermost(tree: ast.Module, line: int) -> tuple[list[ast.stmt], int] | None:
    """The list of statements, and the index in it, in front of which a `raise` runs before `line` does.

    None outside every function. A line of a function's signature gives its first statement.
    """
    found: tuple[list[ast.stmt], int] | None = None
    body: list[ast.stmt] | None = tree.body
    inside = False
    while body is not None:
        index = next((i for i, stmt in enumerate(body) if stmt.lineno <= line <= (stmt.end_lineno or 0)), None)
        if index is None:
            break
        stmt = body[index]
        if inside:
            found = body, index
        body = None
        if isinstance(stmt, ast.FunctionDef):
            inside, body = True, stmt.body
            has_docstring = ast.get_docstring(stmt) is not None
            found = stmt.body, int(has_docstring and len(stmt.body) > 1)
        elif isinstance(stmt, ast.ClassDef):
            body = stmt.body
        else:
            for name in ("body", "orelse", "finalbody"):
                inner: list[ast.stmt] = getattr(stmt, name, [])
                if inner and inner[0].lineno <= line <= (inner[-1].end_lineno or 0):
                    body = inner
    return found
