"""From a finding to a case that fails again in a fresh process.

A worker judges many cases, and a fault may need what an earlier one left in the process: a value captured at the first
call, a compiled kernel for other sizes. Such a finding gets the calls that ran before it as its history. For the same
reason a case that became small in one process is tried again in another before it is believed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from harness.problems.problem import MAX_HISTORY, Problem
from reports.records import CaseRecord, Status

KEPT_BEFORE = 6
"""So many of the cases that a process ran last are remembered."""
_FIRST_SHARE = 0.6
"""Of the time for shrinking, in one process; the rest is left for tries that have a process each."""


def repeatable(record: CaseRecord) -> bool:
    """Whether the verdict is one that another process would give at once.

    A crash or a hang has taken its process along already, and a race comes and goes.
    """
    return record.status.is_finding and record.status not in (Status.CRASH, Status.HANG, Status.OOM, Status.RACY)


def candidates(problem: Problem, before: Sequence[Problem]) -> Iterator[Problem]:
    """The problem itself; then after each of the calls before it, the last first; then after the last ones."""
    yield problem
    histories = [(call,) for call in reversed(before)]
    if len(before) >= MAX_HISTORY:
        histories.append(tuple(before[-MAX_HISTORY:]))  # type: ignore[arg-type]
    for history in histories:
        calls = (*(call.replace(history=()) for call in history), *problem.history)
        yield problem.replace(history=calls[-MAX_HISTORY:])


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
