"""The cases that all mutants meet, in one fixed order.

Hypothesis draws a pool, several times as many as are wanted; of these, in turn, the case is taken that reaches most
pairs of features (`harness/problems/features.py`) which the cases before it did not. So sources, paths, cache
formats and odd lengths mix from the start, and no mutant's place in a table is luck of one draw.
"""

from __future__ import annotations

from itertools import combinations

from hypothesis import Phase

from harness.engine.driver import derived_seed, run_hypothesis
from harness.problems.features import FEATURES
from harness.problems.problem import Problem
from harness.problems.profiles import ProfileName
from harness.problems.strategies import cases

POOL_FACTOR = 4
_NUMBER = {name: index for index, name in enumerate(FEATURES)}


def case_stream(profile: ProfileName, seed: int, count: int) -> list[Problem]:
    """`count` different problems of the profile (fewer if so many cannot be drawn), the same for the same seed."""
    pool: dict[str, Problem] = {}

    def keep(problem: Problem) -> None:
        pool.setdefault(problem.case_id, problem)

    run_hypothesis(
        keep,
        cases(profile),
        run_seed=derived_seed(seed, "mutants"),
        max_examples=POOL_FACTOR * count,
        phases=(Phase.generate,),
    )
    drawn = list(pool.values())
    return [drawn[index] for index in most_new_first([_pairs(problem) for problem in drawn])[:count]]


def _pairs(problem: Problem) -> int:
    """The set of feature pairs of a problem, one bit a pair; a feature alone is a pair with itself."""
    numbers = sorted(_NUMBER[name] for name in problem.features() if name in _NUMBER)
    bits = 0
    for low, high in [*combinations(numbers, 2), *zip(numbers, numbers, strict=True)]:
        bits |= 1 << (low * len(_NUMBER) + high)
    return bits


def most_new_first(sets: list[int]) -> list[int]:
    """Order in which each next set (a bit mask) adds most bits to those before it; ties in the given order."""
    order: list[int] = []
    left, seen = list(range(len(sets))), 0
    while left:
        best = max(left, key=lambda index: ((sets[index] & ~seen).bit_count(), -index))
        seen |= sets[best]
        order.append(best)
        left.remove(best)
    return order
