"""What a person sees of a run: live progress on stderr, then tables and findings."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import pandas as pd
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.engine.book import Book, RunConfig
from harness.engine.search import Observer, Outcome
from harness.findings.store import Finding
from reports import tables
from reports.finding import headline, place_text, terms_text
from reports.runs import RunMeta

PLAIN_INTERVAL_S = 15.0
"""Seconds between progress lines where nobody watches (no terminal)."""
PLAIN_WIDTH = 110


def console(*, stderr: bool) -> Console:
    """A console that does not fold at 80 columns into a pipe."""
    plain = Console(stderr=stderr, highlight=False)
    return plain if plain.is_terminal else Console(stderr=stderr, highlight=False, width=PLAIN_WIDTH)


class Display(Observer):
    """Live progress; a context manager around the run."""

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._live: Live | None = None
        self._plain_next = time.monotonic() + PLAIN_INTERVAL_S

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(Text("starting workers ..."), console=self._console, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def starting(self, config: RunConfig) -> None:
        """Say what is about to run, with everything that is needed to run it again."""
        self._console.print(
            f"mlacheck run: {config.subject}, profile {config.profile.name}, seed {config.seed}, "
            f"{config.jobs} workers, folder {config.out}"
        )

    def found(self, finding: Finding) -> None:
        """One line at once; the details come at the end."""
        record = finding.record
        self._console.print(f"finding {finding.id}: {headline(record)}", style="red", markup=False)

    def shrunk(self, finding: Finding, tries: int) -> None:
        """What shrinking came to."""
        problem = finding.problem
        size = f"{len(problem.requests)} requests, {problem.num_tokens} query tokens, {sum(problem.seq_lens)} keys"
        self._console.print(f"shrunk {finding.id} in {tries} tries: {size}", markup=False)

    def tick(self, book: Book) -> None:
        """Show the counts."""
        if self._live is not None:
            self._live.update(Text(progress_line(book)))
        elif time.monotonic() > self._plain_next:
            self._plain_next += PLAIN_INTERVAL_S
            self._console.print(progress_line(book), markup=False)


def progress_line(book: Book) -> str:
    """Cases, cases/s, worst margins, power, findings, paths: one line."""
    with book.lock:
        of = f"/{book.config.max_examples}" if book.config.max_examples else ""
        rate = book.cases / max(book.search_seconds, 1e-9)
        power = ", ".join(f"{name} {total / n:.2f}" for name, (total, n) in sorted(book.power.items()))
        paths = " ".join(f"{name} {n}" for name, n in book.paths.most_common())
        shrinking = (
            f" | shrinking, {len(book.to_shrink)} to go" if book.search_ended and book.store.findings else ""
        )
        return (
            f"{book.cases}{of} cases, {rate:.1f}/s | worst err/tol: out {book.worst_out:.2f}, "
            f"LSE {book.worst_lse:.2f} | findings {len(book.store.findings)} | {paths}"
            + (f" | power: {power}" if power else "")
            + shrinking
        )


def print_summary(
    rows: list[dict[str, Any]],
    meta: RunMeta,
    findings: Iterable[Finding],
    outcome: Outcome,
    *,
    to_stderr: bool,
) -> None:
    """The end of a run: tables, findings with their replay lines, and one line of verdict."""
    out = console(stderr=to_stderr)
    frame = tables.case_frame(rows)
    numbers = tables.summary(frame)
    out.print()
    _print(out, "paths and kernels", tables.path_table(frame))
    _print(out, "stages (err/tol of bounded checks)", tables.stage_table(tables.check_frame(rows)))
    _print(
        out, "power: share of such faults that the cases would certainly reveal", tables.power_table(frame)
    )
    _print(out, "sources", tables.source_table(frame))
    features = tables.feature_table(frame)
    reached = ", ".join(
        f"{name} {cases}" for name, cases in zip(features["name"], features["cases"], strict=True)
    )
    out.print(f"[bold]features reached ({len(features)})[/]")
    out.print(f"  {reached or 'none'}\n", markup=False)
    for finding in findings:
        print_finding(out, finding)
    for trace in outcome.book.broken:
        out.print(f"the harness failed:\n{trace}", style="red", markup=False)
    for message in frame.loc[frame["stage"] == "harness", "message"].drop_duplicates().head(3):
        out.print(f"the harness failed on a case: {message}", style="red", markup=False)
    rate = len(frame) / max(meta.search_seconds or 0.0, 1e-9)
    out.print(
        f"{numbers['cases']} cases: {numbers['passed']} passed, {numbers['failing']} failing "
        f"({len(outcome.book.store.findings)} findings), {numbers['not_run']} not run; {numbers['vacuous']} without "
        f"power for some fault class",
        markup=False,
    )
    out.print(
        f"two or more chunks {numbers['many_chunks_share']:.0%}, published dims {numbers['published_dims_share']:.0%}; "
        f"worst err/tol: out {_number(numbers['worst_margin_out'])}, LSE {_number(numbers['worst_margin_lse'])}; "
        f"{meta.seconds or 0:.1f} s, {rate:.1f} cases/s; seed {meta.seed}",
        markup=False,
    )
    out.print(f"report {outcome.folder.resolve() / 'report.md'}", markup=False, soft_wrap=True)


def print_finding(out: Console, finding: Finding) -> None:
    """Stage, message, terms, and the replay line on a line of its own."""
    record = finding.record
    out.print(
        f"[bold red]{record.status.value}[/] at stage [bold]{record.stage or 'case'}[/] (met {finding.count} times)"
    )
    out.print(f"  {headline(record)}", markup=False)
    for check in [check for check in record.checks if check.status.is_finding][:4]:
        margin = "" if check.margin is None else f", err/tol {check.margin:.3g}"
        out.print(
            f"  {check.check}: {place_text(check.place)}{margin} {check.message}".rstrip(), markup=False
        )
        if check.terms:
            out.print(f"    tolerance there: {terms_text(check.terms)}", markup=False)
    out.print(f"  {finding.replay_line}\n", markup=False, soft_wrap=True)


def _print(out: Console, title: str, frame: pd.DataFrame) -> None:
    if frame.empty:
        return
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2)
    )
    for name in frame.columns:
        table.add_column(str(name), justify="left" if name in ("name", "stage") else "right")
    for row in frame.itertuples(index=False):
        table.add_row(*(_cell(str(name), value) for name, value in zip(frame.columns, row, strict=True)))
    out.print(table)
    out.print()


def _cell(column: str, value: object) -> str:
    if isinstance(value, float):
        if pd.isna(value):
            return "-"
        return f"{value:.0%}" if column == "share" else f"{value:.3f}"
    return str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
