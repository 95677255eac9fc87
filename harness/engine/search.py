"""The main process of a run: cases go from the shards to the workers, records from the workers to the book.

For each shard there is a driver process (draws the cases), a slot of the pool (judges them) and a thread here
that goes between the two. All state that they share is in the `Book`. torch is never imported here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.context import ForkServerContext
from pathlib import Path

from harness.engine.book import Book, RunConfig
from harness.engine.context import fork_context
from harness.engine.driver import Broken, Case, Finished, Search, Shrink, drive
from harness.engine.journal import Journal
from harness.engine.pool import MAX_LOG_BYTES, Slot, Stopped, gpu_count
from harness.engine.reproduce import Ran, repeatable, reproduced, smallest
from harness.engine.worker import MUTANT_PREFIX, SubjectRefused, WorkerSpec, mutant_name
from harness.findings.store import Finding, FindingStore, fingerprint
from harness.mutants.mutant import MutantError
from harness.mutants.patch import find_mutant
from harness.problems.features import FEATURES
from harness.problems.problem import Problem
from reports.records import CaseRecord, Status
from reports.runs import RunMeta

JOBS_PER_GPU = 4


class CannotRun(Exception):  # noqa: N818 - the word that the user reads
    """The run cannot start: one line for the user. Nothing has been written."""


def default_jobs() -> int:
    """One worker a core; on GPUs a few for each, so that building and judging cases overlaps with kernels."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    gpus = gpu_count()
    return min(cores, JOBS_PER_GPU * gpus) if gpus else cores


def new_seed() -> int:
    """A seed for a run that was given none; it is printed and stored."""
    return secrets.randbelow(2**32)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    book: Book
    interrupted: bool

    @property
    def exit_code(self) -> int:
        """0 clean, 1 findings, 2 not got through: no case ran, the harness failed, interrupted."""
        book = self.book
        if book.failing:
            return 1
        nothing = book.not_run == book.cases
        return 2 if book.broken or book.harness_errors or self.interrupted or nothing else 0


class Observer:
    """What a display may override; called with the book's lock held, or from the main thread."""

    def starting(self, config: RunConfig) -> None:
        """The workers are being started."""

    def found(self, finding: Finding) -> None:
        """A new fault."""

    def shrunk(self, finding: Finding, tries: int) -> None:
        """A finding was made smaller, or not."""

    def unconfirmed(self, finding: Finding) -> None:
        """A finding does not fail again in a fresh process, neither alone nor after what ran before it."""

    def tick(self, book: Book) -> None:
        """Called a few times a second."""


def run(config: RunConfig, observer: Observer) -> Outcome:
    """Run a search to its end.

    Raises:
        CannotRun: unknown subject, folder not empty, workers that do not start. Nothing was written.
    """
    if config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise CannotRun(f"--out {config.out}: must be a folder that does not exist yet or is empty")
    if config.subject.startswith(MUTANT_PREFIX):
        try:
            find_mutant(mutant_name(config.subject))
        except (MutantError, SubjectRefused) as error:
            raise CannotRun(str(error)) from None
    context = fork_context(config.preload)
    scratch = tempfile.mkdtemp(prefix="mlacheck-")
    gpus = gpu_count()
    slots = [
        Slot(
            WorkerSpec(
                subject=config.subject,
                scratch=scratch,
                gpu=index % gpus if gpus > 1 else None,
                threads=max(1, (os.cpu_count() or 1) // config.jobs) if gpus else 1,
                log=str(Path(scratch) / f"worker-{index}.log"),
                checker=config.checker,
                resolver=config.resolver,
            ),
            config.limits.case_timeout_s,
            context,
        )
        for index in range(config.jobs)
    ]
    try:
        try:
            with ThreadPoolExecutor(config.jobs) as threads:
                try:
                    facts, *_ = threads.map(Slot.prepare, slots)
                except BaseException:
                    _stop(slots)  # leaving the block waits for all of them
                    raise
            domain = slots[0].domain()
        except SubjectRefused as error:
            raise CannotRun(str(error)) from None
        observer.starting(config)
        with Journal(config.out) as journal:
            store = FindingStore(config.out / "findings", facts)
            book = Book(config, journal, store, domain, searching=config.jobs)
            meta = RunMeta(
                subject=config.subject,
                profile=config.profile,
                seed=config.seed,
                jobs=config.jobs,
                facts=facts,
                features=list(FEATURES),
                started=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            meta.write(config.out)
            interrupted = _search(book, slots, context, observer)
            store.close()
            book.reached.coverage().write(config.out)
            ended = {"search_seconds": book.search_seconds, "interrupted": interrupted}
            meta.model_copy(update=ended).write(config.out)
        return Outcome(config.out, book, interrupted)
    finally:
        _stop(slots)
        if (config.out / "run.json").exists():
            _keep_logs(Path(scratch), config.out / "workers.log")
        shutil.rmtree(scratch, ignore_errors=True)


def _stop(slots: list[Slot]) -> None:
    """All at once: a worker that does not listen takes seconds."""
    with ThreadPoolExecutor(len(slots)) as threads:
        list(threads.map(Slot.stop, slots))


def _keep_logs(scratch: Path, target: Path) -> None:
    """What the workers printed, each one's last part, in one file of the run; none if they were silent."""
    texts = [path.read_bytes()[-MAX_LOG_BYTES:] for path in sorted(scratch.glob("worker-*.log"))]
    if any(texts):
        target.write_bytes(b"\n".join(text for text in texts if text))


@dataclass
class Shard:
    """One driver process, one slot of the pool, and the thread that goes between them."""

    index: int
    slot: Slot
    book: Book
    observer: Observer
    context: ForkServerContext

    def __post_init__(self) -> None:
        self._ran = Ran()
        self._pipe, theirs = self.context.Pipe()
        self._process = self.context.Process(target=drive, args=(theirs,), name=f"shard-{self.index}", daemon=True)
        self._process.start()
        theirs.close()
        self.thread = threading.Thread(target=self._serve, name=f"shard-{self.index}", daemon=True)

    def _serve(self) -> None:
        config, book = self.book.config, self.book
        search = Search(
            shard=self.index,
            seed=config.seed,
            profile=config.profile,
            max_examples=config.limits.max_examples,
            steer=config.limits.steer,
            strategy=config.strategy,
            domain=book.domain,
        )
        try:
            try:
                self._task(search, self._judge)
            finally:
                book.search_ends()
            while (work := book.next_to_shrink()) is not None:
                self._shrink(*work)
        except Stopped:
            pass
        except (EOFError, OSError):
            book.breaks(f"shard {self.index}: the driver process ended unexpectedly")
        except BaseException:  # nobody else would notice that this thread ended
            book.breaks(traceback.format_exc())

    def _task(self, task: Search | Shrink, judge: Callable[[str], CaseRecord | None]) -> Finished | None:
        """Give the driver a task and answer its questions until it is done; None if it failed."""
        self._pipe.send(task)
        while True:
            message = self._pipe.recv()
            if isinstance(message, Case):
                self._pipe.send(judge(message.problem_json))
            elif isinstance(message, Broken):
                self.book.breaks(message.trace)
                return None
            else:
                assert isinstance(message, Finished)
                return message

    def _run(self, problem_json: str, timeout_s: float | None = None) -> CaseRecord:
        with self.book.lock:
            self.book.journal.launch(self.index, self.slot.spec.subject, problem_json)
        return self.slot.run(problem_json, timeout_s)

    def _judge(self, problem_json: str) -> CaseRecord | None:
        if not self.book.take(self.index):
            return None
        record = self._run(problem_json)
        with self.book.lock:
            finding = self.book.add(record, problem_json)
            self.book.journal.landed(self.index)
            if finding is not None:
                finding.before = self._ran.problems()
                self.observer.found(finding)
        if record.status in (Status.CRASH, Status.HANG):
            self._ran.clear()
        else:
            self._ran.add(problem_json)
        return record

    def _shrink(self, finding: Finding, seconds: float) -> None:
        judged: dict[str, CaseRecord] = {}
        goal, end = fingerprint(finding.record), time.monotonic() + seconds
        tries = 0

        def is_goal(record: CaseRecord | None) -> bool:
            return record is not None and fingerprint(record) == goal

        def judge(problem_json: str) -> CaseRecord | None:
            if self.book.stopping:
                return None
            record = self._run(problem_json, min(self.slot.timeout_s, seconds))
            with self.book.lock:
                self.book.journal.landed(self.index)
            judged[record.case_id] = record
            return record

        def judge_alone(problem_json: str) -> CaseRecord | None:
            self.slot.renew()
            return judge(problem_json)

        def fails_after(calls: Sequence[Problem], problem: Problem) -> bool:
            if time.monotonic() > end:
                return False
            self.slot.renew()
            for call in calls:
                judge(call.to_json())
            return is_goal(judge(problem.to_json()))

        def fails_alone(problem: Problem) -> bool:
            return fails_after([], problem)

        def shrink(fresh: bool, time_s: float) -> Problem | None:
            nonlocal tries
            task = Shrink(start.to_json(), goal, time_s, self.book.domain)
            result = self._task(task, judge_alone if fresh else judge)
            if result is None or result.problem_json is None:
                return None
            tries += result.tries
            return Problem.from_json(result.problem_json)

        start = finding.problem
        if repeatable(finding.record):
            again = reproduced(finding.problem, finding.before, fails_after)
            if again is None:
                self.observer.unconfirmed(finding)
                return
            start = again
        end = time.monotonic() + seconds
        if start.case_id == finding.problem.case_id:
            problem = smallest(start, shrink, fails_alone, seconds=seconds)
        else:
            problem = shrink(True, seconds)
        if problem is None:
            return
        with self.book.lock:
            if problem.case_id in judged:
                self.book.store.shrunk(finding, judged[problem.case_id], problem)
            self.observer.shrunk(finding, tries)

    def stop(self) -> None:
        """End the driver process."""
        with contextlib.suppress(OSError):
            self._pipe.close()
        self._process.terminate()
        self._process.join(5)


def _search(book: Book, slots: list[Slot], context: ForkServerContext, observer: Observer) -> bool:
    """Start the shards and wait for them; True if the user interrupted."""
    shards = [Shard(index, slot, book, observer, context) for index, slot in enumerate(slots)]
    try:
        for shard in shards:
            shard.thread.start()
        while any(shard.thread.is_alive() for shard in shards):
            observer.tick(book)
            time.sleep(0.1)
        observer.tick(book)
        return False
    except KeyboardInterrupt:
        book.stopping = True
        return True
    finally:
        _stop(slots)
        for shard in shards:
            shard.stop()
            shard.thread.join(5)
