"""Findings: one folder for each distinct fault of a run, small enough to attach to an issue.

    findings/ID/case.json       problem, subject, expected verdict, tensor hash: what `mlacheck replay` reads
    findings/ID/original.json   the case as it was found, if shrinking made a smaller one
    findings/ID/report.md       ready to paste in an issue
    findings/ID/state.json      `open` or `fixed`, and how often the fault was met

A fault is told from another by its fingerprint: kind + stage + subject + cause.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.problems.problem import MAX_JSON_CHARS, Problem, ProblemError, one_line
from harness.subjects.names import is_user_code, short_name
from reports.finding import finding_markdown
from reports.records import CaseRecord, Status


class CaseFileError(ValueError):
    """A case file that cannot be read or is not legal: one line that names the file and what is wrong."""


class Expected(BaseModel):
    """The verdict that a replay is compared with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: Status
    stage: str | None = None
    cause: str = ""


class CaseFile(BaseModel):
    """`case.json`: a problem, whom it accuses and of what."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["mlacheck-case"] = "mlacheck-case"
    version: Literal[1] = 1
    subject: str = Field(min_length=1, max_length=1000)
    problem: Problem
    expected: Expected | None = None
    """None: a bare problem, never judged yet."""
    tensor_hash: str = Field(default="", max_length=128)
    """Hash of the tensors that the problem stood for when it was judged; empty if they were never built."""

    @classmethod
    def of(cls, record: CaseRecord, problem: Problem) -> CaseFile:
        """The case file of a judged case."""
        expected = Expected(status=record.status, stage=record.stage, cause=cause_of(record))
        return cls(subject=record.subject, problem=problem, expected=expected, tensor_hash=record.tensor_hash)

    def text(self) -> str:
        """The file's content."""
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"


def cause_of(record: CaseRecord) -> str:
    """What went wrong, in words that two cases of one fault share.

    The name of the failing check, or the message without its numbers.
    """
    for check in record.checks:
        if check.status == record.status and record.stage in (None, check.stage):
            return check.check
    return re.sub(r"0x[0-9a-f]+|-?\d+(\.\d+)?(e-?\d+)?", "#", record.message)[:120]


def fingerprint(record: CaseRecord) -> str:
    """Kind + stage + subject + cause, as 10 hex digits."""
    key = "|".join((record.status, record.stage or "", short_name(record.subject), cause_of(record)))
    return hashlib.sha256(key.encode()).hexdigest()[:10]


def replay_command(case: Path, subject: str) -> str:
    """The command that judges a case file again. A user's code is named on it: no file makes code run by itself."""
    named = f" --subject {shlex.quote(subject)}" if is_user_code(subject) else ""
    return f"mlacheck replay {shlex.quote(str(case))}{named}"


def finding_id(record: CaseRecord) -> str:
    """Readable and stable: the same fault has the same id in every run."""
    return f"{record.stage or 'case'}-{record.status.lower()}-{fingerprint(record)}"


@dataclass
class Finding:
    """One distinct fault of a run."""

    folder: Path
    record: CaseRecord
    problem: Problem
    count: int = 1
    shrunk: bool = False
    before: list[Problem] = field(default_factory=list)
    """The last cases that ran before it in its process, oldest first."""

    @property
    def id(self) -> str:
        """Name of the folder."""
        return self.folder.name

    @property
    def size(self) -> str:
        """How large the case is, in words."""
        p = self.problem
        after = f", after {len(p.history)} other calls" if p.history else ""
        return f"{len(p.requests)} requests, {p.num_tokens} query tokens, {sum(p.seq_lens)} keys{after}"

    @property
    def replay_line(self) -> str:
        """The command that reproduces it from any working folder."""
        return replay_command(self.folder.resolve() / "case.json", self.record.subject)


class FindingStore:
    """Writes the findings of one run. Not thread-safe: the engine holds its lock around every call."""

    def __init__(self, folder: Path, facts: Mapping[str, str]) -> None:
        self.folder = folder
        self._facts = facts
        self.findings: dict[str, Finding] = {}

    def add(self, record: CaseRecord, problem: Problem) -> Finding | None:
        """Store the case if its fault is new; else count it and return None."""
        key = fingerprint(record)
        if key in self.findings:
            self.findings[key].count += 1
            return None
        finding = Finding(self.folder / finding_id(record), record, problem)
        finding.folder.mkdir(parents=True)
        self.findings[key] = finding
        self._write(finding)
        return finding

    def shrunk(self, finding: Finding, record: CaseRecord, problem: Problem) -> None:
        """Put the smaller case in the place of the one that was found, which is kept beside it."""
        (finding.folder / "case.json").rename(finding.folder / "original.json")
        finding.record, finding.problem, finding.shrunk = record, problem, True
        self._write(finding)

    def close(self) -> None:
        """Write how often each fault was met."""
        for finding in self.findings.values():
            write_state(finding.folder, "open", count=finding.count)

    def _write(self, finding: Finding) -> None:
        case = CaseFile.of(finding.record, finding.problem).text()
        (finding.folder / "case.json").write_text(case, encoding="utf-8")
        report = finding_markdown(
            finding.record, case_json=finding.problem.to_json(), facts=self._facts, replay=finding.replay_line
        )
        (finding.folder / "report.md").write_text(report, encoding="utf-8")
        write_state(finding.folder, "open", count=finding.count)


def write_state(folder: Path, state: Literal["open", "fixed"], *, count: int | None = None) -> None:
    """Mark a finding; the count is left as it was if it is not given."""
    if count is None:
        count = int(read_state(folder).get("count", 1))
    (folder / "state.json").write_text(json.dumps({"state": state, "count": count}) + "\n", encoding="utf-8")


def read_state(folder: Path) -> dict[str, str | int]:
    """`state` and `count` of a finding; open and 1 if nothing legible says otherwise."""
    state: dict[str, str | int] = {"state": "open", "count": 1}
    try:
        stored = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return state
    if isinstance(stored, dict) and stored.get("state") in ("open", "fixed") and isinstance(stored.get("count"), int):
        state = {"state": stored["state"], "count": stored["count"]}
    return state


def note_replay(case: Path, *, failing: bool) -> None:
    """Mark the finding of this case file as fixed, or as open again; other case files are left alone."""
    if case.name == "case.json" and (case.parent / "state.json").is_file():
        write_state(case.parent, "open" if failing else "fixed")


def locate(what: str, runs: Path) -> Path:
    """The case file that a user names by its path, its finding's folder or its finding's id (newest run).

    Raises:
        CaseFileError: nothing like it is there.
    """
    path = Path(what)
    if path.is_dir():
        path = path / "case.json"
    if path.is_file():
        return path.resolve()
    if "/" not in what:
        found = sorted(runs.glob(f"*/findings/{what}*/case.json"), key=lambda file: file.stat().st_mtime)
        if found:
            return found[-1].resolve()
    raise CaseFileError(f"{what}: no such case file, finding folder or finding id (looked in {runs.resolve()})")


def load_case(path: Path) -> CaseFile:
    """Read a case file, or a bare problem (judged with `ours[triton]` unless the user says otherwise).

    Raises:
        CaseFileError: unreadable, too large, not JSON, unknown fields, illegal values (one line).
    """
    try:
        if path.stat().st_size > MAX_JSON_CHARS:
            raise CaseFileError(f"{path}: {path.stat().st_size} bytes, must be at most {MAX_JSON_CHARS}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CaseFileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CaseFileError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    try:
        if '"mlacheck-case"' not in text:
            return CaseFile(subject="ours[triton]", problem=Problem.from_json(text))
        return CaseFile.model_validate_json(text)
    except ProblemError as error:
        raise CaseFileError(f"{path}: {error}") from None
    except ValidationError as error:
        raise CaseFileError(f"{path}: {one_line(error)}") from None
