"""Is a worker that had no core accused of a hang, and is an exit code ever lost?"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engine import pool
from harness.engine.context import PRELOAD, fork_context
from harness.engine.core_time import CoreWait, pid_file, waited_for_core
from harness.engine.pool import Slot
from harness.engine.worker import HARNESS_STAGE, WorkerSpec
from reports.records import Status
from tests.harness import engine_fakes

HANGS, SLOW = 2, 8
BURN = "import time\nt = time.process_time()\nwhile time.process_time() - t < 1: pass"


class Waits:
    """In place of CoreWait: what the worker is said to have waited in each try, in parts of its time."""

    tries: list[float]

    def __init__(self, log: str | None) -> None:
        self.part = Waits.tries.pop(0)
        self.seconds = 0.0

    def look(self) -> None:
        self.seconds = self.part


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    checker, resolver = "tests.harness.engine_fakes:misbehaving", "tests.harness.engine_fakes:resolve"
    log = str(tmp_path / "log")
    spec = WorkerSpec(subject="fake", scratch=str(tmp_path), log=log, checker=checker, resolver=resolver)
    slot = Slot(spec, 1.0, fork_context(PRELOAD))
    yield slot
    slot.stop()


def _case(tokens: int) -> str:
    return engine_fakes.problem((0, tokens)).to_json()


def test_gets_a_case_whose_worker_had_no_core_more_time(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    Waits.tries = [0.5, 0.0]
    monkeypatch.setattr(pool, "CoreWait", Waits)
    assert slot.run(_case(SLOW)).status is Status.PASS
    assert Waits.tries == []


@pytest.mark.parametrize("waits", [[0.0], [0.1], [0.6, 0.0]])
def test_is_a_hang_still_one(slot: Slot, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    Waits.tries = list(waits)
    monkeypatch.setattr(pool, "CoreWait", Waits)
    record = slot.run(_case(HANGS))
    assert (record.status, Waits.tries) == (Status.HANG, [])
    assert record.message.startswith("no answer in ")


def test_is_a_machine_without_time_no_verdict(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    Waits.tries = [1.0, 9.0, 9.0, 9.0]
    monkeypatch.setattr(pool, "CoreWait", Waits)
    slot.timeout_s = 0.2
    record = slot.run(_case(HANGS))
    assert (record.status, record.stage) == (Status.NOT_RUN, HARNESS_STAGE)
    assert "the machine is too busy to tell" in record.message


def test_does_the_worker_say_who_it_is(slot: Slot) -> None:
    slot.prepare()
    assert slot.spec.log is not None
    pid = int(pid_file(slot.spec.log).read_text())
    assert pid != os.getpid()
    assert Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(waited_for_core(os.getpid()) is None, reason="this system does not say how long a process waited")
def test_is_the_wait_for_a_core_seen(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    rivals = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        pid_file(log).write_text(str(rivals[0].pid))
        wait, began = CoreWait(log), time.monotonic()
        seen = []
        while rivals[0].poll() is None and time.monotonic() - began < 60:
            wait.look()
            seen.append(wait.seconds)
            time.sleep(0.02)
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert seen == sorted(seen)
    assert 0.3 < wait.seconds < time.monotonic() - began


def test_is_an_unknown_worker_said_to_have_waited(tmp_path: Path) -> None:
    for log in (None, str(tmp_path / "none"), str(tmp_path / "dead"), str(tmp_path / "odd")):
        if log is not None and log.endswith(("dead", "odd")):
            pid_file(log).write_text("nobody" if log.endswith("odd") else "4194999")
        wait = CoreWait(log)
        wait.look()
        assert wait.seconds == 0.0


def test_is_no_exit_code_lost_between_threads() -> None:
    context = fork_context(PRELOAD)
    for _ in range(10):
        process = context.Process(target=os._exit, args=(3,))
        process.start()
        seen: list[int | None] = []

        def watch(process: object = process, seen: list[int | None] = seen) -> None:
            ends = time.monotonic() + 20
            code = None
            while code is None and time.monotonic() < ends:
                code = process._popen.poll()  # type: ignore[attr-defined]
            seen.append(code)

        threads = [threading.Thread(target=watch) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [3] * 6
