"""The end of a run, for a person: tables, findings with their replay lines, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from harness.display import console
from harness.engine.search import Outcome
from harness.engine.worker import HARNESS_STAGE
from harness.findings.store import Finding
from reports import tables
from reports.coverage import Coverage
from reports.finding import headline, place_text, terms_text
from reports.records import Status
from reports.runs import RunMeta

MAX_CHECKS_SHOWN = 4
MAX_REASONS_SHOWN = 3

NO_TOLERANCE = 1e299
"""A margin from here on stands for infinity: something was wrong where nothing is rounded."""


def print_summary(
    rows: list[dict[str, Any]],
    meta: RunMeta,
    findings: Iterable[Finding],
    outcome: Outcome,
    *,
    to_stderr: bool,
) -> None:
    """Print everything that the run has to say; the verdict comes last."""
    out = console(stderr=to_stderr)
    frame = tables.case_frame(rows)
    out.print()
    print_table(out, "Paths and kernels", tables.path_table(frame))
    print_table(out, "Stages (err/tol of the bounded checks)", tables.stage_table(tables.check_frame(rows)))
    print_table(out, "Power: share of such faults that a case would certainly reveal", tables.power_table(frame))
    print_table(out, "Sources", tables.source_table(frame))
    print_coverage(out, outcome.book.reached.coverage())
    for finding in findings:
        _print_finding(out, finding)
    for trace in outcome.book.broken:
        out.print(f"the harness failed:\n{trace}", style="red")
    errors = frame.loc[frame["stage"] == HARNESS_STAGE, "message"].drop_duplicates()
    for message in errors.head(MAX_REASONS_SHOWN):
        out.print(f"the harness failed on a case: {message}", style="red")
    reasons = frame.loc[(frame["status"] == Status.NOT_RUN.value) & frame["stage"].isna(), "message"]
    for message in reasons.drop_duplicates().head(MAX_REASONS_SHOWN):
        out.print(f"not run: {message}", soft_wrap=True)
    for line in _verdict(tables.summary(frame), meta, outcome):
        out.print(line, soft_wrap=True)


def _verdict(numbers: dict[str, Any], meta: RunMeta, outcome: Outcome) -> list[str]:
    rate = numbers["cases"] / max(meta.search_seconds or 0.0, 1e-9)
    interrupted = ", interrupted" if outcome.interrupted else ""
    return [
        f"{numbers['cases']} cases: {numbers['passed']} passed, {numbers['failing']} failing "
        f"({len(outcome.book.store.findings)} findings), {numbers['vacuous']} vacuous, "
        f"{numbers['not_run']} not run; {numbers['without_power']} had little power for some fault class",
        f"two or more chunks {numbers['many_chunks_share']:.0%}, "
        f"published dims {numbers['published_dims_share']:.0%}; worst err/tol: "
        f"out {_cell('', numbers['worst_margin_out'])}, LSE {_cell('', numbers['worst_margin_lse'])}",
        f"{meta.seconds or 0:.1f} s, {rate:.1f} cases/s; seed {meta.seed}{interrupted}",
        f"report {outcome.folder.resolve() / 'report.md'}",
    ]


def _print_finding(out: Console, finding: Finding) -> None:
    """Stage, message, terms, and the replay line on a line of its own."""
    record = finding.record
    verdict = f"{record.status.value} at stage {record.stage or 'case'}, met {finding.count} times: {finding.id}"
    out.print(verdict, style="bold red")
    out.print(f"  {headline(record)}", soft_wrap=True)
    for check in [check for check in record.checks if check.status.is_finding][:MAX_CHECKS_SHOWN]:
        margin = "" if check.margin is None or check.margin >= NO_TOLERANCE else f"err/tol {check.margin:.3g}"
        said = check.message in headline(record)
        place = place_text(check.place)
        parts = [margin if said else check.message, "" if not said and place in check.message else place]
        out.print(f"  {check.check}: {'; '.join(filter(None, parts)) or check.status.value}", soft_wrap=True)
        if check.terms and "tolerance from" not in check.message:
            out.print(f"    the tolerance there: {terms_text(check.terms)}")
    out.print(f"  the case: {finding.size}")
    out.print(f"  {finding.replay_line}\n", soft_wrap=True)


def print_coverage(out: Console, coverage: Coverage) -> None:
    """The features by group, with the number of cases that had each, and the rarest pairs."""
    features = tables.coverage_table(coverage).drop(columns=["hit", "of"])
    if not features["cannot_occur"].any():
        features = features.drop(columns="cannot_occur")
    print_table(out, f"{coverage.features_headline()} (with the number of cases that had each)", features)
    print_table(out, f"{coverage.headline()}; the rarest:", tables.pair_table(coverage))


def print_table(out: Console, title: str, frame: pd.DataFrame) -> None:
    if frame.empty:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in frame.columns:
        number = pd.api.types.is_numeric_dtype(frame[name])
        table.add_column(str(name).replace("_", " "), justify="right" if number else "left")
    for row in frame.itertuples(index=False):
        table.add_row(*(_cell(str(name), value) for name, value in zip(frame.columns, row, strict=True)))
    out.print(title, style="bold")
    out.print(table)
    out.print()


def _cell(column: str, value: object) -> str:
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.0%}" if column == "share" else f"{value:.3f}"
    return str(value)
