"""One case: build the tensors, run the subject, judge every stage, say what the case could have shown."""

from __future__ import annotations

import time

import torch

from harness.checks.blame import is_out_of_memory
from harness.checks.crowd import check_crowd, crowd_of
from harness.checks.facts import Facts
from harness.checks.guards import same_bits
from harness.checks.link import first_bad
from harness.checks.localize import explain_attend
from harness.checks.merge import check_merge_alone
from harness.checks.near import judged_from
from harness.checks.power import power_shares, vacuous_classes
from harness.checks.prefill import check_fed, check_raw, check_result_shape, raw_power, raw_reference, requests_of
from harness.checks.raised import check_raised
from harness.checks.readout import Attend
from harness.checks.related import check_related
from harness.checks.relations import Base
from harness.checks.sequence import check_calls, check_stage_calls
from harness.checks.summary import summarise
from harness.checks.verdict import failed, passed
from harness.checks.walk_mha import MhaWalk, check_trace_plan
from harness.checks.walk_mqa import MqaWalk
from harness.problems.problem import Problem
from harness.problems.tensors import Inputs, build_inputs, tensor_hash
from harness.subjects.api import StageSubject
from harness.subjects.base import NotRunnable, PrefillOutcome, PrefillSubject
from harness.subjects.registry import resolve
from optimized.trace import AttendEvent, MergeEvent, Trace
from reports.records import CaseRecord, CheckRecord, Status
from reports.text import said

RELATION_EVERY = 3
"""One case in this many is also judged by a relation (a second run)."""
REPEAT_EVERY = 4
"""One case in this many (by its id) is run twice, the second time on other poison."""


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def require_problem(problem: object) -> None:
    """Raise TypeError for anything but a Problem."""
    if not isinstance(problem, Problem):
        raise TypeError(f"problem is a {type(problem).__name__}, must be a Problem (Problem.from_json reads one)")


def check_case(problem: Problem, subject_name: str) -> CaseRecord:
    """Judge one case. The subject's own exceptions become verdicts; faults of the harness are raised.

    Raises TypeError for arguments of other types, SubjectError for a name that no subject has.
    """
    started = time.perf_counter()
    require_problem(problem)
    if not isinstance(subject_name, str):
        kind = type(subject_name).__name__
        raise TypeError(f"subject_name is a {kind}, must be a name (mlacheck.check takes functions too)")
    subject = resolve(subject_name)
    if isinstance(subject, StageSubject):
        return check_stage_calls(problem, subject, default_device())
    record = CaseRecord(
        case_id=problem.case_id,
        subject=subject_name,
        source=problem.source,
        status=Status.PASS,
        chunks=len(problem.planned_chunks),
        features=problem.features(),
    )
    inputs = build_inputs(problem, default_device())
    record.tensor_hash = tensor_hash(inputs)
    if problem.history:
        checks = check_calls(problem, subject, inputs, record, _judge, _judge_plainly)
    else:
        checks = _judge(problem, subject, inputs, record)
    summarise(record, checks, nothing_compared=problem.num_tokens == 0)
    record.seconds = time.perf_counter() - started
    return record


def _judge_plainly(problem: Problem, subject: PrefillSubject, inputs: Inputs, record: CaseRecord) -> list[CheckRecord]:
    """Without second runs."""
    return _judge(problem, subject, inputs, record, once=True)


def _judge(
    problem: Problem, subject: PrefillSubject, inputs: Inputs, record: CaseRecord, *, once: bool = False
) -> list[CheckRecord]:
    before = {name: buffer.clone() for name, buffer in inputs.buffers.items() if name != "out"}
    refusal_expected = problem.expected_path() == "refused"
    try:
        outcome = subject.prefill(problem, inputs, traced=True)
    except NotRunnable as reason:
        return [failed("prefill", "prefill.run", said(reason), status=Status.NOT_RUN)]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if refusal_expected and isinstance(error, ValueError):
            record.paths = ["refused"]
            untouched = _guard_records(subject, inputs, before)
            return [*untouched, passed("dispatch", "dispatch.refusal")]
        return check_raised(Facts(problem, inputs, subject.contract), getattr(subject, "trace", None), error)
    guards = _guard_records(subject, inputs, before)
    if refusal_expected:
        message = "a masked path was forced although its masks do not fit the workspace: ValueError expected"
        return [failed("dispatch", "dispatch.refusal", message), *guards]
    facts = Facts(problem, inputs, subject.contract)
    asks_relation = not once and int(problem.case_id, 16) % RELATION_EVERY == 1 and first_bad(guards) is None
    checks = _stages(facts, subject, outcome, record, asks_relation=asks_relation)
    # stages are judged on the inputs as they are now: where the call changed them, that comes first
    changed = any(guard.check == "guard.inputs" and guard.status.is_finding for guard in guards)
    checks = guards + checks if changed else checks + guards
    if not once and int(problem.case_id, 16) % REPEAT_EVERY == 0 and first_bad(checks) is None:
        checks += _repeat(problem, subject, outcome)
    build_mask = getattr(subject, "build_mask", None)
    if not once and build_mask is not None and first_bad(checks) is None:
        crowd = crowd_of(problem, subject.contract, inputs.q.device)
        checks += check_crowd(build_mask, inputs.q.device, crowd)
    return checks


def _stages(
    facts: Facts, subject: PrefillSubject, outcome: PrefillOutcome, record: CaseRecord, *, asks_relation: bool
) -> list[CheckRecord]:
    wrong = check_result_shape(facts, outcome.out, outcome.lse)
    if wrong is not None:
        return [wrong]
    made, produced = facts, outcome
    facts, outcome = judged_from(made, produced)
    problem, trace = facts.problem, outcome.trace
    expected = problem.expected_path()
    path = trace.path if trace is not None else None
    checks: list[CheckRecord] = []
    walk: MhaWalk | MqaWalk | None = None
    if trace is not None:
        record.paths = sorted({str(trace.path), *trace.kernels})
        planned = check_trace_plan(facts, trace)
        if first_bad(planned) is not None:
            return planned
        checks += planned
        if path != expected:
            message = f"the batch took path {path}, must take {expected}"
            checks.append(failed("dispatch", "dispatch.path", message))
        else:
            checks.append(passed("dispatch", "dispatch.path"))
        walk = MqaWalk(facts, trace) if path == "mqa" else MhaWalk(facts, trace)
        checks += walk.run()
        checks = _of_parts(checks, subject, produced.trace)
    if first_bad(checks) is not None:
        return checks
    dims = problem.dims
    out = outcome.out.view(-1, dims.heads, dims.v)
    views = requests_of(facts, out, outcome.lse, dense=expected == "dense")
    exact = raw_reference(facts, expected)
    if isinstance(walk, MqaWalk):
        judged_by, power = "mqa", walk.power
    elif trace is not None:
        judged_by = "prefill.fed"
        fed, power = check_fed(facts, trace, views)
        checks += fed
    else:
        judged_by, power = "prefill.raw", raw_power(facts, exact, views)
    record.power = power_shares(power)
    record.vacuous = vacuous_classes(record.power, judged_by)
    checks += check_raw(facts, out, outcome.lse, exact)
    if asks_relation and first_bad(checks) is None:
        base = Base(made, subject, expected, produced.out.view(out.shape), produced.lse, exact)
        aside = record.model_copy()
        checks += check_related(base, lambda *run: _stages(run[0], subject, run[1], aside, asks_relation=False))
    return checks


def _of_parts(checks: list[CheckRecord], subject: PrefillSubject, trace: Trace | None) -> list[CheckRecord]:
    """Stage checks, with what the kernels of single stages say where the subject offers them.

    They run where they ran: `trace` is the one that the subject filled.
    """
    if trace is None:
        return checks
    checks = _explained(checks, trace, getattr(subject, "attend", None))
    merge = getattr(subject, "merge", None)
    if merge is not None and first_bad(checks) is None:
        checks += [check_merge_alone(event, merge) for event in trace.of(MergeEvent)]
    return checks


def _explained(checks: list[CheckRecord], trace: Trace, attend: Attend | None) -> list[CheckRecord]:
    """The first wrong attention call with its wrong key named, where the subject offers the call alone."""
    bad = first_bad(checks)
    if bad is None or bad.stage != "attend" or attend is None:
        return checks
    event = next((event for event in trace.of(AttendEvent) if event.call == bad.place.call), None)
    if event is None:
        return checks
    return [explain_attend(check, event, attend) if check is bad else check for check in checks]


def _guard_records(subject: PrefillSubject, inputs: Inputs, before: dict[str, torch.Tensor]) -> list[CheckRecord]:
    """Canaries around what may be written, and no change of anything else."""
    records = []
    broken = inputs.broken_canary()
    if broken is not None:
        records.append(failed("guard", "guard.output", broken, status=Status.GUARD))
    for name, old in before.items():
        if not same_bits(inputs.buffers[name], old):
            message = f"the call changed its input {name}"
            records.append(failed("guard", "guard.inputs", message, status=Status.GUARD))
    mask_guard = getattr(subject, "mask_guard", None)
    if mask_guard is not None:
        records.append(mask_guard.check("mask_workspace"))
    return records or [passed("guard", "guard.memory")]


def _repeat(problem: Problem, subject: PrefillSubject, first: PrefillOutcome) -> list[CheckRecord]:
    """The same case again, on other poison: the same bits, where the contract claims determinism."""
    if not subject.contract.deterministic:
        return []
    other = "zero" if problem.layout.poison != "zero" else "nan"
    again = problem.replace(layout=problem.layout.model_copy(update={"poison": other}))
    outcome = subject.prefill(again, build_inputs(again, default_device()), traced=False)
    for name, a, b in (("output", first.out, outcome.out), ("LSE", first.lse, outcome.lse)):
        if same_bits(a.contiguous(), b.contiguous()):
            continue
        third = subject.prefill(problem, build_inputs(problem, default_device()), traced=False)
        same = third.out if name == "output" else third.lse
        racy = not same_bits(a.contiguous(), same.contiguous())
        row = (a != b).nonzero()
        where = f" (first at {tuple(row[0].tolist())})" if row.numel() else ""
        if racy:
            message = f"two identical calls gave different {name} bits{where}"
            return [failed("guard", "guard.repeat", message, status=Status.RACY)]
        message = (
            f"{name} depends on memory that must not be read: poison {problem.layout.poison} and {other} differ{where}"
        )
        return [failed("guard", "guard.poison", message, status=Status.GUARD)]
    return [passed("guard", "guard.repeat")]
