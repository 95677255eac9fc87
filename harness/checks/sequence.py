"""Calls in a row: what one call leaves behind must not reach the next.

The earlier calls of a case run in the same process and, where the subject offers it (`sharing`), on the same layer,
metadata and workspaces. Each call is judged like a single case. Then it is made again alone, on fresh buffers: the
bits must be the same. Inputs of finished calls are poisoned, and their results must stay as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.checks.guards import same_bits
from harness.checks.link import first_bad
from harness.checks.stage_case import check_stage
from harness.checks.verdict import failed, passed
from harness.problems.problem import Problem
from harness.problems.tensors import Inputs, build_inputs, tensor_hash
from harness.subjects.api import StageSubject
from harness.subjects.base import PrefillOutcome, PrefillSubject
from reports.records import CaseRecord, CheckRecord, Place, Status

Judge = Callable[[Problem, PrefillSubject, Inputs, CaseRecord], list[CheckRecord]]
"""Runs the subject on one problem and judges it."""
POISON_BYTE = 0xFF
"""NaN in every float format, -1 in every integer."""


class Watched:
    """A subject whose first result since `watch` is kept."""

    def __init__(self, subject: PrefillSubject) -> None:
        self.subject = subject
        self.name = subject.name
        self.contract = subject.contract
        self.first: PrefillOutcome | None = None

    def watch(self) -> None:
        """Forget the last result."""
        self.first = None

    def prefill(self, problem: Problem, inputs: Inputs, *, traced: bool) -> PrefillOutcome:
        """Run one prefill batch."""
        outcome = self.subject.prefill(problem, inputs, traced=traced)
        if self.first is None:
            self.first = outcome
        return outcome

    def __getattr__(self, name: str) -> Any:
        return getattr(self.subject, name)


@dataclass(frozen=True)
class Done:
    """A call that has ended: its inputs, and its results as they were then."""

    inputs: Inputs
    lse: torch.Tensor | None
    out_then: torch.Tensor
    lse_then: torch.Tensor | None

    def poison(self) -> None:
        """Overwrite everything that the call read. Its results stay."""
        for name, buffer in self.inputs.buffers.items():
            if name != "out":
                buffer.view(torch.uint8).fill_(POISON_BYTE)

    def changed(self) -> str | None:
        """Which result is not what it was, or None."""
        if not same_bits(self.inputs.buffers["out"], self.out_then):
            return "output"
        if self.lse is not None and self.lse_then is not None and not same_bits(self.lse, self.lse_then):
            return "LSE"
        return None


class Calls:
    """The calls of one sequence. `problems` are all that may be called: they size the shared workspaces."""

    def __init__(
        self, subject: PrefillSubject, problems: Sequence[Problem], device: torch.device, judge: Judge
    ) -> None:
        self.alone = subject
        sharing = getattr(subject, "sharing", None)
        self.subject = Watched(subject if sharing is None else sharing(problems, device))
        self.judge = judge
        self.done: list[Done] = []

    def call(self, problem: Problem, inputs: Inputs, record: CaseRecord) -> list[CheckRecord]:
        """Make the next call and judge it."""
        number = len(self.done) + 1
        if self.done:
            self.done[-1].poison()
        self.subject.watch()
        checks = self.judge(problem, self.subject, inputs, record)
        outcome = self.subject.first
        if first_bad(checks) is None:
            if outcome is not None and self.alone.contract.deterministic:
                checks.append(self._same_alone(problem, inputs, outcome))
            checks.append(self._results_kept())
        lse = None if outcome is None else outcome.lse
        out_then, lse_then = inputs.buffers["out"].clone(), None if lse is None else lse.clone()
        self.done.append(Done(inputs, lse, out_then, lse_then))
        return [_numbered(check, number) for check in checks]

    def _same_alone(self, problem: Problem, inputs: Inputs, here: PrefillOutcome) -> CheckRecord:
        """The same call on a fresh layer with fresh metadata and workspaces."""
        fresh = _run_alone(self.alone, problem, inputs)
        for name, mine, other in (("output", here.out, fresh.out), ("LSE", here.lse, fresh.lse)):
            if same_bits(mine, other):
                continue
            again = _run_alone(self.alone, problem, inputs)
            if not same_bits(other, again.out if name == "output" else again.lse):
                message = f"two identical calls gave different {name} bits"
                return failed("guard", "guard.repeat", message, status=Status.RACY)
            wrong = (mine != other).nonzero()
            at = [int(index) for index in wrong[0]] if wrong.numel() else []
            token, head = (at[0], at[1] // problem.dims.v) if name == "output" else (at[1], at[0])
            message = f"{name} depends on the calls before: {wrong.shape[0]} elements differ from the call made alone"
            return failed("guard", "guard.sequence", message, Place(token=token, head=head), status=Status.GUARD)
        return passed("guard", "guard.sequence")

    def _results_kept(self) -> CheckRecord:
        for index, done in enumerate(self.done):
            changed = done.changed()
            if changed is not None:
                message = f"the {changed} of call {index + 1} was changed by a later call"
                return failed("guard", "guard.results", message, status=Status.GUARD)
        return passed("guard", "guard.results")


def _run_alone(subject: PrefillSubject, problem: Problem, inputs: Inputs) -> PrefillOutcome:
    out = torch.full_like(inputs.out, torch.nan, memory_format=torch.contiguous_format)
    return subject.prefill(problem, replace(inputs, out=out), traced=False)


def _numbered(check: CheckRecord, number: int) -> CheckRecord:
    if not check.message:
        return check
    return check.model_copy(update={"message": f"call {number} of the sequence: {check.message}"})


def check_calls(
    problem: Problem, subject: PrefillSubject, inputs: Inputs, record: CaseRecord, judge: Judge, plain: Judge
) -> list[CheckRecord]:
    """Judge a problem with a history: the earlier calls by `plain`, the last one by `judge`, until one is wrong.

    `inputs` are those of the last call. The tensor hash of the record comes to cover the earlier calls too.
    """
    device = inputs.q.device
    calls = Calls(subject, (*problem.history, problem), device, plain)
    checks: list[CheckRecord] = []
    hashes = []
    for earlier in problem.history:
        before = build_inputs(earlier, device)
        hashes.append(tensor_hash(before))
        if first_bad(checks) is None:
            checks += calls.call(earlier, before, record.model_copy(deep=True))
    record.tensor_hash = hashlib.sha256("".join([*hashes, record.tensor_hash]).encode()).hexdigest()[:32]
    if first_bad(checks) is not None or any(check.status is Status.NOT_RUN for check in checks):
        return checks
    calls.judge = judge
    return checks + calls.call(problem, inputs, record)


def check_stage_calls(problem: Problem, subject: StageSubject, device: torch.device) -> CaseRecord:
    """Judge a case of a subject of one stage after the calls of its history, which are judged too."""
    for number, earlier in enumerate(problem.history, start=1):
        record = check_stage(earlier, subject, device)
        if record.status.is_finding:
            of_this_case = {
                "case_id": problem.case_id,
                "source": problem.source,
                "features": problem.features(),
                "message": f"call {number} of the sequence: {record.message}",
            }
            return record.model_copy(update=of_this_case)
    return check_stage(problem, subject, device)
