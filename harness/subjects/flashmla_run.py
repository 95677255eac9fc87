"""`python -m harness.subjects.flashmla`: judge FlashMLA's sparse prefill kernel on many drawn cases."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
from pydantic import ValidationError

from harness.subjects.api import NotRunnable, SubjectError
from harness.subjects.flashmla import HEADS, LIBRARY_VARIABLE, SparsePrefill, load_kernel
from harness.subjects.flashmla_cases import FlashMlaCase, draw
from harness.subjects.flashmla_judge import check
from reports.records import CheckRecord

REPEAT_EVERY = 8
SHRINK_SECONDS = 20.0
MAX_FINDINGS = 5


@dataclass
class Tally:
    """Worst margins of a family, by check."""

    cases: int = 0
    findings: int = 0
    margins: dict[str, float] = field(default_factory=dict)

    def add(self, records: list[CheckRecord]) -> None:
        self.cases += 1
        self.findings += any(record.status.is_finding for record in records)
        for record in records:
            if record.margin is not None:
                self.margins[record.check] = max(record.margin, self.margins.get(record.check, 0.0))


def smaller(case: FlashMlaCase) -> Iterator[FlashMlaCase]:
    """Simpler cases next to this one, the boldest first."""
    changes: list[dict[str, object]] = [
        {"queries": 1},
        {"rows": 1},
        {"topk": 128},
        {"heads": 64 if case.heads == 128 else 8},
        {"lengths": False},
        {"sinks": "none"},
        {"own_out": False},
        {"poison": False},
        {"duplicates": "none"},
        {"empty_rows": False},
        {"spread": False},
        {"family": "normal"},
        {"temperature": 1.0},
        {"rows": max(case.rows // 2, 1)},
        {"queries": max(case.queries // 2, 1)},
        {"filled": case.filled / 2 if case.filled > 1 / case.topk else 0.0},
    ]
    for change in changes:
        if any(getattr(case, name) != value for name, value in change.items()):
            yield case.model_copy(update=change)


def first_finding(records: list[CheckRecord]) -> CheckRecord | None:
    """The first record that accuses."""
    return next((record for record in records if record.status.is_finding), None)


def shrink(case: FlashMlaCase, kernel: SparsePrefill, device: torch.device, heads: tuple[int, ...]) -> FlashMlaCase:
    """A smaller case with a finding of the same check; what is left after SHRINK_SECONDS."""
    stop = time.monotonic() + SHRINK_SECONDS
    found = first_finding(check(case, kernel, device))
    progress = found is not None
    while progress and time.monotonic() < stop:
        progress = False
        for candidate in smaller(case):
            if candidate.heads not in heads:
                continue
            record = first_finding(check(candidate, kernel, device))
            if record is not None and found is not None and record.check == found.check:
                case, progress = candidate, True
                break
    return case


@click.command()
@click.option("--cases", type=click.IntRange(min=1), default=500, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the first case.")
@click.option("--library", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="_flashmla_C*.so")
@click.option("--case", "case_json", help="Judge this one case (JSON, as a finding prints it).")
@click.option("--max-time", type=click.FloatRange(min=0), default=0.0, help="Seconds; 0: no limit.")
def main(cases: int, seed: int, library: Path | None, case_json: str | None, max_time: float) -> None:
    """Judge FlashMLA's sparse prefill kernel inside its contract. Exit code 0: clean, 1: findings, 2: could not run."""
    if library is not None:
        os.environ[LIBRARY_VARIABLE] = str(library.resolve())
    try:
        kernel = load_kernel()
        given = None if case_json is None else FlashMlaCase.model_validate_json(case_json)
    except (NotRunnable, SubjectError, ValidationError) as error:
        click.echo(f"could not run: {error}", err=True)
        sys.exit(2)
    device = torch.device("cuda")
    heads = HEADS[torch.cuda.get_device_capability()[0]]
    if given is not None:
        sys.exit(_one(given, kernel, device))
    sys.exit(_many(kernel, device, heads, range(seed, seed + cases), max_time))


def _one(case: FlashMlaCase, kernel: SparsePrefill, device: torch.device) -> int:
    records = check(case, kernel, device, repeat=True)
    for record in records:
        margin = "" if record.margin is None else f"  err/tol {record.margin:.3f}"
        click.echo(f"{record.status:10} {record.check}{margin}  {record.message}")
    return int(first_finding(records) is not None)


def _many(kernel: SparsePrefill, device: torch.device, heads: tuple[int, ...], seeds: range, max_time: float) -> int:
    tallies: dict[str, Tally] = {}
    reasons: Counter[str] = Counter()
    start = time.monotonic()
    done = 0
    for number in seeds:
        if max_time and time.monotonic() - start > max_time:
            break
        case = draw(number, heads)
        records = check(case, kernel, device, repeat=number % REPEAT_EVERY == 0)
        done += 1
        tallies.setdefault(case.family, Tally()).add(records)
        finding = first_finding(records)
        if finding is None:
            continue
        reasons[f"{finding.status} {finding.check}"] += 1
        if reasons.total() <= MAX_FINDINGS:
            small = shrink(case, kernel, device, heads)
            message = (first_finding(check(small, kernel, device)) or finding).message
            # only what differs from a plain case
            content = json.dumps(small.model_dump(mode="json", exclude_defaults=True))
            click.echo(f"case {number}: {finding.status} {finding.check}: {message}")
            click.echo(f"  again: python -m harness.subjects.flashmla --case '{content}'")
    seconds = time.monotonic() - start
    click.echo(f"\n{'family':10} {'cases':>6} {'findings':>9} {'out':>7} {'lse':>7} {'max':>7}   worst err/tol")
    for family, tally in sorted(tallies.items()):
        worst = [tally.margins.get(f"mqa.{name}", 0.0) for name in ("out", "lse", "max_logits")]
        numbers = " ".join(f"{value:7.3f}" for value in worst)
        click.echo(f"{family:10} {tally.cases:6} {tally.findings:9} {numbers}")
    click.echo(f"{done} cases in {seconds:.0f} s, {reasons.total()} with findings: {dict(reasons) or 'none'}")
    return int(bool(reasons))
