"""`mlacheck report`: the report of a run, made again from its folder."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.commands.common import Refusal


@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The counts as one JSON object on the last line of stdout.")
def report(run: Path, as_json: bool) -> None:
    """Write RUN/report.md again from the journal, also of a run that was killed, and print it."""
    from reports.markdown import run_markdown
    from reports.runs import RunError, read_rows
    from reports.tables import case_frame, summary

    try:
        text = run_markdown(run)
        numbers = summary(case_frame(read_rows(run)))
    except RunError as error:
        raise Refusal(str(error)) from None
    (run / "report.md").write_text(text, encoding="utf-8")
    click.echo(json.dumps(numbers) if as_json else text)
