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
_OWN_LINE = re.compile(r'\{"case_id": ?"')
_NOT_KEPT = (
    "says how it ended, but not what it is: that is kept of findings, of cases near their tolerance or worse than all "
    "before them, and of those that were vacuous or not run"
)


def journaled_case(what: str, runs: Path) -> tuple[Path, CaseFile] | None:
    """The journal and the case of `RUN/CASE_ID`, or of `CASE_ID` in any run of `runs` (the newest that holds it).

    None if `what` is no such name, or no journal knows it.

    Raises:
        CaseFileError: the journal has the case, but not what it was made of, or its line is damaged.
    """
    path = Path(what)
    if not _CASE_ID.fullmatch(path.name):
        return None
    journals = [path.parent / "journal.jsonl"] if "/" in what else runs.glob("*/journal.jsonl")
    complaint = ""
    for journal in sorted(filter(Path.is_file, journals), key=lambda file: -file.stat().st_mtime):
        for line in _lines_with(journal, path.name):
            found = _case(line, path.name)
            if isinstance(found, CaseFile):
                return journal.resolve(), found
            complaint = f"{journal} {found}" if found else complaint
    if complaint:
        raise CaseFileError(f"{what}: {complaint}")
    return None


def _lines_with(journal: Path, text: str) -> Iterator[str]:
    with journal.open(encoding="utf-8", errors="replace") as lines:
        yield from (line for line in lines if text in line)


def _case(line: str, case_id: str) -> CaseFile | str:
    """The case of a line, or what is wrong with it; nothing is with a line of another case."""
    try:
        record = CaseRecord.model_validate_json(line)
        if record.case_id != case_id:
            return ""
        if record.problem is None:
            return _NOT_KEPT
        return CaseFile.of(record, Problem.from_json(json.dumps(record.problem)))
    except (ValidationError, ProblemError):
        return "has it on a line that is damaged" if _OWN_LINE.match(line) and case_id in line[:40] else ""
