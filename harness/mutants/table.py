"""The kill table: every mutant against the same cases, each in a process of its own.

For each mutant, in this order: its forced-fail variant must fail on some case (`forced_fail.py`), or the mutant is
`unreached`; then cases run until the first finding. A finding counts only if our own layer passes that very case;
a case that it fails is a fault of ours or of the harness, so that a table with such a case is not to be trusted.
What meets all cases without a finding has survived, which is right for a mutant that carries a proof of equivalence
and a hole in the harness otherwise.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from multiprocessing.context import ForkServerContext
from pathlib import Path
from statistics import median
from typing import Literal

from harness.engine.context import fork_context
from harness.engine.pool import Slot, gpu_count
from harness.engine.worker import MUTANT_PREFIX, SubjectRefused, WorkerSpec
from harness.findings.shrink import shrink
from harness.findings.store import fingerprint
from harness.mutants.forced_fail import REACHED
from harness.mutants.mutant import Mutant
from harness.mutants.patch import FORCED
from harness.problems.problem import Problem
from harness.subjects.domain import Domain
from reports.records import CaseRecord, Status

Verdict = Literal["killed", "survived", "unreached", "broken"]
"""`broken`: it cannot be loaded, or the harness failed on it."""
STREAMS = 2
GIVEN_UP = "the table was given up"
PATIENCE = 4
"""A time-out that no planted hang explains may be the machine's fault: the case gets so many times as long."""


class TableError(Exception):
    """There can be no table: one line for the user."""


@dataclass(frozen=True)
class TableConfig:
    """What one table is made with."""

    attention: str
    jobs: int
    case_timeout_s: float
    shrink_s: float
    """Seconds to make each killing case smaller; 0: not at all."""


@dataclass(frozen=True)
class Row:
    """What became of one mutant."""

    mutant: Mutant
    verdict: Verdict
    by: str | None = None
    """The first check that accused, or the status where there is none (CRASH, HANG)."""
    named: str | None = None
    """The stage that the judge named."""
    cases: int = 0
    """Cases judged, the killing one included."""
    seconds: float = 0.0
    """From the start of its process to the end; shrinking and the forced fail are not in it."""
    message: str = ""
    case_id: str | None = None
    size: dict[str, int] | None = None
    """Requests, query tokens and keys of the shrunk case."""

    @property
    def localized(self) -> bool:
        """The judge named the right stage; of a crash or hang that leaves no stack: the right kind."""
        mutant = self.mutant
        if self.verdict != "killed":
            return False
        if self.named is None:
            return self.by == mutant.detector
        return self.named in (mutant.stage, *mutant.also)


def choose(
    mutants: Sequence[Mutant], patterns: Sequence[str], sample: int | None, seed: int, attention: str, *, cuda: bool
) -> tuple[list[Mutant], list[Mutant]]:
    """`(to run, not applicable)`: those that match any pattern (all without one), then `sample` of them at random.

    Raises TableError for a pattern that matches nothing, and if nothing is left to run.
    """
    for pattern in patterns:
        if not any(fnmatchcase(mutant.name, pattern) for mutant in mutants):
            raise TableError(f"--only {pattern}: no mutant is called so; `mlacheck list mutants` names them")
    wanted = [m for m in mutants if not patterns or any(fnmatchcase(m.name, p) for p in patterns)]
    usable = [m for m in wanted if m.applies(attention, cuda=cuda)]
    skipped = [m for m in wanted if not m.applies(attention, cuda=cuda)]
    if not usable:
        raise TableError(f"none of the {len(wanted)} mutants applies with attention {attention!r} on this machine")
    if sample is not None and sample < len(usable):
        real = [m.name for m in usable if not m.equivalent]
        names = set(random.Random(seed).sample(real, min(sample, len(real))))
        usable = [m for m in usable if m.name in names]
    return usable, skipped


@dataclass
class Table:
    """Runs mutants side by side."""

    config: TableConfig
    streams: Callable[[int], Sequence[Problem]]
    """Number of a stream of cases (below STREAMS) -> its cases; the second is for what survives the first."""
    context: ForkServerContext = field(default_factory=fork_context)

    def __post_init__(self) -> None:
        self._scratch = tempfile.mkdtemp(prefix="mlacheck-")
        self._control = self._slot(f"ours[{self.config.attention}]", "control")
        self._clean: dict[str, bool] = {}
        self._domain: Domain | None = None
        self.unsound: list[CaseRecord] = []
        """What our own layer came to in cases that it fails."""
        self._lock, self._drawing = threading.Lock(), threading.Lock()
        self._stopped = False

    def run(self, mutants: Sequence[Mutant], report: Callable[[Row], None]) -> list[Row]:
        """A row for each mutant, in their order; `report` gets each when it is known.

        Raises:
            TableError: our own layer cannot run here.
        """
        try:
            self._require_runnable()
            with ThreadPoolExecutor(self.config.jobs) as threads:
                try:
                    return list(threads.map(lambda mutant: self._reported(mutant, report), mutants))
                except BaseException:
                    self._stopped = True  # leaving the block waits for what is queued
                    raise
        except SubjectRefused as error:
            raise TableError(str(error)) from None
        finally:
            self._control.stop()
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _require_runnable(self) -> None:
        self._control.prepare()
        self._domain = self._control.domain()
        for problem in self._legal(self.streams(0)[:1]):
            record = self._control.run(problem.to_json(), PATIENCE * self.config.case_timeout_s)
            if record.status is Status.NOT_RUN:
                raise TableError(record.message)

    def _reported(self, mutant: Mutant, report: Callable[[Row], None]) -> Row:
        if self._stopped:
            return Row(mutant, "broken", message=GIVEN_UP)
        try:
            row = self._one(mutant)
        except BaseException:
            self._stopped = True  # the others would run to their end
            raise
        with self._lock:
            report(row)
        return row

    def _slot(self, subject: str, name: str) -> Slot:
        spec = WorkerSpec(subject=subject, scratch=self._scratch, log=str(Path(self._scratch) / f"{name}.log"))
        return Slot(spec, self.config.case_timeout_s, self.context)

    def _subject(self, name: str) -> str:
        return f"{MUTANT_PREFIX}{name}" + ("@fa4" if self.config.attention == "fa4" else "")

    def _one(self, mutant: Mutant) -> Row:
        try:
            if not self._reached(mutant):
                return Row(mutant, "unreached", message="no case runs the changed code")
            return self._judge(mutant)
        except SubjectRefused as error:
            return Row(mutant, "broken", message=str(error))

    def _reached(self, mutant: Mutant) -> bool:
        slot = self._slot(self._subject(mutant.name + FORCED), f"{mutant.name}-forced")
        try:
            slot.prepare()
            text = f"{REACHED} {mutant.name}"
            return any(text in slot.run(problem.to_json()).message for problem in self._cases())
        finally:
            slot.stop()

    def _cases(self, streams: int = STREAMS) -> Iterator[Problem]:
        """The first stream, and the second for what outlives it; both end when the table is given up."""
        for index in range(streams):
            with self._drawing:
                cases = self.streams(index)
            for problem in self._legal(cases):
                if self._stopped:
                    return
                yield problem

    def _legal(self, cases: Sequence[Problem]) -> Iterator[Problem]:
        """The cases, moved into what the layer under test takes (`harness/subjects/domain.py`)."""
        return iter(cases) if self._domain is None else map(self._domain.fit, cases)

    def _judge(self, mutant: Mutant) -> Row:
        started = time.monotonic()
        slot = self._slot(self._subject(mutant.name), mutant.name)
        try:
            slot.prepare()
            count = 0
            for count, problem in enumerate(self._cases(1 if mutant.equivalent else STREAMS), 1):
                record = self._run(slot, mutant, problem)
                if record.status is Status.NOT_RUN:
                    return Row(mutant, "broken", cases=count, message=record.message, case_id=record.case_id)
                if record.status.is_finding and self._is_clean(problem):
                    seconds = time.monotonic() - started
                    return self._killed(slot, mutant, problem, record, count, seconds)
            if self._stopped:
                return Row(mutant, "broken", cases=count, message=GIVEN_UP)
            return Row(mutant, "survived", cases=count, seconds=time.monotonic() - started)
        finally:
            slot.stop()

    def _run(self, slot: Slot, mutant: Mutant, problem: Problem) -> CaseRecord:
        record = slot.run(problem.to_json())
        if record.status is Status.HANG and mutant.detector != Status.HANG:
            record = slot.run(problem.to_json(), PATIENCE * self.config.case_timeout_s)
        return record

    def _is_clean(self, problem: Problem) -> bool:
        """Our own layer passes this case. One that it fails proves nothing, and is remembered in `unsound`."""
        with self._lock:
            if problem.case_id not in self._clean:
                limit = PATIENCE * self.config.case_timeout_s
                record = self._control.run(problem.to_json(), limit)
                self._clean[problem.case_id] = not record.status.is_finding and record.status is not Status.NOT_RUN
                if not self._clean[problem.case_id]:
                    self.unsound.append(record)
            return self._clean[problem.case_id]

    def _killed(
        self, slot: Slot, mutant: Mutant, problem: Problem, record: CaseRecord, count: int, seconds: float
    ) -> Row:
        first = next((check for check in record.checks if check.status.is_finding), None)
        size = None
        if self.config.shrink_s:
            goal = fingerprint(record)
            small = shrink(
                problem,
                lambda candidate: fingerprint(slot.run(candidate.to_json())) == goal,
                seconds=self.config.shrink_s,
                domain=self._domain,
            ).problem
            size = {
                "requests": len(small.requests),
                "query_tokens": small.num_tokens,
                "keys": sum(small.seq_lens),
            }
        return Row(
            mutant,
            "killed",
            by=first.check if first is not None else record.status.value,
            named=record.stage,
            cases=count,
            seconds=seconds,
            message=record.message,
            case_id=record.case_id,
            size=size,
        )


def summary(rows: Sequence[Row]) -> dict[str, float | int | None]:
    """Figures over the real faults; mutants with a proof of equivalence are counted apart."""
    real = [row for row in rows if not row.mutant.equivalent]
    killed = [row for row in real if row.verdict == "killed"]
    sizes = [row.size for row in killed if row.size is not None]
    return {
        "mutants": len(real),
        "killed": len(killed),
        "kill_rate": round(len(killed) / len(real), 4) if real else None,
        "median_cases": median(row.cases for row in killed) if killed else None,
        "localized": sum(row.localized for row in killed),
        "localized_rate": round(sum(row.localized for row in killed) / len(killed), 4) if killed else None,
        "equivalent": len(rows) - len(real),
        **{
            f"median_{name}": median(size[name] for size in sizes)
            for name in ("requests", "query_tokens", "keys")
            if sizes
        },
    }


def all_right(rows: Sequence[Row]) -> bool:
    """Every real fault was killed, and no claim of equivalence was refuted."""
    return all(row.verdict == ("survived" if row.mutant.equivalent else "killed") for row in rows)


def has_cuda() -> bool:
    """Whether kernels are compiled for a GPU here, found without loading CUDA."""
    return gpu_count() > 0
