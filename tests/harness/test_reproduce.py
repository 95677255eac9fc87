"""Does a finding that needs earlier calls end up as a case file that fails in a fresh process?"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.engine.limits import Limits
from harness.engine.reproduce import candidates, repeatable, smallest
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


def test_earlier_calls_are_tried_the_last_first() -> None:
    calls = [problem((0, n), history=(problem((0, 9)),)) for n in (1, 2, 3)]
    judged = problem((0, 7))
    tried = [[call.num_tokens for call in candidate.history] for candidate in candidates(judged, calls)]
    assert tried == [[], [3], [2], [1], [2, 3]]
    own = judged.replace(history=(problem((0, 5)),))
    tried = [[call.num_tokens for call in candidate.history] for candidate in candidates(own, calls)]
    assert tried == [[5], [3, 5], [2, 5], [1, 5], [3, 5]]


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
