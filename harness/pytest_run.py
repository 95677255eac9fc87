"""The run behind the pytest items of one subject: made once, read by every process."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.engine.worker import HARNESS_STAGE
from harness.findings.store import CaseFile, cause_of, load_case, replay_command
from harness.interrupts import one_interrupt
from harness.problems.problem import Problem
from harness.subjects.names import short_name, split_name
from reports.records import CaseRecord, CheckRecord, Status
from reports.runs import read_rows

if TYPE_CHECKING:
    from harness.pytest_plugin import Options

MAX_TIME_S = 3600.0


class SuiteError(RuntimeError):
    """The run could not be made: one line. No check is accused."""


@dataclass(frozen=True)
class Outcome:
    """What one check came to over all cases."""

    status: Literal["passed", "failed", "skipped"]
    text: str = ""
    properties: list[tuple[str, Any]] = field(default_factory=list)
    """For JUnit files: cases that judged it, and the worst error / tolerance."""


class Campaign:
    """One run of the engine for one subject."""

    def __init__(self, subject: str, folder: Path, options: Options) -> None:
        self.subject = subject
        self.folder = folder
        self.options = options

    def outcome(self, check: str) -> Outcome:
        """Verdict on a check, or on a stage of a layer. Raises SuiteError."""
        records = self._records
        harness = next((record for record in records if record.stage == HARNESS_STAGE), None)
        if harness is not None:
            raise SuiteError(f"the harness failed on a case: {harness.message}")
        if records and all(record.status is Status.NOT_RUN for record in records):
            return Outcome("skipped", records[0].message)
        judged, worst, broken = 0, 0.0, list[tuple[CaseRecord, CheckRecord | None]]()
        for record in records:
            found = [one for one in record.checks if check in (one.check, one.stage)]
            judged += bool(found)
            worst = max([worst, *(one.margin or 0.0 for one in found)])
            bad = next((one for one in found if one.status.is_finding), None)
            if bad is not None:
                broken.append((record, bad))
            elif record.status.is_finding and not record.checks and self._takes_the_blame(check):
                broken.append((record, None))
        properties: list[tuple[str, Any]] = [("cases", judged)]
        if worst > 0:
            properties.append(("worst_margin", round(worst, 4)))
        if broken:
            return Outcome("failed", self._failure(check, broken, len(records)), properties)
        stopped = sum(record.status.is_finding for record in records) - len(broken)
        if judged == 0 and not stopped:
            text = "no case judged it: the contract does not promise it, or it needs a GPU"
            return Outcome("skipped", text, properties)
        if stopped and not check.endswith(".run"):  # a case that failed later did run
            text = f"not reached in {stopped} of {len(records)} cases, which failed before it; passed in {judged}"
            return Outcome("skipped", text, properties)
        return Outcome("passed", properties=properties)

    def summary(self) -> str:
        """One line; empty if there is no run."""
        if not (self.folder / "summary.json").is_file():
            return ""
        records = self._records
        margins = [margin for record in records for margin in (record.margin_out, record.margin_lse) if margin]
        worst = f", worst err/tol {max(margins):.2f}" if margins else ""
        return f"{short_name(self.subject)}: {len(records)} cases{worst}; run {self.folder}"

    def _takes_the_blame(self, check: str) -> bool:
        """Whether a case that ended without any check (crash, hang, memory) is this check's."""
        stage = split_name(self.subject).stage
        return check.endswith(".run") if stage or "." in check else check == "prefill"

    def _failure(self, check: str, broken: list[tuple[CaseRecord, CheckRecord | None]], cases: int) -> str:
        """Message, case and replay line: of the shrunk case where this check was a finding of its own."""
        record, bad = broken[0]
        stored = self._finding(check) or self._write_case(check, record)
        message = stored.message or (bad.message if bad is not None else record.message)
        status = bad.status if bad is not None else record.status
        problem = stored.case.problem
        lines = [f"{status.value} in {len(broken)} of {cases} cases: {message}"]
        if bad is not None and bad.terms and stored.message == bad.message:
            terms = ", ".join(f"{name} {share:.0%}" for name, share in bad.terms.items())
            lines.append(f"the tolerance there: {terms}")
        requests, keys = len(problem.requests), sum(problem.seq_lens)
        lines.append(f"the case: {requests} requests, {problem.num_tokens} query tokens, {keys} keys")
        lines.append(replay_command(stored.path, self.subject))
        return "\n".join(lines)

    def _finding(self, check: str) -> _Stored | None:
        """The shrunk case of a finding whose cause is this check."""
        for entry in json.loads((self.folder / "summary.json").read_text(encoding="utf-8")):
            if check in (entry["cause"], entry["stage"]) or (not entry["has_checks"] and self._takes_the_blame(check)):
                path = self.folder.resolve() / "findings" / entry["id"] / "case.json"
                return _Stored(path, load_case(path), entry["message"])
        return None

    def _write_case(self, check: str, record: CaseRecord) -> _Stored:
        """A case file for a check that failed only beside another one."""
        problem = Problem.from_json(json.dumps(record.problem))
        case = CaseFile.of(record, problem)
        path = self.folder.resolve() / "cases" / f"{check}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(case.text(), encoding="utf-8")
        return _Stored(path, case, "")

    @cached_property
    def _records(self) -> list[CaseRecord]:
        """All records of the run, which is made first if nobody has."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.folder.with_suffix(".lock")):
            error = self.folder.with_suffix(".error")
            if error.is_file():
                raise SuiteError(error.read_text(encoding="utf-8"))
            if not (self.folder / "summary.json").is_file():
                try:
                    self._run()
                except SuiteError as reason:
                    error.write_text(str(reason), encoding="utf-8")
                    raise
        return [CaseRecord.model_validate(row) for row in read_rows(self.folder)]

    def _run(self) -> None:
        from harness.engine.book import RunConfig
        from harness.engine.limits import LIMITS
        from harness.engine.search import CannotRun, Observer, default_jobs, run

        options = self.options
        limits = replace(LIMITS[options.profile], max_examples=options.examples, max_time_s=MAX_TIME_S)
        config = RunConfig(
            subject=self.subject,
            profile=options.profile,
            limits=limits,
            out=self.folder,
            seed=options.seed,
            jobs=options.jobs or default_jobs(),
            shrink_s=options.shrink_s,
        )
        try:
            with one_interrupt():
                outcome = run(config, Observer())
        except CannotRun as reason:
            raise SuiteError(str(reason)) from None
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.book.broken:
            raise SuiteError(outcome.book.broken[0].strip().splitlines()[-1])
        found = [
            {
                "id": finding.id,
                "stage": finding.record.stage,
                "cause": cause_of(finding.record),
                "message": finding.record.message,
                "has_checks": bool(finding.record.checks),
            }
            for finding in outcome.book.store.findings.values()
        ]
        (self.folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Stored:
    """A case file and the judge's message on it; empty if it was not judged again."""

    path: Path
    case: CaseFile
    message: str


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
