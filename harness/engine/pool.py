"""The local pool: one worker process a slot, each case under a time-out.

Workers are forked from a server process that has imported torch and Triton but never touched the device or
`optimized`, so replacing a dead worker costs a fraction of a second. What a worker does to itself is a
verdict: a death is CRASH (OOM if the kernel's killer struck meanwhile), a ruined GPU is CRASH too, silence past the
time-out is HANG, unless the worker mostly waited for a core: then it gets more time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from harness.checks.blame import frame_of_dump, stage_of_dump
from harness.engine.context import EXITED_WITH_0
from harness.engine.core_time import CoreWait
from harness.engine.device_fault import DeviceLost
from harness.engine.worker import HARNESS_STAGE, SubjectRefused, WorkerSpec, bare_record, domain_of, prepare, run_case
from harness.problems.problem import Problem
from harness.subjects.domain import Domain
from reports.records import CaseRecord, Status

CASES_PER_WORKER = 2000
"""A worker is replaced after so many cases, which bounds whatever leaks in it."""
MAX_LOG_BYTES = 2**20
"""Of what a worker prints, so much is kept."""
ENOUGH = 0.8
"""A worker that had this part of its time, and gave no answer, hangs."""
MOST_TRIES = 4
"""So often a case is run whose worker waited for a core, each time with more time."""
LOOKS = 8
"""How often in its time the worker is looked at."""
START_TIMEOUT_S = 300.0
"""Loading a subject may import and compile much; longer than this is a failure to start."""


class Stopped(Exception):  # noqa: N818 - not an error
    """The pool was stopped while the case ran."""


def gpu_count() -> int:
    """Number of NVIDIA GPUs that this process may use, found without loading CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])


@dataclass
class Slot:
    """One worker and its replacements. One thread drives a slot; any other may stop it."""

    spec: WorkerSpec
    timeout_s: float
    context: ForkServerContext

    def __post_init__(self) -> None:
        self._pool = self._new_pool()
        self._stopped = False
        self._lock = threading.Lock()
        self._running: Future[Any] | None = None

    def _new_pool(self) -> Any:
        self._cases = 0
        return ProcessPool(max_workers=1, context=self.context)

    def prepare(self) -> dict[str, str]:
        """Load the subject in the worker; returns versions and device.

        Raises:
            SubjectRefused: unknown subject, or it cannot be loaded here.
        """
        facts: dict[str, str] = self._load(prepare)
        return facts

    def _load(self, function: Callable[..., Any]) -> Any:
        try:
            return self._call(function, START_TIMEOUT_S)
        except TimeoutError:
            raise SubjectRefused(f"{self.spec.subject}: not loaded after {START_TIMEOUT_S:.0f} s") from None
        except (ProcessExpired, BrokenProcessPool) as error:
            how = _how_it_ended(getattr(error, "exitcode", None))
            raise SubjectRefused(f"{self.spec.subject}: the worker {how} while loading it") from None

    def _call(
        self,
        function: Callable[..., Any],
        timeout_s: float,
        *args: object,
        wait: CoreWait | None = None,
        spec: WorkerSpec | None = None,
    ) -> Any:
        """Run in the worker. The clock of `timeout_s` starts there; a worker that never starts is bounded too."""
        running = self._pool.schedule(function, args=(spec or self.spec, *args), timeout=timeout_s)
        self._running = running
        if self._stopped:
            running.cancel()
        ends = time.monotonic() + timeout_s + START_TIMEOUT_S
        while wait is not None and time.monotonic() < ends:
            try:
                return running.result(timeout_s / LOOKS)
            except TimeoutError:
                if running.done():
                    break
                wait.look()
        return running.result(max(ends - time.monotonic(), 0.0))

    def renew(self) -> None:
        """Put a new process in the place of the worker. Raises Stopped."""
        with self._lock:
            if self._stopped:
                raise Stopped
            self._pool.stop()
            self._pool.join()
            self._pool = self._new_pool()

    def domain(self) -> Domain | None:
        """The problems that are legal for the subject; None: all are. Raises SubjectRefused."""
        found: Domain | None = self._load(domain_of)
        return found

    def run(self, problem_json: str, timeout_s: float | None = None) -> CaseRecord:
        """Judge one case; a time-out of its own may be given.

        The time-out counts what the worker had: if others had the cores meanwhile, the case is run again with more
        time, and is NOT_RUN where that does not help.

        Raises:
            Stopped: `stop` was called meanwhile.
        """
        limit = given = timeout_s or self.timeout_s
        if self._cases >= CASES_PER_WORKER:
            self.renew()
        self._cases += 1
        for _ in range(MOST_TRIES):
            wait = CoreWait(self.spec.log)
            record = self._run(problem_json, given, limit, wait)
            had = given - min(wait.seconds, given)
            if record.status is not Status.HANG or had >= ENOUGH * limit:
                return record
            tried = f"{had:.0f} of {given:.0f} s"
            given *= 1.2 * limit / max(had, 0.1 * given)
        busy = f"no answer, but the worker had a core for no more than {tried}: the machine is too busy to tell"
        return self._bare(problem_json, Status.NOT_RUN, busy, stage=HARNESS_STAGE)

    def _run(self, problem_json: str, given: float, limit: float, wait: CoreWait) -> CaseRecord:
        """One try of `given` seconds; `limit` is what they amount to with a core, and what a message names."""
        kills, logged = oom_kills(), self._log_size()
        for last_try in (False, True):
            try:
                return CaseRecord.model_validate(self._call(run_case, given, problem_json, given, wait=wait))
            except TimeoutError:
                return self._stuck(problem_json, limit, self._stack(logged))
            except ProcessExpired as error:
                return self._died(problem_json, error.exitcode, kills, logged)
            except DeviceLost as lost:
                return self._ruined(problem_json, given, lost)
            except CancelledError:
                raise Stopped from None
            except (BrokenProcessPool, RuntimeError):
                # Pebble gives up the pool when a worker dies before its start of the task was seen. That may
                # have been an idle worker that was killed: one more try tells whether the case is to blame.
                with self._lock:
                    if self._stopped:
                        raise Stopped from None
                    self._pool.stop()
                    self._pool = self._new_pool()
                if last_try:
                    return self._died(problem_json, None, kills, logged)
        raise AssertionError("unreachable")

    def _stuck(self, problem_json: str, limit: float, stack: str) -> CaseRecord:
        message = f"no answer in {limit:g} s{_at(stack)}"
        return self._bare(problem_json, Status.HANG, message, stage=stage_of_dump(stack), seconds=limit)

    def _died(self, problem_json: str, exitcode: int | None, kills: int, logged: int) -> CaseRecord:
        if oom_kills() > kills:
            return self._bare(problem_json, Status.OOM, "the worker was killed for memory")
        stack = self._stack(logged)
        message = f"the worker {_how_it_ended(exitcode)}{_at(stack)}"
        return self._bare(problem_json, Status.CRASH, message, stage=stage_of_dump(stack))

    def _ruined(self, problem_json: str, given: float, lost: DeviceLost) -> CaseRecord:
        """CRASH of a device that no longer answers; a second run, whose launches wait, tells which stage did it."""
        self.renew()
        blocking = replace(self.spec, blocking=True)
        stage, frame = None, ""
        try:
            with suppress(TimeoutError, ProcessExpired, BrokenProcessPool, RuntimeError):  # a crash all the same
                self._call(run_case, given, problem_json, given, spec=blocking)
        except DeviceLost as again:
            stage, frame = again.stage, again.frame
        except CancelledError:
            raise Stopped from None
        self.renew()
        message = f"the GPU stopped: {lost.fault}" + (f" in {frame}" if frame else "")
        return self._bare(problem_json, Status.CRASH, message, stage=stage)

    def _log_size(self) -> int:
        try:
            return os.stat(self.spec.log).st_size if self.spec.log else 0
        except OSError:
            return 0

    def _stack(self, logged: int) -> str:
        """What the worker has printed since its log had this size: Python's fault handler prints where it was."""
        if not self.spec.log or self._log_size() <= logged:
            return ""
        with open(self.spec.log, "rb") as log:
            log.seek(logged)
            return log.read(MAX_LOG_BYTES).decode(errors="replace")

    def _bare(
        self, problem_json: str, status: Status, message: str, *, stage: str | None = None, seconds: float = 0.0
    ) -> CaseRecord:
        problem = Problem.from_json(problem_json)
        return bare_record(problem, self.spec.subject, status, message, stage=stage, seconds=seconds)

    def stop(self) -> None:
        """End the worker now; a case that runs is abandoned."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._pool.stop()
            if self._running is not None:
                # A task that no worker has taken yet is forgotten by a stopped pool: nobody else ends the wait.
                self._running.cancel()
            self._pool.join()


def _at(stack: str) -> str:
    frame = frame_of_dump(stack)
    return f" in {frame}" if frame else ""


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is None:
        return "died"
    if exitcode < 0:
        try:
            return f"was killed by {signal.Signals(-exitcode).name}"
        except ValueError:
            return f"was killed by signal {-exitcode}"
    return f"exited with code {0 if exitcode == EXITED_WITH_0 else exitcode}"


def oom_kills() -> int:
    """How often the kernel has killed for memory so far, in this control group and on this machine."""
    total = 0
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return total
