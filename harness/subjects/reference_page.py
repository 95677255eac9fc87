"""The tables of `docs/subjects.md`, made from the code.

`python -m harness.subjects.reference_page docs/subjects.md` writes them again.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path

from harness.subjects.contract import Contract
from harness.subjects.stages import STAGES, Stage
from reference.numerics import Numerics

_MARK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The page with the tables between its marks made anew."""
    tables = {"stages": _stages(), "contract": _contract()}
    return _MARK.sub(lambda mark: f"{mark[1]}\n{tables[mark[2]]}\n{mark[3]}", text)


def _stages() -> str:
    return "\n".join("\n".join(_stage(stage)) for stage in STAGES.values())


def _stage(stage: Stage) -> Iterator[str]:
    yield f"### `{stage.name}`"
    yield ""
    yield f"{_sentence(stage.what)}"
    yield ""
    if stage.inputs:
        needed = {name for group in stage.needs if len(group) == 1 for name in group}
        yield "| input | what it is |"
        yield "|---|---|"
        for name, what in stage.inputs.items():
            yield f"| `{name}`{' (needed)' if name in needed else ''} | {what} |"
        yield ""
        for group in stage.needs:
            if len(group) > 1:
                yield f"One of {' and '.join(f'`{name}`' for name in group)} is needed.\n"
        yield f"Returns {stage.returns}."
        yield ""
    yield "| check | the question that it answers |"
    yield "|---|---|"
    for name, question in stage.checks.items():
        yield f"| `{name}` | {question} |"
    yield ""


def _contract() -> str:
    notes = _field_notes()
    lines = ["| field | default | what it says |", "|---|---|---|"]
    for one in fields(Contract):
        default = one.default if one.default is not MISSING else Numerics()
        shown = "`Numerics()`" if isinstance(default, Numerics) else f"`{default!r}`"
        kind = str(one.type).replace("|", "\\|")
        lines.append(f"| `{one.name}`: `{kind}` | {shown} | {notes.get(one.name, '')} |")
    return "\n".join(lines) + "\n"


def _field_notes() -> dict[str, str]:
    """Field -> the text under it in the source."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(Contract)).body if isinstance(node, ast.ClassDef))
    notes = {}
    for above, below in pairwise(body):
        if not isinstance(above, ast.AnnAssign) or not isinstance(above.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            notes[above.target.id] = " ".join(below.value.value.split()).replace("|", "\\|")
    return notes


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
