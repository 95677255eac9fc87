"""`mlacheck mutants`: does the harness notice planted faults?"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from harness.commands.common import SECONDS, Refusal
from harness.engine.limits import LIMITS
from harness.problems.profiles import ProfileName

if TYPE_CHECKING:
    from harness.mutants.table import Row

SHRINK_S = 30.0


@click.command()
@click.option("--only", multiple=True, metavar="NAME|GLOB", help="Only these mutants; may be given again.")
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Only so many, chosen by the seed.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of cases and sample.")
@click.option("--profile", type=click.Choice(list(LIMITS)), default="quick", show_default=True)
@click.option("--max-cases", type=click.IntRange(min=1), default=200, show_default=True, help="Cases for a mutant.")
@click.option("--jobs", type=click.IntRange(min=1, max=256), help="Mutants side by side; default: one a core.")
@click.option("--subject-attention", "attention", type=click.Choice(["triton", "fa4"]), default="triton")
@click.option("--case-timeout", type=SECONDS, metavar="S", help="HANG after so long; default: 15, on a GPU 120.")
@click.option("--shrink/--no-shrink", "shrinks", default=False, help="Make killing cases smaller, 30 s each.")
@click.option("--json", "as_json", is_flag=True, help="The table as one JSON object on the last line of stdout.")
def mutants(
    only: tuple[str, ...],
    sample: int | None,
    seed: int,
    profile: ProfileName,
    max_cases: int,
    jobs: int | None,
    attention: str,
    case_timeout: float | None,
    shrinks: bool,
    as_json: bool,
) -> None:
    """Run planted faults until the first finding, each in its own process.

    A mutant survives if `--max-cases` cases, and as many of a second seed, show nothing. Exit code 0: all were
    killed; 1: a fault survived, was never reached, or a claim of equivalence was refuted; 2: could not run, or our
    own layer failed a case, so that nothing can be said by it.
    """
    from harness.engine.search import default_jobs
    from harness.mutants.display import print_row, print_summary
    from harness.mutants.registry import MUTANTS
    from harness.mutants.stream import case_stream
    from harness.mutants.table import Table, TableConfig, TableError, all_right, choose, has_cuda, summary
    from harness.problems.problem import Problem

    started = time.monotonic()
    cuda = has_cuda()

    @cache
    def stream(index: int) -> list[Problem]:
        return case_stream(profile, seed + index, max_cases)

    def report(row: Row) -> None:
        print_row(row, to_stderr=as_json)

    try:
        chosen, skipped = choose(list(MUTANTS.values()), only, sample, seed, attention, cuda=cuda)
        stream(0)
        config = TableConfig(
            attention=attention,
            jobs=jobs or default_jobs(),
            case_timeout_s=case_timeout or (120.0 if cuda else 15.0),
            shrink_s=SHRINK_S if shrinks else 0.0,
        )
        table = Table(config, stream)
        rows = table.run(chosen, report)
    except TableError as error:
        raise Refusal(str(error)) from None
    figures = summary(rows) | {
        "seconds": round(time.monotonic() - started, 1),
        "seed": seed,
        "profile": profile,
        "jobs": config.jobs,
        "attention": attention,
    }
    print_summary(rows, skipped, table.unsound, figures, to_stderr=as_json)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "mutants": [_as_json(row) for row in rows if not row.mutant.equivalent],
                    "equivalent": [_as_json(row) for row in rows if row.mutant.equivalent],
                    "not_applicable": [{"name": m.name, "needs": m.needs} for m in skipped],
                    "unsound_cases": [{"case_id": r.case_id, "message": r.message} for r in table.unsound],
                    "summary": figures,
                }
            )
        )
    sys.exit(2 if table.unsound else 0 if all_right(rows) else 1)


def _as_json(row: Row) -> dict[str, Any]:
    mutant = row.mutant
    return {
        "name": mutant.name,
        "stage": mutant.stage,
        "killed": row.verdict == "killed",
        "by": row.by,
        "cases": row.cases,
        "seconds": round(row.seconds, 3),
        "localized": row.localized,
        "verdict": row.verdict,
        "named": row.named,
        "fault": mutant.fault,
        "family": mutant.family,
        "expected": mutant.detector,
        "case_id": row.case_id,
        "size": row.size,
        "message": row.message,
        "proof": mutant.equivalent or None,
    }
