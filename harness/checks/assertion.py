"""`mlacheck.check`: one problem, one subject, an AssertionError with the judge's message; for people's own tests.

Everything runs in this process: a kernel that crashes takes the test with it. `mlacheck run` and the pytest plugin
keep kernels in processes of their own.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from harness.checks.case import check_case, default_device, require_problem
from harness.checks.stage_case import check_stage
from harness.findings.store import CaseFile, finding_id, replay_command
from harness.problems.problem import Problem
from harness.subjects.api import ATTRIBUTE, NotRunnable, StageSubject
from harness.subjects.drawing import Named, find_subject
from harness.subjects.names import full_name
from reports.finding import headline
from reports.records import CaseRecord, Status

FOLDER = Path("runs") / "check" / "findings"
"""Where the cases of failed checks are put; the smallest that Hypothesis finds is the last to be written."""


class CheckFailed(AssertionError):  # noqa: N818 - what it says, not how it came
    """The subject is wrong on a case. `record` has the details."""

    def __init__(self, record: CaseRecord, case: Path, replay: str) -> None:
        self.record = record
        self.case = case
        lines = [f"{record.status.value} at {record.stage or 'case'}: {headline(record)}"]
        lines += [
            f"  {check.check}: {check.message}"
            for check in record.checks
            if check.status.is_finding and check.message not in lines[0]
        ]
        super().__init__("\n".join([*lines, replay]))


def check(problem: Problem, subject: Named) -> CaseRecord:
    """Judge one case and return its record.

    subject: a name as on the command line, a function that `mlacheck.subject` decorates, or a StageSubject

    Raises:
        CheckFailed: the subject is wrong; the case is written to `runs/check/` and the message ends with the
            command that replays it.
        NotRunnable: the subject cannot run here, or the problem is outside its contract (`mlacheck.strategies.cases`
            with the subject draws only those inside).
        SubjectError: the subject cannot be loaded.
        TypeError: the problem is no Problem.
    """
    __tracebackhide__ = True  # pytest shows the caller's line and the message
    require_problem(problem)
    found = find_subject(full_name(subject) if isinstance(subject, str) else subject)
    name = _loadable_name(subject, found)
    if isinstance(found, StageSubject):
        record = check_stage(problem, found, default_device())
        record.subject = name or record.subject
    else:
        record = check_case(problem, found.name)
    if record.status is Status.NOT_RUN:
        raise NotRunnable(record.message)
    if record.status.is_finding:
        path = (FOLDER / finding_id(record) / "case.json").resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CaseFile.of(record, problem).text(), encoding="utf-8")
        replay = replay_command(path, record.subject) if name else f"the case: {path}"
        raise CheckFailed(record, path, replay)
    return record


def _loadable_name(subject: Named, found: Any) -> str | None:
    """The name by which the command line finds the subject; None for one that lives in a test only."""
    if isinstance(subject, str):
        return full_name(subject)
    function: Any = found.function if isinstance(found, StageSubject) else subject
    qualified = getattr(function, "__qualname__", "<none>")
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if file is None or "<" in qualified or not hasattr(function, ATTRIBUTE):
        return None
    return f"{Path(file).resolve()}:{qualified}@{found.stage}"
