"""Does a finding that needs earlier calls end up as a case file that fails in a fresh process?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.engine.limits import Limits
from harness.engine.reproduce import KEPT_FIRST, KEPT_LAST, Ran, repeatable, reproduced, smallest
from harness.engine.search import Observer, run
from harness.findings.replay import replay_case
from harness.findings.store import Finding, load_case
from harness.problems.problem import Problem
from reports.records import CaseRecord, Status
from tests.harness.engine_fakes import problem
from tests.harness.test_engine import PRELOAD, config

FAKES = "tests.harness.engine_fakes"


class Notes(Observer):
    """What a run tells of its findings."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    def unconfirmed(self, finding: Finding) -> None:
        self.lost.append(finding.record.message)


def test_a_fault_of_the_process_gets_the_call_before_it_and_shrinks_with_it(tmp_path: Path) -> None:
    checker = f"{FAKES}:scale_kept"
    settings = config(
        tmp_path / "run",
        "scale_kept",
        strategy=f"{FAKES}:cases_of_two_scales",
        jobs=1,
        shrink_s=30.0,
        limits=Limits(40, 60.0, 20.0),
    )
    outcome = run(settings, Observer())
    (finding,) = outcome.book.store.findings.values()
    case = load_case(finding.folder / "case.json")
    assert len(case.problem.history) == 1
    assert case.problem.history[0].scale != case.problem.scale
    assert max(case.problem.max_query_len, case.problem.history[0].max_query_len) == 20
    again = replay_case(case, checker=checker, resolver=f"{FAKES}:resolve", preload=PRELOAD)
    assert again.failing
    assert again.same_verdict
    alone = case.model_copy(update={"problem": case.problem.replace(history=())})
    assert not replay_case(alone, checker=checker, resolver=f"{FAKES}:resolve", preload=PRELOAD).failing


def test_a_finding_that_does_not_come_back_is_said_to(tmp_path: Path) -> None:
    notes = Notes()
    outcome = run(config(tmp_path / "run", "once", jobs=1, shrink_s=20.0), notes)
    (finding,) = outcome.book.store.findings.values()
    assert notes.lost == ["once"]
    assert not finding.shrunk


def test_the_calls_that_a_failure_needs_are_found_by_halves() -> None:
    before = [problem((0, n)) for n in range(1, 25)]
    judged = problem((0, 30))

    def needs(*tokens: int) -> Callable[[Sequence[Problem], Problem], bool]:
        def fails_after(calls: Sequence[Problem], case: Problem) -> bool:
            ran = [call.num_tokens for call in (*calls, *case.history)]
            tried.append(len(ran))
            return set(tokens) <= set(ran)

        return fails_after

    tried: list[int] = []
    for token in (24, 1, 12):
        found = reproduced(judged, before, needs(token))
        assert found is not None
        assert [call.num_tokens for call in found.history] == [token]
    assert reproduced(judged, before, needs()) == judged
    both = reproduced(judged, before, needs(23, 24))
    assert both is not None
    assert [call.num_tokens for call in both.history] == [23, 24]
    assert reproduced(judged, before, needs(1, 24)) is None
    assert reproduced(judged, before, needs(99)) is None


def test_the_first_and_the_last_cases_of_a_process_are_remembered() -> None:
    ran = Ran()
    for n in range(1, 101):
        ran.add(problem((0, n)).to_json())
    tokens = [case.num_tokens for case in ran.problems()]
    assert tokens == [*range(1, KEPT_FIRST + 1), *range(101 - KEPT_LAST, 101)]
    ran.clear()
    assert ran.problems() == []


@pytest.mark.parametrize(
    ("status", "expected"), [(Status.FAIL, True), (Status.GUARD, True), (Status.RACY, False), (Status.HANG, False)]
)
def test_only_steady_verdicts_are_tried_again(status: Status, expected: bool) -> None:
    assert repeatable(CaseRecord(case_id="x", subject="s", status=status)) is expected


def test_a_small_case_is_believed_when_it_fails_in_a_fresh_process() -> None:
    start, small, smaller = problem((0, 30)), problem((0, 20)), problem((0, 3))
    asked: list[bool] = []

    def shrink(fresh: bool, seconds: float) -> Problem:
        asked.append(fresh)
        return small if fresh else smaller

    assert smallest(start, shrink, lambda p: True, seconds=10) == smaller
    assert smallest(start, shrink, lambda p: p.num_tokens >= 20, seconds=10) == small
    assert asked == [False, False, True]
    assert smallest(start, lambda fresh, seconds: start, lambda p: False, seconds=10) == start
    assert smallest(start, lambda fresh, seconds: None, lambda p: True, seconds=10) is None
