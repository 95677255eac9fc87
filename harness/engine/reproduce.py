"""From a finding to a case that fails again in a fresh process.

A worker judges many cases, and a fault may need what an earlier one left in the process: a value captured at the first
call, a compiled kernel for other sizes. Such a finding gets the calls that ran before it as its history. For the same
reason a case that became small in one process is tried again in another before it is believed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from harness.problems.problem import MAX_HISTORY, Problem
from reports.records import CaseRecord, Status

KEPT_FIRST, KEPT_LAST = 16, 8
"""So many of the cases that a process judged are remembered: what it kept of a first call, or of the last one."""
_FIRST_SHARE = 0.6
"""Of the time for shrinking, in one process; the rest is left for tries that have a process each."""


def repeatable(record: CaseRecord) -> bool:
    """Whether the verdict is one that another process would give at once.

    A crash or a hang has taken its process along already, and a race comes and goes.
    """
    return record.status.is_finding and record.status not in (Status.CRASH, Status.HANG, Status.OOM, Status.RACY)


class Ran:
    """The first and the last cases of one process, in order."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._last: deque[str] = deque(maxlen=KEPT_LAST)

    def add(self, problem_json: str) -> None:
        """One more case has run."""
        if len(self._first) < KEPT_FIRST:
            self._first.append(problem_json)
        else:
            self._last.append(problem_json)

    def clear(self) -> None:
        """A new process has begun."""
        self._first.clear()
        self._last.clear()

    def problems(self) -> list[Problem]:
        """The cases, oldest first."""
        return [Problem.from_json(text) for text in (*self._first, *self._last)]


def reproduced(
    problem: Problem, before: Sequence[Problem], fails_after: Callable[[Sequence[Problem], Problem], bool]
) -> Problem | None:
    """The problem if it fails in a fresh process, else with a history after which it does; None if none is found.

    Args:
        problem: a case that failed in a process that had run others.
        before: cases that ran before it there, oldest first.
        fails_after: whether it fails in a fresh process after these cases.
    """
    if fails_after([], problem):
        return problem
    for group in (before[-KEPT_LAST:], before[:KEPT_LAST], before):
        if group and fails_after(group, problem):
            calls = _needed(group, problem, fails_after)
            flat = [*(call.replace(history=()) for call in calls), *problem.history]
            case = problem.replace(history=tuple(flat[-MAX_HISTORY:]))
            return case if fails_after([], case) else None
    return None


def _needed(
    calls: Sequence[Problem], problem: Problem, fails_after: Callable[[Sequence[Problem], Problem], bool]
) -> Sequence[Problem]:
    """Half of the calls, again and again, as long as the problem fails after one of the halves."""
    while len(calls) > 1:
        halves = (calls[len(calls) // 2 :], calls[: len(calls) // 2])
        shorter = next((half for half in halves if fails_after(half, problem)), None)
        if shorter is None:
            break
        calls = shorter
    return calls


def smallest(
    start: Problem,
    shrink: Callable[[bool, float], Problem | None],
    fails_alone: Callable[[Problem], bool],
    *,
    seconds: float,
) -> Problem | None:
    """The smallest case found that fails in a fresh process; None if the search broke off.

    Args:
        start: a case that does.
        shrink: `shrink(fresh, seconds)` is the smallest case it finds; `fresh`: each try in a process of its own.
        fails_alone: whether a case fails in a fresh process.
        seconds: for everything together.
    """
    end = time.monotonic() + seconds
    found = shrink(False, _FIRST_SHARE * seconds)
    if found is None or found.case_id == start.case_id or fails_alone(found):
        return found
    return shrink(True, max(end - time.monotonic(), 0.0))
