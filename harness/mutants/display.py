"""The kill table on a terminal: a line for each mutant as it is known, the figures at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from harness.mutants.mutant import Mutant
from harness.mutants.table import Row
from reports.records import CaseRecord


def print_row(row: Row, *, to_stderr: bool) -> None:
    """`killed  merge_base2  B048  merge.lse  stage merge  2 cases  0.9 s`."""
    mutant = row.mutant
    parts = [f"{row.verdict:9} {mutant.name:42} {mutant.fault:5}"]
    if row.verdict == "killed":
        stage = f"stage {row.named}" if row.named else "no stage named"
        if not row.localized:
            stage += f", planted in {mutant.stage}"
        parts.append(f"{row.by}, {stage}, {row.cases} cases, {row.seconds:.1f} s")
        if row.size is not None:
            size = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in row.size.items())
            parts.append(f"shrunk to {size}")
    elif row.verdict == "survived":
        parts.append(f"{row.cases} cases, {row.seconds:.1f} s" + (", equivalent" if mutant.equivalent else ""))
    else:
        parts.append(row.message)
    click.echo("  ".join(parts), err=to_stderr)


def print_summary(
    rows: Sequence[Row],
    skipped: Sequence[Mutant],
    unsound: Sequence[CaseRecord],
    figures: Mapping[str, Any],
    *,
    to_stderr: bool,
) -> None:
    """What is wrong with the table, then its figures."""
    lines = [""]
    for row in rows:
        mutant = row.mutant
        if row.verdict == "killed" and mutant.equivalent:
            lines.append(f"{mutant.name}: its proof of equivalence is refuted by {row.by}: {row.message}")
        elif row.verdict == "survived" and not mutant.equivalent:
            lines.append(f"{mutant.name} survived ({mutant.stage}, {mutant.detector} expected): {mutant.what}")
        elif row.verdict in ("unreached", "broken"):
            lines.append(f"{mutant.name} is {row.verdict}: {row.message}")
    for record in unsound:
        lines.append(f"{record.subject} itself fails case {record.case_id}: {record.status}: {record.message}")
    if skipped:
        names = ", ".join(f"{mutant.name} ({mutant.needs})" for mutant in skipped)
        lines.append(f"{len(skipped)} not applicable here: {names}")
    lines.append(
        f"{figures['killed']} of {figures['mutants']} faults killed, {figures['localized']} with the right stage, "
        f"median {figures['median_cases']} cases; {figures['equivalent']} equivalent; {figures['seconds']} s"
    )
    click.echo("\n".join(lines), err=to_stderr)
