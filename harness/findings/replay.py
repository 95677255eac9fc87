"""Judge a stored case again in a fresh worker, and compare with what is stored."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checks.places import where_made
from harness.engine.context import PRELOAD, fork_context
from harness.engine.pool import Slot
from harness.engine.worker import WorkerSpec
from harness.findings.store import CaseFile, Expected, cause_of
from harness.subjects.names import short_name
from reports.finding import headline, place_text, terms_text
from reports.records import CaseRecord, Status


def missing_check(expected: Expected | None, record: CaseRecord) -> str | None:
    """`mask.crowd is made on a GPU alone`: where the check that accused was not made this time; else None."""
    cause = "" if expected is None else expected.cause
    where = where_made(cause)
    if record.status.is_finding or where is None or cause in {check.check for check in record.checks}:
        return None
    return f"{cause} is made {where}"


@dataclass(frozen=True)
class Replay:
    """What a replay gave."""

    case: CaseFile
    record: CaseRecord

    @property
    def failing(self) -> bool:
        """Whether the subject is still accused."""
        return self.record.status.is_finding

    @property
    def is_the_stored_subject(self) -> bool:
        """Whether the case was judged for the subject that it is stored for, wherever its file lies."""
        return short_name(self.case.subject) == short_name(self.record.subject)

    @property
    def same_verdict(self) -> bool | None:
        """Whether status, stage and cause are the stored ones; None if there is nothing to compare with."""
        if self.case.expected is None or not self.is_the_stored_subject:
            return None
        now = Expected(status=self.record.status, stage=self.record.stage, cause=cause_of(self.record))
        if self.case.expected.cause == "":  # written by hand: only what is said is compared
            now = now.model_copy(update={"cause": ""})
        return now == self.case.expected

    @property
    def same_tensors(self) -> bool | None:
        """Whether the tensors have the stored hash; None if one of the two was not built (a crash),
        or if one is of a single stage, which is given tensors of its own."""
        stored, now = self.case.tensor_hash, self.record.tensor_hash
        if not stored or not now or stored.rpartition(":")[0] != now.rpartition(":")[0]:
            return None
        return stored == now

    @property
    def silent(self) -> str | None:
        """Why this says nothing of the stored finding; None if it does."""
        if self.record.status is Status.NOT_RUN:
            return "the case was not run"
        return missing_check(self.case.expected, self.record)

    @property
    def tells(self) -> bool:
        """Whether the stored finding is known to be open or gone now."""
        return self.is_the_stored_subject and self.silent is None

    @property
    def exit_code(self) -> int:
        """1: fails; 2: other tensors than the stored ones, or nothing that tells; 0: passes."""
        if self.failing:
            return 1
        return 2 if self.same_tensors is False or self.silent is not None else 0

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "subject": self.record.subject,
            "status": self.record.status.value,
            "stage": self.record.stage,
            "message": headline(self.record),
            "same_verdict": self.same_verdict,
            "says_nothing": self.silent,
            "tensor_hash": self.record.tensor_hash,
            "same_tensors": self.same_tensors,
            "margin_out": self.record.margin_out,
            "margin_lse": self.record.margin_lse,
            "paths": self.record.paths,
            "seconds": round(self.record.seconds, 3),
            "exit_code": self.exit_code,
        }

    def lines(self, path: Path) -> list[str]:
        """For people."""
        record, stored = self.record, self.case.expected
        before = f"{stored.status.value} at {stored.stage or 'case'}" if stored else ""
        lines = [
            f"case     {path}",
            f"subject  {record.subject}",
            f"verdict  {record.status.value} at {record.stage or 'case'} ({_compared(self.same_verdict, before)})",
            f"tensors  {record.tensor_hash or 'not built'} ({_compared(self.same_tensors, self.case.tensor_hash)})",
            f"margins  out {_number(record.margin_out)}, LSE {_number(record.margin_lse)}  (err/tol)",
            f"message  {headline(record)}",
        ]
        if self.silent is not None:
            lines.append(f"nothing is said of the finding: {self.silent}")
        for check in record.checks:
            if check.status.is_finding:
                parts = (check.status.value, place_text(check.place), check.message)
                lines.append(f"  {check.check}: {'; '.join(part for part in parts if part)}")
                if check.terms:
                    lines.append(f"    tolerance: {terms_text(check.terms)}")
        return lines


def replay_case(
    case: CaseFile,
    *,
    subject: str | None = None,
    timeout_s: float = 300.0,
    checker: str = WorkerSpec.checker,
    resolver: str = WorkerSpec.resolver,
    preload: tuple[str, ...] = PRELOAD,
) -> Replay:
    """Judge the case in a worker process of its own.

    Raises:
        SubjectRefused: the subject is unknown or cannot be loaded here.
    """
    scratch = tempfile.mkdtemp(prefix="mlacheck-")
    spec = WorkerSpec(subject=subject or case.subject, scratch=scratch, checker=checker, resolver=resolver)
    slot = Slot(spec, timeout_s, fork_context(preload))
    try:
        slot.prepare()
        return Replay(case, slot.run(case.problem.to_json()))
    finally:
        slot.stop()
        shutil.rmtree(scratch, ignore_errors=True)


def _compared(same: bool | None, stored: str) -> str:
    if same is None:
        return "nothing to compare with"
    return "same as stored" if same else f"DIFFERENT, stored: {stored}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
