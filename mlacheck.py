"""The public face of mlacheck: `import mlacheck`.

The code lives in four packages with generic names (`reference`, `optimized`, `harness`, `reports`). Another
distribution or a folder on the import path may carry the same names; so importing this module checks that
each of them is ours, and fails with a clear message if not, before anything of the wrong package is executed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.checks.assertion import CheckFailed, check
    from harness.checks.case import check_case
    from harness.problems.problem import Problem, ProblemError
    from harness.subjects import drawing as strategies
    from harness.subjects.api import NotRunnable, StageSubject, SubjectError, subject
    from harness.subjects.contract import Contract
    from harness.subjects.registry import list_subjects
    from reference.numerics import Numerics, RowSum
    from reports.records import CaseRecord, CheckRecord, Place, Status

PACKAGES = ("reference", "optimized", "harness", "reports")

_HOMES = {
    "check": "harness.checks.assertion",
    "CheckFailed": "harness.checks.assertion",
    "check_case": "harness.checks.case",
    "Problem": "harness.problems.problem",
    "ProblemError": "harness.problems.problem",
    "list_subjects": "harness.subjects.registry",
    "Contract": "harness.subjects.contract",
    "NotRunnable": "harness.subjects.api",
    "StageSubject": "harness.subjects.api",
    "SubjectError": "harness.subjects.api",
    "subject": "harness.subjects.api",
    "Numerics": "reference.numerics",
    "RowSum": "reference.numerics",
    "CaseRecord": "reports.records",
    "CheckRecord": "reports.records",
    "Place": "reports.records",
    "Status": "reports.records",
}

__all__ = [
    "CaseRecord",
    "CheckFailed",
    "CheckRecord",
    "Contract",
    "NameClash",
    "NotRunnable",
    "Numerics",
    "Place",
    "Problem",
    "ProblemError",
    "RowSum",
    "StageSubject",
    "Status",
    "SubjectError",
    "check",
    "check_case",
    "list_subjects",
    "name_clashes",
    "strategies",
    "subject",
]


class NameClash(ImportError):  # noqa: N818 - the word that the user reads
    """A package with one of our names comes from somewhere else."""


def name_clashes() -> list[str]:
    """One line for each of our four packages that resolves to something else; empty if all is well."""
    clashes = []
    for name in PACKAGES:
        ours = Path(__file__).resolve().parent / name
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            clashes.append(f"package {name!r} is missing: it must be {ours}")
            continue
        found = spec.origin or ", ".join(spec.submodule_search_locations or [])
        if spec.origin is None or Path(spec.origin).resolve().parent != ours:
            clashes.append(
                f"package {name!r} resolves to {found}, must be {ours}: "
                "remove the other one, or install mlacheck in an environment of its own"
            )
    return clashes


def __getattr__(name: str) -> Any:
    """Public names on first use: torch is heavy, and the command line does without it."""
    if name == "strategies":
        return import_module("harness.subjects.drawing")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mlacheck' has no attribute {name!r}")


def main() -> None:
    """Entry point of the command `mlacheck`."""
    from harness.cli import main as command_line

    command_line()


_clashes = name_clashes()
if _clashes:
    if Path(sys.argv[0]).name == "mlacheck":
        sys.stderr.write(f"mlacheck: {_clashes[0]}\n")
        raise SystemExit(2)
    raise NameClash("; ".join(_clashes))

if __name__ == "__main__":
    main()
