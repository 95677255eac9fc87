"""Does each command do what it says, with the right exit code, from any working folder?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from harness.cli import main
from harness.findings.store import CaseFile, Expected, read_state, write_state
from reports.records import Status
from tests.harness import engine_fakes

NEEDED_KEYS = {
    "cases",
    "passed",
    "findings",
    "vacuous",
    "not_run",
    "seconds",
    "cases_per_second",
    "worst_margin_out",
    "worst_margin_lse",
    "paths",
}
PLANTED = (
    ("mask_bit31_lost", "mask"),
    ("chunk_key_start_off_by_one", "chunk_loop"),
    ("merge_base2", "merge"),
)


def mlacheck(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, as a user would."""
    command = [sys.executable, "-m", "harness.cli", *args]
    env = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    answer = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("command", ["replay", "shrink"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the check is made")
def test_does_a_finding_of_a_gpu_stay_open_without_one(command: str, tmp_path: Path) -> None:
    case = engine_fakes.problem((5, 3))
    folder = tmp_path / "runs" / "r" / "findings" / "mask-racy-0123456789"
    folder.mkdir(parents=True)
    expected = Expected(status=Status.RACY, stage="mask", cause="mask.crowd")
    stored = CaseFile(subject="ours[triton]", problem=case, expected=expected)
    (folder / "case.json").write_text(stored.text(), encoding="utf-8")
    write_state(folder, "open")
    before = read_state(folder)
    done = mlacheck(tmp_path, command, str(folder))
    assert done.returncode == 2
    assert "mask.crowd is made on a GPU alone" in done.stdout + done.stderr
    assert read_state(folder) == before
    assert [file.name for file in folder.glob("*.json")].count("case.small.json") == 0


def test_does_a_run_of_our_kernels_end_clean_with_one_json_line(tmp_path: Path) -> None:
    done = mlacheck(tmp_path, "run", "--max-examples", "8", "--seed", "1", "--jobs", "1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = last_json(done)
    assert set(numbers) >= NEEDED_KEYS
    assert numbers["cases"] == numbers["passed"] + numbers["vacuous"] == 8
    assert numbers["findings"] == 0
    assert {"dense", "no_context", "global_mask", "remap", "mqa", "mask_single", "mask_many"} <= set(numbers["paths"])
    assert sum(numbers["paths"].values()) >= 8
    assert 0 < numbers["worst_margin_out"] <= 1
    (run,) = (tmp_path / "runs").iterdir()
    assert Path(numbers["run"]) == run
    assert {"journal.jsonl", "run.json", "report.md", "summary.json"} <= {path.name for path in run.iterdir()}
    assert "8 cases: " in (run / "report.md").read_text()


@pytest.mark.parametrize(("name", "stage"), PLANTED)
def test_is_a_planted_fault_found_named_and_replayed_elsewhere(tmp_path: Path, name: str, stage: str) -> None:
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    options = ("--seed", "1", "--jobs", "1", "-x", "--no-shrink", "--json")
    done = mlacheck(work, "run", "--subject", f"mutant:{name}", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    numbers = last_json(done)
    finding = numbers["finding_list"][0]
    assert finding["stage"] == stage
    assert finding["replay"] in done.stderr, "people must see the line too"
    program, command, case = finding["replay"].split(" ", 2)
    assert (program, command) == ("mlacheck", "replay")
    again = mlacheck(elsewhere, "replay", case, "--json")
    assert again.returncode == 1, again.stdout + again.stderr
    answer = last_json(again)
    assert (answer["same_verdict"], answer["same_tensors"], answer["stage"]) == (True, True, stage)
    healthy = mlacheck(elsewhere, "replay", case, "--subject", "ours[triton]")
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert "same as stored" in healthy.stdout
    assert list(elsewhere.iterdir()) == [], "a replay writes nothing"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "--subject", "nobody"), "no subject is called 'nobody'"),
        (("run", "--subject", "mutant:nobody"), "no mutant is called 'nobody'"),
        (("run", "--subject", "mutant:mask_bit31_lost@fa5"), "'fa5' is no attention kernel, must be 'triton' or 'fa4'"),
        (("run", "--out", "."), "--out"),
        (("replay", "missing.json"), "missing.json: no such case file"),
        (("replay", "bad.json"), "bad.json"),
        (("replay", "outside.json"), "topk.rows"),
        (("shrink", "bad.json"), "bad.json"),
        (("report", "nowhere"), "nowhere: not a run folder"),
        (("report",), "RUN is not given, and there is no run in "),
    ],
)
def test_is_bad_input_one_clear_line_and_exit_code_two(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    (tmp_path / "bad.json").write_text('{"format": "mlacheck-case", "requests": 7}')
    case = json.loads(engine_fakes.problem((0, 2)).to_json())
    case["topk"]["rows"] = [[0]]
    (tmp_path / "outside.json").write_text(json.dumps(case))
    before = sorted(tmp_path.rglob("*"))
    done = mlacheck(tmp_path, *args)
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("mlacheck: ")
    assert message in last
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before, "nothing may be written"


@pytest.mark.parametrize("option", [("--profile", "huge"), ("--max-examples", "0"), ("--max-time", "-1")])
def test_is_an_illegal_option_refused(tmp_path: Path, option: tuple[str, str]) -> None:
    done = mlacheck(tmp_path, "run", *option)
    assert done.returncode == 2
    assert option[0] in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("what", "member"),
    [("subjects", "ours[triton]"), ("stages", "merge"), ("mutants", "mask_bit31_lost")],
)
def test_do_lists_name_what_there_is(tmp_path: Path, what: str, member: str) -> None:
    names = [row["name"] for row in last_json(mlacheck(tmp_path, "list", what, "--json"))[what]]
    assert member in names
    table = mlacheck(tmp_path, "list", what)
    assert table.returncode == 0
    assert member in table.stdout


def test_are_findings_of_all_runs_listed(tmp_path: Path) -> None:
    from harness.findings.store import FindingStore

    case = engine_fakes.problem((0, 25))
    store = FindingStore(tmp_path / "runs" / "r1" / "findings", {})
    finding = store.add(engine_fakes.bad_when_long(case, "fake"), case)
    assert finding is not None
    (row,) = last_json(mlacheck(tmp_path, "list", "findings", "--json"))["findings"]
    assert (row["id"], row["state"], row["count"], row["run"]) == (finding.id, "open", 1, "r1")
    title = mlacheck(tmp_path, "list", "findings").stdout.splitlines()[0].strip()
    assert title == f"1 findings in {tmp_path / 'runs'}"


def test_is_the_newest_run_reported_again(tmp_path: Path) -> None:
    for name in ("second", "first"):
        done = mlacheck(tmp_path, "run", "--max-examples", "1", "--jobs", "1", "--out", f"runs/{name}")
        assert done.returncode == 0, done.stderr
        (tmp_path / "runs" / name / "report.md").unlink()
    again = mlacheck(tmp_path, "report")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "runs" / "first" / "report.md").read_text() == again.stdout.removesuffix("\n")
    assert not (tmp_path / "runs" / "second" / "report.md").exists()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyboardInterrupt(), "mlacheck: interrupted"),
        (PermissionError(13, "Permission denied", "runs"), "mlacheck: [Errno 13] Permission denied: 'runs'"),
        (GeneratorExit(), "mlacheck: a fault of mlacheck itself (see the traceback above)"),
        (ZeroDivisionError("a bug"), "mlacheck: a fault of mlacheck itself (see the traceback above)"),
    ],
)
def test_is_exit_code_one_left_to_findings(monkeypatch: pytest.MonkeyPatch, error: BaseException, line: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("harness.engine.search.run", fail)
    done = CliRunner().invoke(main, ["run"])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == line
    assert done.stdout == ""


def test_is_the_command_line_light(tmp_path: Path) -> None:
    code = (
        "import sys, harness.cli, harness.engine.search, harness.display;"
        "heavy = {'torch', 'triton', 'optimized', 'pandas'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_does_a_finding_say_place_and_terms_once() -> None:
    from io import StringIO

    from rich.console import Console

    from harness.findings.store import Finding
    from harness.summary import _print_finding
    from reports.records import CaseRecord, CheckRecord, Place, Status

    place = Place(call="final", token=3, head=1)

    def bad(check: str, message: str) -> CheckRecord:
        fields = {"stage": "merge", "check": check, "status": Status.FAIL, "place": place}
        return CheckRecord(**fields, margin=14.5, message=message, terms={"merge": 1.0})

    first = bad("merge.lse", "merge.lse is 1, must be 2; tolerance from merge 100% at call final, token 3, head 1")
    second = bad("merge.out", "merge.out is 3, must be 4; tolerance from merge 100% at call final, token 3, head 1")
    bare = bad("merge.more", "")
    record = CaseRecord(case_id="0" * 16, subject="s", status=Status.FAIL, stage="merge", message=first.message)
    record.checks = [first, second, bare]
    finding = Finding(Path("merge-1"), record, engine_fakes.problem((2, 1)))
    text = StringIO()
    _print_finding(Console(file=text, width=300), finding)
    lines = [line.strip() for line in text.getvalue().splitlines()]
    assert lines[1:7] == [
        first.message,
        "merge.lse: err/tol 14.5; call final, token 3, head 1",
        f"merge.out: {second.message}",
        "merge.more: err/tol 14.5; call final, token 3, head 1",
        "the tolerance there: merge 100 %",
        "the case: 1 requests, 1 query tokens, 3 keys",
    ]


INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from harness.cli import main; main(prog_name='mlacheck')"
)
"""What runs in the background ignores SIGINT, and so would a child of such tests."""


HANGS = """
import signal, subprocess, time
import mlacheck

@mlacheck.subject(stage="plan")
def hangs(context_lens, row_budget, max_context_chunk, split_alignment):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "600"])
    open("hanging", "w").close()
    while True:
        time.sleep(1)
"""


class Run:
    """`mlacheck run` in a process group and a folder of its own; everything that it starts inherits a mark."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.scratch = Path(tempfile.mkdtemp(prefix="m-"))  # its path must be short: sockets are made in it
        self.mark = f"MLACHECK_TEST_MARK={folder}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, "run", "--jobs", "1", "--out", "night", *options],
            cwd=folder,
            env=os.environ | {name: value, "TMPDIR": str(self.scratch)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, condition: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not condition() and time.monotonic() - began < 90:
            time.sleep(0.1)

    def end(self) -> str:
        """All that was printed; the run must have ended as an interrupted one does, and have left nothing."""
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 2, out + err
        assert "interrupted" in out
        assert "Traceback" not in err
        assert (self.folder / "night" / "report.md").is_file()
        self.wait_for(lambda: not self.left())
        assert self.left() == []
        assert list(self.scratch.iterdir()) == []
        self.scratch.rmdir()
        return out + err

    def left(self) -> list[str]:
        """Processes that are still there, whatever group they are in."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_text())
        return found


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_does_an_ended_run_keep_what_it_found_and_leave_no_process(tmp_path: Path, kind: signal.Signals) -> None:
    run = Run(tmp_path, "--max-examples", "9999")
    journal = tmp_path / "night" / "journal.jsonl"
    run.wait_for(lambda: journal.is_file() and journal.read_text().count("\n") > 2)
    assert len(run.left()) > 3, "the mark must be seen, or nothing is proven"
    run.process.send_signal(kind)
    run.end()


@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_does_a_second_signal_break_off_nothing(tmp_path: Path, kind: signal.Signals, to_all: bool) -> None:
    (tmp_path / "kernel.py").write_text(HANGS)
    run = Run(tmp_path, "--subject", "kernel.py:hangs")
    run.wait_for((tmp_path / "hanging").is_file)
    for _ in range(3):
        if to_all:
            os.killpg(run.process.pid, kind)
        else:
            run.process.send_signal(kind)
        time.sleep(0.3)
    assert "CRASH" not in run.end()


def test_is_no_process_left_by_a_run_that_is_killed_outright(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(HANGS.replace('    subprocess.Popen(["sleep", "600"])\n', ""))
    run = Run(tmp_path, "--subject", "kernel.py:hangs")
    run.wait_for((tmp_path / "hanging").is_file)
    assert len(run.left()) > 3, "the mark must be seen, or nothing is proven"
    run.process.kill()
    run.process.wait(timeout=60)
    run.wait_for(lambda: not run.left())
    assert run.left() == []
    shutil.rmtree(run.scratch)
    assert (tmp_path / "night" / "pending" / "0.json").is_file(), "the case that ran can be replayed"


def test_does_an_interrupt_end_the_loading_of_a_subject(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text('import time\nopen("loading", "w").close()\ntime.sleep(600)\n')
    run = Run(tmp_path, "--subject", "kernel.py:f", "--stage", "plan")
    run.wait_for((tmp_path / "loading").is_file)
    run.process.send_signal(signal.SIGINT)
    out, err = run.process.communicate(timeout=60)
    assert (run.process.returncode, out) == (2, "")
    assert err.splitlines()[-1] == "mlacheck: interrupted"
    assert "Traceback" not in err
    run.wait_for(lambda: not run.left())
    assert run.left() == list(run.scratch.iterdir()) == []
    assert not (tmp_path / "night").exists()
