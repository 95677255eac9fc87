"""`mlacheck replay`: judge one stored case again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from harness.commands.common import SECONDS, Refusal, subject_to_run
from harness.commands.vllm_path import vllm_path_option


@click.command()
@click.argument("what", metavar="FILE|DIR|ID|RUN/CASE_ID")
@click.option("--subject", help="Another subject than the stored one; a user's code must be named here.")
@click.option("--stage", help="Stage that the subject is judged for.")
@vllm_path_option
@click.option("--timeout", type=SECONDS, default=300.0, show_default=True, metavar="S")
@click.option("--json", "as_json", is_flag=True, help="Result as one JSON object on the last line of stdout.")
def replay(what: str, subject: str | None, stage: str | None, timeout: float, as_json: bool) -> None:
    """Judge a stored case again, in a fresh process.

    WHAT is a case file, the folder of a finding, the id of a finding (looked up in runs/), or a case that a run
    kept in its journal, as those near their tolerance. Exit code 0: it passes now; 1: it still fails; 2: malformed
    file, unknown subject, other tensors than the stored ones, the subject cannot run here, or what accused it is
    looked for on another kind of machine (GPU or none).
    """
    from harness.engine.worker import SubjectRefused
    from harness.findings.journaled import journaled_case
    from harness.findings.replay import replay_case
    from harness.findings.store import CaseFileError, load_case, locate, note_replay

    try:
        runs = Path("runs")
        found = journaled_case(what, runs)
        if found is None:
            path = locate(what, runs)
            found = path, load_case(path)
        path, case = found
        name = subject_to_run(case.subject, subject, stage)
        result = replay_case(case, subject=name, timeout_s=timeout)
    except (CaseFileError, SubjectRefused) as error:
        raise Refusal(str(error)) from None
    if result.tells:
        note_replay(path, failing=result.failing)
    if as_json:
        click.echo(json.dumps({"case": str(path), **result.as_dict()}))
    else:
        click.echo("\n".join(result.lines(path)))
    sys.exit(result.exit_code)
