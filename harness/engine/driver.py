"""A shard: the process in which Hypothesis draws cases, steers and shrinks.

It runs no kernel and writes nothing. Each case goes to the main process as JSON, which answers with its
record or with the word to stop. Two tasks come down the pipe: `Search` and `Shrink`.
"""

from __future__ import annotations

import hashlib
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from multiprocessing.connection import Connection

from hypothesis import HealthCheck, Phase, Verbosity, event, given, seed, settings, target
from hypothesis.strategies import SearchStrategy

from harness.engine.coverage import Counts
from harness.engine.steady import plain_draws
from harness.findings.shrink import shrink
from harness.findings.store import fingerprint
from harness.problems.problem import Problem
from harness.problems.profiles import ProfileName
from harness.subjects.domain import Domain
from reports.records import CaseRecord

EPOCH = 1000
"""Cases of one Hypothesis run; then a new seed, since Hypothesis remembers every case of a run."""


@dataclass(frozen=True)
class Search:
    """Draw cases until told to stop."""

    shard: int
    seed: int
    profile: ProfileName
    max_examples: int | None
    steer: bool
    strategy: str
    """`module:function`: profile name -> Hypothesis strategy of problems."""
    domain: Domain | None = None
    """If given, drawn problems are moved inside."""


@dataclass(frozen=True)
class Shrink:
    """Find a smaller case with the same fingerprint."""

    problem_json: str
    fingerprint: str
    seconds: float
    domain: Domain | None = None


@dataclass(frozen=True)
class Case:
    """Asks the main process to judge a case; the answer is a CaseRecord or None (stop)."""

    problem_json: str


@dataclass(frozen=True)
class Finished:
    """The task is done; for a Shrink: the smallest case and how many were tried."""

    problem_json: str | None = None
    tries: int = 0


@dataclass(frozen=True)
class Broken:
    """The driver itself failed."""

    trace: str


class _NoMore(KeyboardInterrupt):
    """Ends a Hypothesis run from inside.

    Hypothesis lets KeyboardInterrupt through, and takes every Exception for a failure of the test.
    """


def derived_seed(run_seed: int, *parts: int | str) -> int:
    """A seed for a part of the run that is independent of the others."""
    text = "/".join(str(part) for part in (run_seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def drive(pipe: Connection) -> None:
    """Main function of the shard process: tasks until None or the end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while (task := pipe.recv()) is not None:
            try:
                pipe.send(_search(task, pipe) if isinstance(task, Search) else _shrink(task, pipe))
            except (EOFError, OSError):
                raise
            except BaseException:
                pipe.send(Broken(traceback.format_exc()))
    except (EOFError, OSError):
        return


def _ask(pipe: Connection, problem: Problem) -> CaseRecord:
    pipe.send(Case(problem.to_json()))
    answer: CaseRecord | None = pipe.recv()
    if answer is None:
        raise _NoMore
    return answer


def _search(task: Search, pipe: Connection) -> Finished:
    module, _, name = task.strategy.partition(":")
    make: Callable[[str], SearchStrategy[Problem]] = getattr(import_module(module), name)
    strategy = make(task.profile)
    if task.domain is not None:
        strategy = strategy.map(task.domain.fit)
    seen: set[str] = set()
    reached = Counts(task.profile)

    def one_case(problem: Problem) -> None:
        if problem.case_id in seen:
            return
        seen.add(problem.case_id)
        record = _ask(pipe, problem)
        event(f"{record.status} by {'+'.join(record.paths) or 'no path'}")
        if task.steer:
            _steer(record, reached)
        reached.add(record.features)

    try:
        for epoch in count():
            before = len(seen)
            run_hypothesis(
                one_case,
                strategy,
                run_seed=derived_seed(task.seed, task.shard, epoch),
                max_examples=min(EPOCH, task.max_examples or EPOCH),
                phases=(Phase.generate, Phase.target) if task.steer else (Phase.generate,),
            )
            if len(seen) == before:
                break
    except _NoMore:
        pass
    return Finished()


def _steer(record: CaseRecord, reached: Counts) -> None:
    """Tell Hypothesis what to climb: margins, and features and pairs of features that this shard has not met."""
    for label, margin in (("margin_out", record.margin_out), ("margin_lse", record.margin_lse)):
        if margin is not None and margin < float("inf"):
            target(margin, label=label)
    target(float(reached.unseen(record.features)), label="unseen_features")


def run_hypothesis(
    test: Callable[[Problem], None],
    strategy: SearchStrategy[Problem],
    *,
    run_seed: int,
    max_examples: int,
    phases: tuple[Phase, ...],
) -> None:
    """One run of Hypothesis without database, deadlines and health checks: cases are expensive by nature.

    The same seed and strategy draw the same cases, whatever modules are loaded (`harness/engine/steady.py`).
    """

    @seed(run_seed)
    @settings(
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        max_examples=max_examples,
        phases=phases,
        verbosity=Verbosity.quiet,
        print_blob=False,
    )
    @given(strategy)
    def run(problem: Problem) -> None:
        test(problem)

    with plain_draws():
        run()


def _shrink(task: Shrink, pipe: Connection) -> Finished:
    def same_fault(problem: Problem) -> bool:
        return fingerprint(_ask(pipe, problem)) == task.fingerprint

    start = Problem.from_json(task.problem_json)
    try:
        result = shrink(start, same_fault, seconds=task.seconds, domain=task.domain)
    except _NoMore:
        return Finished(task.problem_json)
    return Finished(result.problem.to_json(), result.tries)
