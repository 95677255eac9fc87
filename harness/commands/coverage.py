"""`mlacheck coverage`: what the drawn cases of a profile reach, without running them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from harness.engine.limits import LIMITS
from harness.problems.profiles import ProfileName

if TYPE_CHECKING:
    from harness.problems.problem import Problem
    from reports.coverage import Coverage


@click.command()
@click.option("--profile", type=click.Choice(list(LIMITS)), default="quick", show_default=True)
@click.option("--cases", "number", type=click.IntRange(min=1), default=2000, show_default=True, help="Cases to draw.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Numbers as one JSON object on the last line of stdout.")
def coverage(profile: ProfileName, number: int, seed: int, as_json: bool) -> None:
    """Draw cases as a run does, and count the features and the pairs of features that they reach.

    No kernel runs. Exit code 0.
    """
    from harness.display import console
    from harness.summary import print_coverage

    start = time.monotonic()
    reached = _drawn(profile, seed, number)
    seconds = round(time.monotonic() - start, 3)
    out = console(stderr=as_json)
    print_coverage(out, reached)
    out.print(f"{reached.cases} cases of profile {profile} drawn in {seconds:.1f} s, seed {seed}")
    if as_json:
        numbers = {"profile": profile, "cases": reached.cases, "seed": seed, **reached.numbers(), "seconds": seconds}
        click.echo(json.dumps(numbers))


def _drawn(profile: ProfileName, seed: int, number: int) -> Coverage:
    """What the first `number` different cases reach, drawn in runs of Hypothesis as a shard draws them."""
    from hypothesis import Phase

    from harness.engine.coverage import Counts
    from harness.engine.driver import EPOCH, derived_seed, run_hypothesis
    from harness.problems.strategies import cases

    counts = Counts(profile)
    seen = set[str]()

    def count(problem: Problem) -> None:
        if problem.case_id not in seen and counts.cases < number:
            seen.add(problem.case_id)
            counts.add(problem.features())

    epoch = 0
    while counts.cases < number:
        run_hypothesis(
            count,
            cases(profile),
            run_seed=derived_seed(seed, 0, epoch),
            max_examples=min(EPOCH, number),
            phases=(Phase.generate,),
        )
        epoch += 1
    return counts.coverage()
