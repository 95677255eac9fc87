"""Cases that a run judged and kept no folder of: near their tolerance, vacuous, not run. Their journal holds them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from harness.findings.store import CaseFile, CaseFileError
from harness.problems.problem import Problem, ProblemError
from reports.records import CaseRecord

_CASE_ID = re.compile(r"[0-9a-f]{16}")


def journaled_case(what: str, runs: Path) -> tuple[Path, CaseFile] | None:
    """The journal and the case of `RUN/CASE_ID`, or of `CASE_ID` in any run of `runs` (the newest that holds it).

    None if `what` is no such name, or no journal knows it.

    Raises:
        CaseFileError: the journal has the case, but not what it was made of, or its line is damaged.
    """
    path = Path(what)
    if not _CASE_ID.fullmatch(path.name):
        return None
    journals = [path.parent / "journal.jsonl"] if path.parent.name else sorted(runs.glob("*/journal.jsonl"))
    known: Path | None = None
    for journal in sorted(filter(Path.is_file, journals), key=lambda file: -file.stat().st_mtime):
        for line in _lines_with(journal, path.name):
            case = _case(journal, line, path.name)
            if case is not None:
                return journal.resolve(), case
            known = journal
    if known is None:
        return None
    raise CaseFileError(
        f"{what}: {known} says how the case ended, but not what it is: that is kept of findings, of cases near their "
        "tolerance or worse than all before them, and of those that were vacuous or not run"
    )


def _lines_with(journal: Path, text: str) -> Iterator[str]:
    with journal.open(encoding="utf-8", errors="replace") as lines:
        yield from (line for line in lines if text in line)


def _case(journal: Path, line: str, case_id: str) -> CaseFile | None:
    """The case of a line; None if it is another's, or the problem is not in it."""
    try:
        record = CaseRecord.model_validate_json(line)
        if record.case_id != case_id or record.problem is None:
            return None
        return CaseFile.of(record, Problem.from_json(json.dumps(record.problem)))
    except (ValidationError, ProblemError) as error:
        raise CaseFileError(f"{journal}: the line of case {case_id} is damaged ({type(error).__name__})") from None
