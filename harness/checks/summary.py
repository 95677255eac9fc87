"""From the checks of a case to its record: status, first bad stage, margins, and what is worth keeping."""

from __future__ import annotations

from collections.abc import Sequence

from harness.checks.link import first_bad
from reports.records import CaseRecord, CheckRecord, Status

ATTENTION = ("attend", "mqa", "prefill")
"""Stages whose margins are those of a case: where a stage rounds once, the margin is near 1 always."""
MERGE = "merge"
"""Unless a subject does nothing else."""


def summarise(record: CaseRecord, checks: Sequence[CheckRecord], *, nothing_compared: bool) -> None:
    """Status, first bad stage, margins, and the records worth keeping: what is not a plain PASS, one a check."""
    bad = first_bad(list(checks))
    not_run = next((check for check in checks if check.status is Status.NOT_RUN), None)
    if not_run is not None:
        record.status, record.message = Status.NOT_RUN, not_run.message
    elif bad is not None:
        record.status, record.stage, record.message = bad.status, bad.stage, bad.message
    elif any(check.status is Status.WATCH for check in checks):
        record.status = Status.WATCH
    elif nothing_compared:
        record.status = Status.VACUOUS
    worst: dict[str, CheckRecord] = {}
    for check in checks:
        if check.status.is_finding:
            continue
        kept = worst.get(check.check)
        if kept is None or (check.margin or 0.0) > (kept.margin or 0.0):
            worst[check.check] = check
    record.checks = [check for check in checks if check.status.is_finding] + list(worst.values())
    stages = (MERGE,) if record.paths == [MERGE] else ATTENTION
    record.margin_out = _worst_margin(checks, stages, ".out")
    record.margin_lse = _worst_margin(checks, stages, ".lse")


def _worst_margin(checks: Sequence[CheckRecord], stages: Sequence[str], suffix: str) -> float | None:
    margins = [
        check.margin
        for check in checks
        if check.stage in stages and check.check.endswith(suffix) and check.margin is not None
    ]
    return max(margins, default=None)
