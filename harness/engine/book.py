"""What the shards of a run share: configuration, counts, journal and findings, all under one lock."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from harness.engine.context import PRELOAD
from harness.engine.coverage import Counts
from harness.engine.journal import Journal
from harness.engine.limits import Limits
from harness.engine.worker import HARNESS_STAGE, WorkerSpec
from harness.findings.store import Finding, FindingStore
from harness.problems.problem import Problem
from harness.problems.profiles import ProfileName
from harness.subjects.domain import Domain
from reports.records import CaseRecord, Status

SHRINK_ROUNDS = 4
"""All findings of a run together may take this many times the shrinking time of one."""


@dataclass(frozen=True)
class RunConfig:
    """What to run. The defaults of the last three are the real ones; tests of the engine put fakes there."""

    subject: str
    profile: ProfileName
    limits: Limits
    out: Path
    seed: int
    jobs: int
    exit_first: bool = False
    """Draw no further case after the first finding."""
    shrink_s: float = 30.0
    """Per finding; 0: findings are kept as they were found."""
    checker: str = WorkerSpec.checker
    resolver: str = WorkerSpec.resolver
    strategy: str = "harness.problems.strategies:cases"
    preload: tuple[str, ...] = PRELOAD

    def share(self, shard: int) -> int | None:
        """Cases of one shard; None: no limit. Who judges how many is fixed, so that a seed means the same cases."""
        limit = self.limits.max_examples
        return None if limit is None else limit // self.jobs + (shard < limit % self.jobs)


@dataclass
class Book:
    """What the shards share, and what the progress display shows."""

    config: RunConfig
    journal: Journal
    store: FindingStore
    domain: Domain | None = None
    """The problems that are legal for the subject; None: all are."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    cases: int = 0
    taken: Counter[int] = field(default_factory=Counter)
    """Cases that each shard has begun."""
    failing: int = 0
    not_run: int = 0
    harness_errors: int = 0
    worst_out: float = 0.0
    worst_lse: float = 0.0
    power: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    """Sum and number of cases, for each fault class."""
    paths: Counter[str] = field(default_factory=Counter)
    reached: Counts = field(init=False)
    """Features and pairs of features."""
    searching: int = 0
    """Shards that still draw cases."""
    to_shrink: list[Finding] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    search_ended: float | None = None
    shrink_deadline: float | None = None
    stopping: bool = False

    def __post_init__(self) -> None:
        self.reached = Counts(self.config.profile)

    @property
    def search_seconds(self) -> float:
        """From the first case until the last."""
        return (self.search_ended or time.monotonic()) - self.started

    def take(self, shard: int) -> bool:
        """Whether a shard may start one more case; counts it."""
        share, most_time = self.config.share(shard), self.config.limits.max_time_s
        with self.lock:
            over = self.stopping or (share is not None and self.taken[shard] >= share)
            over = over or (self.config.exit_first and self.failing > 0)
            if over or (most_time is not None and self.search_seconds > most_time):
                return False
            self.taken[shard] += 1
            return True

    def add(self, record: CaseRecord, problem_json: str) -> Finding | None:
        """Enter a judged case into journal, counts and findings; returns a finding that is new."""
        with self.lock:
            self.cases += 1
            self.not_run += record.status is Status.NOT_RUN
            self.harness_errors += record.stage == HARNESS_STAGE
            self.paths.update(record.paths)
            self.reached.add(record.features)
            for name, value in record.power.items():
                self.power[name][0] += value
                self.power[name][1] += 1
            worse = (record.margin_out or 0.0) > self.worst_out or (record.margin_lse or 0.0) > self.worst_lse
            self.worst_out = max(self.worst_out, record.margin_out or 0.0)
            self.worst_lse = max(self.worst_lse, record.margin_lse or 0.0)
            if record.status is not Status.PASS or worse:
                record = record.model_copy(update={"problem": Problem.from_json(problem_json).model_dump(mode="json")})
            self.journal.append(record)
            if not record.status.is_finding:
                return None
            self.failing += 1
            finding = self.store.add(record, Problem.from_json(problem_json))
            if finding is not None and self.config.shrink_s > 0:
                self.to_shrink.append(finding)
            return finding

    def next_to_shrink(self) -> tuple[Finding, float] | None:
        """A finding to shrink and the seconds it may take; None if there is none or no time."""
        with self.lock:
            now = time.monotonic()
            if self.shrink_deadline is None:
                self.shrink_deadline = now + SHRINK_ROUNDS * self.config.shrink_s
            seconds = min(self.config.shrink_s, self.shrink_deadline - now)
            if self.stopping or not self.to_shrink or seconds <= 0:
                return None
            return self.to_shrink.pop(0), seconds

    def search_ends(self) -> None:
        """A shard has judged its last drawn case; the last shard stops the clock."""
        with self.lock:
            self.searching -= 1
            if self.searching == 0:
                self.search_ended = time.monotonic()

    def breaks(self, trace: str) -> None:
        """The harness failed: the run goes to its end without this shard and exits with 2."""
        with self.lock:
            self.broken.append(trace)
