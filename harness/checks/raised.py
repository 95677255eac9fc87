"""An exception where there should have been a result: what was wrong before it, and the stage that raised it."""

from __future__ import annotations

from harness.checks.blame import stage_of_error
from harness.checks.facts import Facts
from harness.checks.link import first_bad
from harness.checks.verdict import failed
from harness.checks.walk_mha import check_trace_plan
from optimized.trace import Trace
from reports.records import CheckRecord, Status
from reports.text import described


def check_raised(facts: Facts, trace: Trace | None, error: Exception) -> list[CheckRecord]:
    """Records of a legal case that raised `error`. `trace` holds what was done until then.

    A wrong plan or a wrong path is the cause of whatever came after it and comes first.
    """
    records: list[CheckRecord] = []
    if trace is not None and trace.plan is not None:
        planned = check_trace_plan(facts, trace)
        records += planned if first_bad(planned) is not None else []
    expected = facts.problem.expected_path()
    if trace is not None and trace.path not in (None, expected):
        message = f"the batch took path {trace.path}, must take {expected}, and raised an exception there"
        records.append(failed("dispatch", "dispatch.path", message))
    message = f"the subject refused a legal case: {described(error)}"
    stage = stage_of_error(error) or "prefill"
    return [*records, failed(stage, "prefill.run", message, status=Status.CONTRACT)]
