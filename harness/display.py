"""What a person sees while a run goes on: live progress and findings, on stderr."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from harness.engine.book import Book, RunConfig
from harness.engine.search import Observer
from harness.findings.store import Finding
from reports.finding import headline

PLAIN_INTERVAL_S = 15.0
"""Seconds between progress lines where nobody watches (no terminal)."""
PLAIN_WIDTH = 110


def console(*, stderr: bool) -> Console:
    """A console that does not fold at 80 columns into a pipe."""
    plain = Console(stderr=stderr, highlight=False, markup=False)
    if plain.is_terminal:
        return plain
    return Console(stderr=stderr, highlight=False, markup=False, width=PLAIN_WIDTH)


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
            f"mlacheck run: {config.subject}, profile {config.profile}, seed {config.seed}, "
            f"{config.jobs} workers, folder {config.out}"
        )

    def found(self, finding: Finding) -> None:
        """One line at once; the details come at the end."""
        record = finding.record
        self._console.print(f"finding {finding.id}: {headline(record)}", style="red", soft_wrap=True)

    def shrunk(self, finding: Finding, tries: int) -> None:
        """What shrinking came to."""
        self._console.print(f"shrunk {finding.id} in {tries} tries: {finding.size}")

    def unconfirmed(self, finding: Finding) -> None:
        """A person must know before trying the replay line."""
        self._console.print(
            f"{finding.id} does not fail again in a fresh process, neither alone nor after the cases before it",
            style="yellow",
        )

    def tick(self, book: Book) -> None:
        """Show the counts."""
        if self._live is not None:
            self._live.update(Text(progress_line(book)))
        elif time.monotonic() > self._plain_next:
            self._plain_next += PLAIN_INTERVAL_S
            self._console.print(progress_line(book))


def progress_line(book: Book) -> str:
    """Cases, cases/s, worst margins, power, findings, paths: one line."""
    with book.lock:
        of = f"/{book.config.limits.max_examples}" if book.config.limits.max_examples else ""
        rate = book.cases / max(book.search_seconds, 1e-9)
        power = ", ".join(
            f"{name} {book.power[name][0] / book.power[name][1]:.2f}"
            for name in ("dropped", "added")
            if name in book.power
        )
        paths = " ".join(f"{name} {n}" for name, n in book.paths.most_common())
        shrinking = f" | shrinking, {len(book.to_shrink)} to go" if book.search_ended and book.store.findings else ""
        return (
            f"{book.cases}{of} cases, {rate:.1f}/s | worst err/tol: out {book.worst_out:.2f}, "
            f"LSE {book.worst_lse:.2f} | findings {len(book.store.findings)} | {paths}"
            + (f" | power: {power}" if power else "")
            + shrinking
        )
