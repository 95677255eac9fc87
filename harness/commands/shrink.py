"""`mlacheck shrink`: make a stored failing case smaller."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import click

from harness.commands.common import SECONDS, Refusal, subject_to_run
from harness.commands.vllm_path import vllm_path_option


@click.command()
@click.argument("what", metavar="FILE|DIR|ID")
@click.option("--max-time", type=SECONDS, default=60.0, show_default=True, metavar="S")
@click.option("--subject", help="Another subject than the stored one; a user's code must be named here.")
@click.option("--stage", help="Stage that the subject is judged for.")
@vllm_path_option
@click.option("--out", type=click.Path(path_type=Path), help="Where to write; default: NAME.small.json beside it.")
@click.option("--json", "as_json", is_flag=True, help="Result as one JSON object on the last line of stdout.")
def shrink(what: str, max_time: float, subject: str | None, stage: str | None, out: Path | None, as_json: bool) -> None:
    """Search for a smaller case that fails in the same way.

    Exit code 1: it fails, and the smallest case was written; 0: it passes, nothing to shrink; 2: could not
    run.
    """
    from harness.engine.context import fork_context
    from harness.engine.pool import Slot
    from harness.engine.reproduce import smallest
    from harness.engine.worker import SubjectRefused, WorkerSpec
    from harness.findings.replay import missing_check
    from harness.findings.shrink import shrink as shrink_problem
    from harness.findings.store import CaseFile, CaseFileError, fingerprint, load_case, locate, replay_command
    from harness.problems.problem import Problem
    from reports.records import Status

    try:
        path = locate(what, Path("runs"))
        case = load_case(path)
        name = subject_to_run(case.subject, subject, stage)
    except CaseFileError as error:
        raise Refusal(str(error)) from None
    target = out or path.with_name(f"{path.stem}.small.json")
    if not target.parent.is_dir():
        raise Refusal(f"--out {target}: its folder does not exist")
    scratch = tempfile.mkdtemp(prefix="mlacheck-")
    slot = Slot(WorkerSpec(subject=name, scratch=scratch), max_time, fork_context())
    try:
        slot.prepare()
        domain = slot.domain()
        best = slot.run(case.problem.to_json(), 300.0)
        if best.status is Status.NOT_RUN:
            raise Refusal(f"{path}: NOT_RUN: {best.message}")
        missing = missing_check(case.expected, best)
        if missing is not None:
            raise Refusal(f"{path}: it passes here, but {missing}")
        if not best.status.is_finding:
            click.echo(json.dumps({"status": best.status.value}) if as_json else f"{path}: {best.status.value}")
            return
        goal = fingerprint(best)
        judged = {best.case_id: best}

        tries = 0

        def fails(problem: Problem) -> bool:
            record = slot.run(problem.to_json())
            judged[record.case_id] = record
            return fingerprint(record) == goal

        def fails_alone(problem: Problem) -> bool:
            slot.renew()
            return fails(problem)

        def search(fresh: bool, seconds: float) -> Problem:
            nonlocal tries
            result = shrink_problem(case.problem, fails_alone if fresh else fails, seconds=seconds, domain=domain)
            tries += result.tries
            return result.problem

        problem = smallest(case.problem, search, fails_alone, seconds=max_time) or case.problem
    except SubjectRefused as error:
        raise Refusal(str(error)) from None
    finally:
        slot.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    target.write_text(CaseFile.of(judged[problem.case_id], problem).text(), encoding="utf-8")
    size = {
        "requests": len(problem.requests),
        "query_tokens": problem.num_tokens,
        "keys": sum(problem.seq_lens),
        "tries": tries,
        "case": str(target.resolve()),
    }
    if as_json:
        click.echo(json.dumps({"status": best.status.value, **size}))
    else:
        click.echo(", ".join(f"{value} {name.replace('_', ' ')}" for name, value in list(size.items())[:-1]))
        click.echo(replay_command(target.resolve(), name))
    sys.exit(1)
