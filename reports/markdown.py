"""`report.md` of a run, from its folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from reports import tables
from reports.coverage import read_coverage
from reports.records import Status
from reports.runs import read_meta, read_rows

MESSAGE_LINE = 2
"""Line of a finding's report that holds its message; the title is line 0."""


def run_markdown(run: Path, rows: Sequence[tables.Row] | None = None) -> str:
    """The report of a run folder, finished or not; `rows` are its `read_rows`, if they are at hand.

    Raises:
        RunError: the folder is no run.
    """
    meta = read_meta(run)
    rows = list(read_rows(run)) if rows is None else rows
    frame = tables.case_frame(rows)
    numbers = tables.summary(frame)
    state = "interrupted" if meta.interrupted else "finished" if meta.search_seconds is not None else "not finished"
    lines = [
        f"# mlacheck run of {meta.subject}",
        "",
        f"{numbers['cases']} cases: {numbers['passed']} passed, {numbers['failing']} failing, "
        f"{numbers['vacuous']} vacuous, {numbers['not_run']} not run; "
        f"{numbers['without_power']} had little power for some fault class.",
        "",
        f"- profile {meta.profile}, seed {meta.seed}, {meta.jobs} workers, started {meta.started}, {state}",
    ]
    if meta.search_seconds:
        rate = numbers["cases"] / meta.search_seconds
        lines.append(f"- {meta.search_seconds:.1f} s of search, {rate:.2f} cases/s")
    lines += [f"- {name}: {value}" for name, value in meta.facts.items()]
    lines += [
        f"- worst err/tol: output {_cell('worst', numbers['worst_margin_out'])}, "
        f"LSE {_cell('worst', numbers['worst_margin_lse'])}",
        f"- two or more chunks: {numbers['many_chunks_share']:.0%} of the cases; "
        f"published dims: {numbers['published_dims_share']:.0%}",
        "",
    ]
    lines += _findings(run)
    checks, coverage, worst = tables.check_frame(rows), read_coverage(run), _worst_cases(frame)
    features = tables.feature_table(frame, meta.features) if coverage is None else tables.coverage_table(coverage)
    for title, table in (
        ("Paths and kernels", tables.path_table(frame)),
        ("Stages", tables.stage_table(checks)),
        ("Power: share of such faults that the cases would certainly reveal", tables.power_table(frame)),
        ("No power", tables.vacuous_table(frame)),
        ("Sources", tables.source_table(frame)),
        ("Features", features),
        ("Worst margins", worst),
    ):
        if not table.empty:
            lines += [f"## {title}", "", markdown_table(table), ""]
    if not worst.empty:
        lines += [f"`mlacheck replay {run.resolve()}/CASE_ID` judges one of them again.", ""]
    if coverage is not None:
        lines += ["## Pairs of features", "", f"{coverage.headline()}. The rarest:", ""]
        lines += [markdown_table(tables.pair_table(coverage)), ""]
    pending = sorted((run / "pending").glob("*.json"))
    if pending:
        lines += ["## Running when the run was cut off", ""]
        lines += [f"- `mlacheck replay {path.resolve()}`" for path in pending]
        lines.append("")
    return "\n".join(lines)


def markdown_table(frame: pd.DataFrame) -> str:
    """A pipe table; numbers to the right."""
    names = [str(name) for name in frame.columns]
    rule = ["---:" if pd.api.types.is_numeric_dtype(frame[name]) else "---" for name in names]
    rows = [[_cell(n, value) for n, value in zip(names, row, strict=True)] for row in frame.itertuples(index=False)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (names, rule, *rows))


def _findings(run: Path) -> list[str]:
    """Title and message of each finding's own report, and its replay line."""
    lines = ["## Findings", ""]
    folders = sorted(path.parent for path in (run / "findings").glob("*/case.json"))
    for folder in folders:
        report = folder / "report.md"
        text = report.read_text(encoding="utf-8").splitlines() if report.is_file() else []
        title, message = (text[0].removeprefix("# "), text[2]) if len(text) > MESSAGE_LINE else (folder.name, "")
        lines += [f"- **{title}**: {message}", "", f"      mlacheck replay {folder.resolve() / 'case.json'}", ""]
    return lines if folders else [*lines, "None.", ""]


def _worst_cases(frame: pd.DataFrame) -> pd.DataFrame:
    """The five cases nearest to their tolerance, or past it."""
    judged = frame[frame["status"].isin([Status.PASS.value, Status.WATCH.value, Status.FAIL.value])]
    worst = judged.assign(worst=judged[["margin_out", "margin_lse"]].max(axis=1)).nlargest(5, "worst")
    return worst[["case_id", "status", "margin_out", "margin_lse", "source"]]


def _cell(column: str, value: object) -> str:
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return "-"
    if isinstance(value, float):
        return f"{100 * value:.0f} %" if column == "share" else f"{value:.3g}"
    return str(value).replace("|", "\\|")
