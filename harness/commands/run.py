"""`mlacheck run`: the main job."""

from __future__ import annotations

import json
import secrets
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click

from harness.commands.common import SECONDS, Refusal, named_subject
from harness.commands.vllm_path import vllm_path_option
from harness.engine.limits import LIMITS
from harness.problems.profiles import ProfileName


@click.command()
@click.option(
    "--subject",
    default="ours[triton]",
    show_default=True,
    help="What is put under test: a name of `mlacheck list subjects`, FILE.py:FUNCTION or MODULE:FUNCTION.",
)
@click.option("--stage", help="Stage of a function that is not decorated: attend, mqa, mask, gather, merge, ...")
@vllm_path_option
@click.option("--profile", type=click.Choice(list(LIMITS)), default="quick", show_default=True)
@click.option("--max-examples", type=click.IntRange(min=1), help="Cases in total; default: the profile's.")
@click.option("--max-time", type=SECONDS, metavar="S", help="Seconds of search.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the search; default: a new one, printed.")
@click.option("--jobs", type=click.IntRange(min=1, max=256), help="Workers; default: one a core, four a GPU.")
@click.option("--out", type=click.Path(path_type=Path), help="Run folder; default: runs/TIME-ID here.")
@click.option("-x", "--exit-first", is_flag=True, help="Draw no further case after the first finding.")
@click.option("--shrink/--no-shrink", default=True, help="Make findings smaller, 30 s each at most.")
@click.option("--json", "as_json", is_flag=True, help="Summary as one JSON object on the last line of stdout.")
def run(
    subject: str,
    stage: str | None,
    profile: ProfileName,
    max_examples: int | None,
    max_time: float | None,
    seed: int | None,
    jobs: int | None,
    out: Path | None,
    exit_first: bool,
    shrink: bool,
    as_json: bool,
) -> None:
    """Draw cases, judge each one stage by stage and end to end, and report.

    Exit code 0: clean; 1: findings; 2: could not run.
    """
    from harness.display import Display
    from harness.engine.book import RunConfig
    from harness.engine.search import CannotRun, default_jobs, new_seed
    from harness.engine.search import run as run_search
    from harness.summary import print_summary
    from reports.coverage import read_coverage
    from reports.markdown import run_markdown
    from reports.runs import read_meta, read_rows
    from reports.tables import case_frame, summary

    subject = named_subject(subject, stage)
    limits = LIMITS[profile]
    if max_examples or max_time:
        limits = replace(limits, max_examples=max_examples, max_time_s=max_time)
    start = time.monotonic()
    config = RunConfig(
        subject=subject,
        profile=profile,
        limits=limits,
        out=out or _new_folder(Path("runs")),
        seed=new_seed() if seed is None else seed,
        jobs=jobs or default_jobs(),
        exit_first=exit_first,
        shrink_s=30.0 if shrink else 0.0,
    )
    try:
        with Display() as display:
            outcome = run_search(config, display)
    except CannotRun as error:
        raise Refusal(str(error)) from None
    meta = read_meta(config.out).model_copy(update={"seconds": time.monotonic() - start})
    meta.write(config.out)
    rows = list(read_rows(config.out))
    findings = list(outcome.book.store.findings.values())
    (config.out / "report.md").write_text(run_markdown(config.out, rows), encoding="utf-8")
    coverage = read_coverage(config.out)
    numbers = summary(case_frame(rows)) | {
        **({} if coverage is None else coverage.numbers()),
        "findings": len(findings),
        "seconds": round(meta.seconds or 0.0, 3),
        "search_seconds": round(meta.search_seconds or 0.0, 3),
        "cases_per_second": round(len(rows) / max(meta.search_seconds or 0.0, 1e-9), 3),
        "seed": config.seed,
        "jobs": config.jobs,
        "subject": subject,
        "profile": profile,
        "run": str(config.out.resolve()),
        "finding_list": [
            {
                "id": f.id,
                "status": f.record.status,
                "stage": f.record.stage,
                "count": f.count,
                "replay": f.replay_line,
            }
            for f in findings
        ],
        "exit_code": outcome.exit_code,
    }
    (config.out / "summary.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    print_summary(rows, meta, findings, outcome, to_stderr=as_json)
    if as_json:
        click.echo(json.dumps(numbers))
    sys.exit(outcome.exit_code)


def _new_folder(parent: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return parent / f"{stamp}-{secrets.token_hex(3)}"
