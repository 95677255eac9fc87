"""One case of a subject that offers one stage: feed it the oracle's inputs of that stage, judge what it gives.

The inputs come from the problem by the reference road (oracle projections rounded to the storage type, oracle
masks), so no fault of another stage is in them. The judge of each stage is named in `harness/subjects/stages.py`
and looks like `judge(run) -> records`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from harness.checks.blame import is_out_of_memory
from harness.checks.facts import Facts
from harness.checks.guards import GuardedBuffer, same_bits
from harness.checks.link import first_bad
from harness.checks.near import judge_device
from harness.checks.summary import summarise
from harness.checks.there import There
from harness.checks.untouched import copy_of, restore, same_as
from harness.checks.verdict import failed, passed
from harness.problems.problem import Problem
from harness.problems.tensors import build_inputs, tensor_hash
from harness.subjects.api import NotRunnable, StageSubject
from harness.subjects.stages import STAGES
from reports.records import CaseRecord, CheckRecord, Place, Status
from reports.text import said

REPEAT_EVERY = 4
"""In one case of this many (by its id) the first call is made twice."""


ON_ITS_DEVICE = frozenset({"mask_mod"})
"""Stages whose judge runs kernels of its own, and works where the subject does."""
GUARD_NAMES = {("mask", "out"): "workspace", ("merge", "output_lse"): "output"}
"""Name of the guard check of a buffer, where it is not the name of the input."""

Bits = Sequence[torch.Tensor | None]
"""Results of one call that are compared bit for bit."""


class Ended(Exception):  # noqa: N818 - not an error of the harness
    """The case ends here: the subject gave no result. Carries the record that says so."""

    def __init__(self, record: CheckRecord) -> None:
        super().__init__(record.message)
        self.record = record


class StageRun:
    """One case while it is judged: what the judges of all stages need."""

    def __init__(self, facts: Facts, subject: StageSubject, record: CaseRecord, device: torch.device) -> None:
        self.facts = facts
        self.subject = subject
        self.record = record
        self.device = device
        """Where the subject is called; the tensors of `facts` may lie elsewhere."""
        self.records: list[CheckRecord] = []
        """Guards and repetitions; the judge's own records come first."""
        self.repeats = subject.contract.deterministic and int(record.case_id, 16) % REPEAT_EVERY == 0

    @property
    def stage(self) -> str:
        return self.subject.stage

    @property
    def problem(self) -> Problem:
        return self.facts.problem

    @property
    def is_elsewhere(self) -> bool:
        """Whether the subject is called on another device than the judge works on."""
        return self.facts.inputs.q.device != self.device

    def takes(self, name: str) -> bool:
        """Whether the function takes this input."""
        return name in self.subject.takes

    def call(
        self,
        call: str,
        offered: Mapping[str, Any],
        buffers: Mapping[str, GuardedBuffer] | None = None,
        written: Sequence[str] = (),
    ) -> Any:
        """Call the subject once and return what it returns.

        `buffers` are the guarded ones behind inputs that it may write, `written` further such inputs. All others
        must be left as they were. Raises Ended if the subject raises; running out of memory and NotRunnable go
        through.
        """
        before = {name: copy_of(value) for name, value in offered.items() if name in self.subject.takes}
        result = self._run(call, offered)
        for name, old in before.items():
            if name not in (buffers or {}) and name not in written and not same_as(offered[name], old):
                message = f"{call} changed its input {name}"
                self.records.append(failed("guard", "guard.inputs", message, Place(call=call), status=Status.GUARD))
                restore(offered[name], old)  # the judge goes on with what was given
        for name, buffer in (buffers or {}).items():
            self.records.append(buffer.check(GUARD_NAMES.get((self.stage, name), name)))
        return result

    def _run(self, call: str, offered: Mapping[str, Any]) -> Any:
        there: There | None = None
        if self.is_elsewhere:
            there = There({name: value for name, value in offered.items() if self.takes(name)}, self.device)
        try:
            result = self.subject(offered if there is None else there.arguments)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except NotRunnable:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            message = f"{call}: the subject raised {type(error).__name__} on a legal case: {said(error)}{_line(error)}"
            check = f"{self.stage}.run"
            raise Ended(failed(self.stage, check, message, Place(call=call), status=Status.CONTRACT)) from error
        if there is not None:
            there.bring_back()
        return self._kept(call, result)

    def _kept(self, call: str, result: Any) -> Any:
        """A copy of returned tensors where the judge works: a subject may write its next result to the same memory.

        Raises Ended for a tensor that is not on the device where the subject was called, or is no plain one.
        """
        if isinstance(result, tuple | list) and any(isinstance(part, torch.Tensor) for part in result):
            return [self._kept(call, part) for part in result]
        if not isinstance(result, torch.Tensor):
            return result
        device = self.device
        if result.device != device or result.layout is not torch.strided or result.is_nested:
            kind = "nested " if result.is_nested else "" if result.layout is torch.strided else f"{result.layout} "
            message = f"{call}: it returned a {kind}tensor on {result.device}, must return plain ones on {device}"
            raise Ended(failed(self.stage, f"{self.stage}.shape", message, Place(call=call), status=Status.SHAPE))
        return result.to(self.facts.inputs.q.device, copy=True)

    def check_repeat(
        self, call: str, make: Callable[[], Mapping[str, Any]], results: Callable[[Any, Mapping[str, Any]], Bits]
    ) -> None:
        """Make the call twice more, on inputs made anew; the results must have the same bits.

        `results(returned, inputs)` is what to compare. A call that changes its inputs has been told so, and is not
        made again.
        """
        if not self.repeats or any(record.status.is_finding for record in self.records):
            return
        self.repeats = False
        seen = []
        for _ in range(2):
            offered = make()
            seen.append(results(self._run(call, offered), offered))
        for index, (first, second) in enumerate(zip(*seen, strict=True)):
            if first is not None and second is not None and not same_bits(first.contiguous(), second.contiguous()):
                message = f"{call}: two identical calls gave different bits in result {index}"
                place = Place(call=call)
                self.records.append(failed("guard", "guard.repeat", message, place, status=Status.RACY))
                return
        self.records.append(passed("guard", "guard.repeat"))


Judge = Callable[[StageRun], list[CheckRecord]]


def check_stage(problem: Problem, subject: StageSubject, device: torch.device) -> CaseRecord:
    """Judge one case. The subject's own exceptions become verdicts; faults of the harness are raised.

    A case outside the subject's contract is NOT_RUN, and so is every case where the subject cannot run.
    """
    started = time.perf_counter()
    domain = subject.domain
    seen = domain.view(problem)
    record = CaseRecord(
        case_id=problem.case_id,
        subject=subject.name,
        source=problem.source,
        status=Status.PASS,
        chunks=len(seen.planned_chunks),
        features=seen.features(),
        paths=[subject.stage],
    )
    outside = domain.outside(problem)
    if outside is not None:
        reason = f"the case lies outside the contract of the subject: {outside}"
        checks = [failed(subject.stage, f"{subject.stage}.run", reason, status=Status.NOT_RUN)]
    elif subject.contract.device == "cuda" and device.type != "cuda":
        reason = "its contract asks for a CUDA GPU, and there is none here"
        checks = [failed(subject.stage, f"{subject.stage}.run", reason, status=Status.NOT_RUN)]
    else:
        device = torch.empty(0, device=device).device  # with its index, as tensors name it
        where = device if subject.stage in ON_ITS_DEVICE else judge_device(seen, device)
        inputs = build_inputs(seen, where)
        # marked with the stage: another stage of the same problem may be given other tensors
        record.tensor_hash = f"{subject.stage}:{tensor_hash(inputs)}"
        checks = _judge(StageRun(Facts(seen, inputs, subject.contract), subject, record, device))
    summarise(record, checks, nothing_compared=not checks)
    record.seconds = time.perf_counter() - started
    return record


def _judge(run: StageRun) -> list[CheckRecord]:
    module, _, name = STAGES[run.stage].judge.partition(":")
    judge: Judge = getattr(import_module(module), name)
    try:
        checks = judge(run)
    except Ended as end:
        checks = [end.record]
    except NotRunnable as reason:
        return [failed(run.stage, f"{run.stage}.run", said(reason), status=Status.NOT_RUN)]
    if not checks:
        return []
    if first_bad(checks) is None or first_bad(checks).check != f"{run.stage}.run":  # type: ignore[union-attr]
        checks.append(passed(run.stage, f"{run.stage}.run"))
    if not any(record.check == "guard.inputs" for record in run.records):
        run.records.append(passed("guard", "guard.inputs"))
    return [*checks, *run.records]


def _line(error: BaseException) -> str:
    """Where it was raised, in the innermost frame that is not torch's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
