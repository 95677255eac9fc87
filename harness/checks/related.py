"""A relation that does not hold says that one of two runs is wrong; judging the second one too says what is.

The first run of a case passed every stage check before its relation was asked, so that the fault is mostly in the
changed run: that run is repeated with a trace and judged stage by stage, and what accuses there comes first.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.checks.blame import is_out_of_memory, stage_of_error
from harness.checks.facts import Facts
from harness.checks.link import first_bad
from harness.checks.raised import check_raised
from harness.checks.relations import Base, check_relation
from harness.subjects.base import PrefillOutcome
from reports.records import CheckRecord

JudgeRun = Callable[[Facts, PrefillOutcome], list[CheckRecord]]
"""All checks of one traced run."""


def check_related(base: Base, judge_run: JudgeRun) -> list[CheckRecord]:
    """One relation of a case, and where it does not hold the stage that is wrong in the changed run."""
    try:
        tied = check_relation(base)
    except Exception as error:
        return _raised_in_run(base, error)
    if first_bad(tied) is None or not base.runs:
        return tied
    problem, inputs = base.runs[-1]
    try:
        outcome = base.subject.prefill(problem, inputs, traced=True)
    except Exception as error:
        return [*_raised_in_run(base, error), *tied]
    judged = judge_run(Facts(problem, inputs, base.subject.contract), outcome)
    return [*(check for check in judged if check.status.is_finding), *tied]


def _raised_in_run(base: Base, error: Exception) -> list[CheckRecord]:
    """The exception of a changed run. What did not come from the subject is a fault of the harness and raised on."""
    if not base.runs or is_out_of_memory(error) or stage_of_error(error) is None:
        raise error
    problem, inputs = base.runs[-1]
    return check_raised(Facts(problem, inputs, base.subject.contract), getattr(base.subject, "trace", None), error)
