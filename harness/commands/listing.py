"""`mlacheck list subjects|stages|mutants|findings`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

PIPED_WIDTH = 500
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of stdout.")


@click.group(name="list")
def list_group() -> None:
    """Name what there is: subjects, stages, mutants, findings."""


@list_group.command()
@JSON_OPTION
def subjects(as_json: bool) -> None:
    """What can be put under test here."""
    from harness.subjects.registry import list_subjects

    rows = [{"name": name, "what": what} for name, what in list_subjects().items()]
    _show("subjects", ["name", "what"], rows, as_json)


@list_group.command()
@JSON_OPTION
def stages(as_json: bool) -> None:
    """The stages that are judged, in the order of the pipeline."""
    from harness.checks.stages import STAGES

    _show("stages", ["name", "what"], [{"name": name, "what": what} for name, what in STAGES.items()], as_json)


@list_group.command()
@JSON_OPTION
def mutants(as_json: bool) -> None:
    """The planted faults: `mlacheck run --subject mutant:NAME`."""
    from harness.mutants.registry import MUTANTS

    rows = [{"name": m.name, "fault": m.fault, "stage": m.stage, "what": m.what} for m in MUTANTS.values()]
    _show("mutants", ["name", "fault", "stage", "what"], rows, as_json)


@list_group.command()
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@JSON_OPTION
def findings(runs: Path, as_json: bool) -> None:
    """The findings of all runs of this working folder."""
    from harness.findings.store import read_state

    rows = []
    for case in sorted(runs.glob("*/findings/*/case.json")):
        folder = case.parent
        rows.append({"id": folder.name, **read_state(folder), "run": folder.parent.parent.name, "case": str(case)})
    _show("findings", ["id", "state", "count", "run"], rows, as_json, where=f" in {runs.resolve()}")


def _show(title: str, columns: list[str], rows: list[dict[str, Any]], as_json: bool, where: str = "") -> None:
    if as_json:
        click.echo(json.dumps({title: rows}))
        return
    from rich.console import Console
    from rich.table import Table

    # a name is there to be copied: it is never cut, and what is piped is not wrapped
    click.echo(f"{len(rows)} {title}{where}")
    table = Table(box=None)
    for column in columns:
        table.add_column(column, no_wrap=column in ("name", "id"), overflow="ignore")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    if rows:
        Console(width=width, markup=False, highlight=False).print(table)
