"""`mlacheck report`: the report of a run, made again from its folder."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.commands.common import Refusal


@click.command()
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The counts as one JSON object on the last line of stdout.")
def report(run: Path | None, as_json: bool) -> None:
    """Write RUN/report.md again from the journal, also of a run that was killed, and print it.

    RUN is the folder of a run; default: the newest in runs/ here.
    """
    from reports.markdown import run_markdown
    from reports.runs import RunError, read_rows
    from reports.tables import case_frame, summary

    run = run or _newest(Path("runs"))
    try:
        rows = list(read_rows(run))
        text = run_markdown(run, rows)
    except RunError as error:
        raise Refusal(str(error)) from None
    (run / "report.md").write_text(text, encoding="utf-8")
    click.echo(json.dumps(summary(case_frame(rows))) if as_json else text)


def _newest(runs: Path) -> Path:
    """The run that was written last. Raises Refusal where there is none."""
    written = {file.parent: file.stat().st_mtime for file in runs.glob("*/run.json")}
    if not written:
        raise Refusal(f"RUN is not given, and there is no run in {runs.resolve()}")
    return max(written, key=lambda folder: written[folder])
