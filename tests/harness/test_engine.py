"""Does the engine survive what subjects do, count rightly, and stop when it should?"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engine import pool
from harness.engine.book import RunConfig
from harness.engine.context import fork_context
from harness.engine.core_time import pid_file
from harness.engine.limits import LIMITS, Limits
from harness.engine.pool import Slot, Stopped, gpu_count
from harness.engine.search import CannotRun, Observer, Outcome, run
from harness.engine.worker import HARNESS_STAGE, SubjectRefused, WorkerSpec
from harness.findings.store import Finding, load_case
from reports.records import Status
from reports.runs import read_meta, read_rows
from tests.harness import engine_fakes

ILLEGAL = "CUDA error: an illegal memory access was encountered"
PRELOAD = ("hypothesis", "harness.engine.worker")


def config(out: Path, checker: str = "good", **changes: object) -> RunConfig:
    base = RunConfig(
        subject="fake",
        profile="quick",
        limits=Limits(max_examples=40, max_time_s=60.0, case_timeout_s=20.0),
        out=out,
        seed=1,
        jobs=2,
        shrink_s=0.0,
        checker=f"tests.harness.engine_fakes:{checker}",
        resolver="tests.harness.engine_fakes:resolve",
        strategy="tests.harness.engine_fakes:cases",
        preload=PRELOAD,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def run_quietly(settings: RunConfig) -> Outcome:
    return run(settings, Observer())


@pytest.fixture
def slot(tmp_path: Path):
    spec = WorkerSpec(
        subject="fake",
        scratch=str(tmp_path),
        log=str(tmp_path / "log"),
        checker="tests.harness.engine_fakes:misbehaving",
        resolver="tests.harness.engine_fakes:resolve",
    )
    slot = Slot(spec, 1.0, fork_context(PRELOAD))
    yield slot
    slot.stop()


def case_of(tokens: int) -> str:
    return engine_fakes.problem((0, tokens)).to_json()


@pytest.mark.parametrize(
    ("tokens", "status", "message"),
    [
        (1, Status.CRASH, "SIGSEGV"),
        (2, Status.HANG, "no answer in 1 s"),
        (3, Status.OOM, "7 GiB"),
        (4, Status.NOT_RUN, "ZeroDivisionError: a bug of the judge (at engine_fakes.py"),
        (5, Status.CRASH, "raised SystemExit(enough)"),
        (6, Status.PASS, ""),
        (9, Status.CRASH, "raised KeyboardInterrupt()"),
        (10, Status.CRASH, "raised GeneratorExit(stop)"),
        (11, Status.CRASH, "raised Skipped(not today)"),
        (12, Status.CRASH, "exited with code 0"),
        (13, Status.PASS, ""),
        *((n, Status.CRASH, f"the GPU stopped: {ILLEGAL} in merge.py:2 launch") for n in (15, 16, 17, 18)),
        (19, Status.PASS, ""),
    ],
)
def test_is_whatever_a_case_does_to_its_worker_a_verdict(slot: Slot, tokens: int, status: Status, message: str) -> None:
    record = slot.run(case_of(tokens))
    assert record.status is status
    assert message in record.message
    assert record.case_id == engine_fakes.problem((0, tokens)).case_id
    assert (record.stage == HARNESS_STAGE) == (status is Status.NOT_RUN)
    assert (record.stage == "merge") == (15 <= tokens <= 18)
    assert slot.run(case_of(6)).status is Status.PASS, "the next case must find a sound worker"


def test_does_a_crash_name_the_line_that_was_running(slot: Slot) -> None:
    slot.prepare()
    assert "in engine_fakes.py:" in slot.run(case_of(1)).message


def test_does_the_death_of_an_idle_worker_cost_no_case(slot: Slot) -> None:
    assert slot.run(case_of(7)).status is Status.PASS
    time.sleep(0.6)
    assert slot.run(case_of(6)).status is Status.PASS


@pytest.mark.parametrize("after", [0.0, 0.02, 0.5])
def test_does_a_stopped_slot_abandon_the_running_case(slot: Slot, after: float) -> None:
    slot.timeout_s = 30.0
    threading.Timer(after, slot.stop).start()
    start = time.monotonic()
    with pytest.raises(Stopped):
        slot.run(case_of(2))
    assert time.monotonic() - start < 10


def _processes_of(group: int) -> list[int]:
    """Those that have not ended; nobody may collect the exit codes of some."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(") ")[2].split()[:3]
            found += [int(stat.parent.name)] * (int(its_group) == group and state not in "ZX")
    return found


def _worker(slot: Slot) -> int:
    assert slot.spec.log is not None
    return int(pid_file(slot.spec.log).read_text())


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.02)
    return condition()


def test_does_a_copy_that_a_subject_forks_end_where_it_returns(slot: Slot) -> None:
    for _ in range(3):
        assert slot.run(case_of(13)).status is Status.PASS
    assert _within(5, lambda: _processes_of(_worker(slot)) == [_worker(slot)])


@pytest.mark.parametrize("end", ["stop", "renew", "crash", "quiet exit", "hang"])
def test_do_the_children_of_a_worker_end_with_it(slot: Slot, tmp_path: Path, end: str) -> None:
    assert slot.run(case_of(14)).status is Status.PASS
    worker, child = _worker(slot), int((tmp_path / "child").read_text())
    assert sorted(_processes_of(worker)) == sorted([worker, child])
    if end in ("stop", "renew"):
        getattr(slot, end)()
    else:
        slot.run(case_of({"crash": 1, "quiet exit": 12, "hang": 2}[end]))
    assert _within(5, lambda: _processes_of(worker) == [])


def test_is_a_worker_replaced_after_many_cases(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CASES_PER_WORKER", 2)
    workers = []
    for _ in range(5):
        assert slot.run(case_of(6)).status is Status.PASS
        workers.append(_worker(slot))
    assert workers[0] == workers[1] != workers[2] == workers[3] != workers[4]


def test_is_a_subject_that_takes_its_process_down_refused(tmp_path: Path) -> None:
    spec = WorkerSpec(
        subject="dies",
        scratch=str(tmp_path),
        resolver="tests.harness.engine_fakes:resolve",
        checker="tests.harness.engine_fakes:good",
    )
    slot = Slot(spec, 5.0, fork_context(PRELOAD))
    try:
        with pytest.raises(SubjectRefused, match="dies: the worker exited with code 3 while loading it"):
            slot.prepare()
    finally:
        slot.stop()


def test_does_a_clean_run_judge_exactly_as_many_cases_as_asked(tmp_path: Path) -> None:
    outcome = run_quietly(config(tmp_path / "run"))
    rows = list(read_rows(outcome.folder))
    assert outcome.exit_code == 0
    assert len(rows) == outcome.book.cases == 40
    assert len({row["case_id"] for row in rows}) > 35, "two shards may draw the same simple cases, not more"
    assert all(row["status"] == "PASS" for row in rows)
    assert not (outcome.folder / "pending").exists(), "nothing is left running"
    meta = read_meta(outcome.folder)
    assert (meta.subject, meta.seed, meta.jobs, meta.interrupted) == ("fake", 1, 2, False)
    assert meta.search_seconds is not None


@pytest.mark.parametrize("jobs", [1, 3])
def test_do_equal_seeds_draw_equal_cases_and_others_do_not(tmp_path: Path, jobs: int) -> None:
    drawn = []
    for name, seed, checker in (("a", 1, "good"), ("b", 1, "slow"), ("c", 2, "good")):
        outcome = run_quietly(config(tmp_path / name, checker, seed=seed, jobs=jobs))
        drawn.append(sorted(row["case_id"] for row in read_rows(outcome.folder)))
        assert len(drawn[-1]) == 40
    assert drawn[0] == drawn[1] != drawn[2]


def test_are_the_cases_shared_out_whole() -> None:
    for limit, jobs in ((40, 3), (2, 5), (7, 7), (1, 1)):
        some = config(Path("x"), jobs=jobs, limits=Limits(max_examples=limit, max_time_s=1.0, case_timeout_s=1.0))
        shares = [some.share(shard) for shard in range(jobs)]
        assert sum(share or 0 for share in shares) == limit
        assert max(share or 0 for share in shares) - min(share or 0 for share in shares) <= 1
    assert config(Path("x"), limits=Limits(max_examples=None, max_time_s=1.0, case_timeout_s=1.0)).share(0) is None


def test_is_each_fault_reported_once_with_a_replayable_case(tmp_path: Path) -> None:
    found: list[Finding] = []

    class Notes(Observer):
        def found(self, finding: Finding) -> None:
            found.append(finding)

    outcome = run(config(tmp_path / "run", "bad_when_long"), Notes())
    assert outcome.exit_code == 1
    (finding,) = found
    assert (finding.record.status, finding.record.stage) == (Status.FAIL, "mask")
    assert finding.count == outcome.book.failing > 1
    case = load_case(finding.folder / "case.json")
    assert case.problem == finding.problem
    assert case.expected is not None
    assert case.expected.cause == "mask.bits"
    state = json.loads((finding.folder / "state.json").read_text())
    assert state == {"state": "open", "count": finding.count}
    assert finding.replay_line == f"mlacheck replay {finding.folder.resolve()}/case.json"
    kept = [row["problem"] for row in read_rows(outcome.folder) if row["status"] == "FAIL"]
    assert all(kept), "the journal alone must be able to replay a failing case"


@pytest.mark.parametrize("checker", ["bad_when_long", "crash_when_long"])
def test_is_a_finding_shrunk_to_the_smallest_case_that_fails(tmp_path: Path, checker: str) -> None:
    outcome = run_quietly(config(tmp_path / "run", checker, shrink_s=20.0, limits=Limits(10, 60.0, 20.0)))
    (finding,) = outcome.book.store.findings.values()
    assert finding.shrunk
    assert [(r.context_len, r.query_len) for r in finding.problem.requests] == [(0, 20)]
    assert (finding.folder / "original.json").exists()
    assert load_case(finding.folder / "case.json").problem == finding.problem


def test_does_exit_first_end_the_search_at_the_first_finding(tmp_path: Path) -> None:
    limits = Limits(400, 60.0, 20.0)
    outcome = run_quietly(config(tmp_path / "run", "bad_when_long", exit_first=True, limits=limits))
    assert outcome.exit_code == 1
    assert outcome.book.cases < 100
    assert outcome.book.failing <= 2, "the other shard may have had one case in flight"


def test_does_the_run_end_when_its_time_is_over(tmp_path: Path) -> None:
    outcome = run_quietly(config(tmp_path / "run", limits=Limits(None, 1.0, 20.0)))
    assert outcome.book.cases > 0
    assert 1.0 <= outcome.book.search_seconds < 5.0


def test_does_a_hang_leave_the_case_on_disk_while_it_runs(tmp_path: Path) -> None:
    out = tmp_path / "run"
    seen: list[str] = []

    class Peek(Observer):
        def tick(self, book: object) -> None:
            for path in (out / "pending").glob("*.json"):
                with suppress(FileNotFoundError):  # its case may end just now
                    seen.append(path.read_text())

    run(config(out, "slow"), Peek())
    written = [text for text in seen if text]
    assert written
    copy = tmp_path / "pending.json"
    copy.write_text(written[0])
    assert load_case(copy).subject == "fake"


def test_are_bugs_of_the_harness_not_blamed_on_the_subject(tmp_path: Path) -> None:
    outcome = run_quietly(config(tmp_path / "run", "buggy"))
    assert outcome.exit_code == 2
    assert outcome.book.failing == 0
    assert not outcome.book.store.findings


def test_is_a_run_in_which_nothing_could_run_no_success(tmp_path: Path) -> None:
    outcome = run_quietly(config(tmp_path / "run", "not_here"))
    assert outcome.book.not_run == 40
    assert outcome.exit_code == 2


def test_does_a_broken_strategy_end_the_run_with_its_traceback(tmp_path: Path) -> None:
    outcome = run_quietly(config(tmp_path / "run", strategy="tests.harness.engine_fakes:broken_cases"))
    assert outcome.exit_code == 2
    assert "the strategy is broken" in outcome.book.broken[0]


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("unknown", "no subject is called 'unknown'"),
        ("dies", "exited with code 3"),
        ("leaves", "exited with code 0"),
        ("interrupts", "interrupts: KeyboardInterrupt"),
        ("panics", "panics: BaseException: a panic in Rust"),
    ],
)
def test_does_a_run_that_cannot_start_write_nothing(tmp_path: Path, subject: str, message: str) -> None:
    with pytest.raises(CannotRun, match=message):
        run_quietly(config(tmp_path / "run", subject=subject))
    assert list(tmp_path.iterdir()) == []


def test_is_a_driver_that_ends_early_no_success(tmp_path: Path) -> None:
    outcome = run_quietly(config(tmp_path / "run", strategy="tests.harness.engine_fakes:deadly_cases"))
    assert outcome.exit_code == 2
    assert "the driver process ended unexpectedly" in outcome.book.broken[0]


def test_is_a_shard_that_ends_early_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: object) -> None:
        raise GeneratorExit("out of order")

    monkeypatch.setattr(Slot, "run", ends)
    outcome = run_quietly(config(tmp_path / "run"))
    assert outcome.exit_code == 2
    assert "out of order" in outcome.book.broken[0]


def test_is_a_used_folder_refused(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("")
    with pytest.raises(CannotRun, match="--out"):
        run_quietly(config(tmp_path))


def test_does_an_interrupt_end_the_run_soon_and_keep_what_was_done(tmp_path: Path) -> None:
    class Impatient(Observer):
        def tick(self, book: object) -> None:
            if book.cases > 5:  # type: ignore[attr-defined]
                raise KeyboardInterrupt

    outcome = run(config(tmp_path / "run", limits=Limits(None, 60.0, 20.0)), Impatient())
    assert outcome.interrupted
    assert outcome.exit_code == 2
    assert read_meta(outcome.folder).interrupted
    assert len(list(read_rows(outcome.folder))) == outcome.book.cases > 5


def test_does_steering_change_nothing_but_the_drawn_cases(tmp_path: Path) -> None:
    outcome = run_quietly(config(tmp_path / "run", limits=Limits(60, 60.0, 20.0, steer=True)))
    assert outcome.exit_code == 0
    assert outcome.book.cases == 60


def test_are_gpus_counted_as_the_user_limits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, count in (("0,2", 2), ("", 0), ("-1", 0), ("GPU-1234", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_count() == count


def test_has_every_profile_of_the_strategies_its_limits() -> None:
    from harness.problems.profiles import PROFILES

    assert set(LIMITS) == set(PROFILES)
    assert all(limits.max_examples or limits.max_time_s for limits in LIMITS.values())
