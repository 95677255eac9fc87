"""The cases that all mutants meet, in one fixed order.

Hypothesis draws a pool, several times as many as are wanted; of these, in turn, the case is taken that reaches most of
what the cases before it did not: triples of structural features (`harness/problems/features.py`), and pairs of a path
and a feature of the numbers. Most faults need two or three things together, such as a path, a cache format and a
scale, or scores far below 0 on one path: so that these mix from the start, and no mutant's place in a table is the
luck of one draw.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from hypothesis import Phase

from harness.engine.driver import derived_seed, run_hypothesis
from harness.problems.features import FEATURES
from harness.problems.problem import Problem
from harness.problems.profiles import ProfileName
from harness.problems.strategies import cases

POOL_FACTOR = 4
_VALUE_GROUPS = ("family", "weights", "poison", "topk", "topk_order", "topk_holes", "scale", "lengths", "block_order")
"""Features of the numbers, of which every case has some: they say little about which code runs."""
PAIR_WEIGHT = 200
"""A pair of path and number counts as much as so many triples. Then 200 cases reach all of 310 pairs (280 if pairs do
not count), 9 of 10 of them by case 94 (161 or later); triples after 100 cases are 3 % fewer for it."""
_NUMBER = {name: index for index, name in enumerate(FEATURES) if name.partition(":")[0] not in _VALUE_GROUPS}


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
    triples, pairs = [_triples(problem) for problem in drawn], [_pairs(problem) for problem in drawn]
    return [drawn[index] for index in most_new_first([(triples, 1), (pairs, PAIR_WEIGHT)], count)]


def _triples(problem: Problem) -> frozenset[tuple[int, int, int]]:
    numbers = sorted(_NUMBER[name] for name in problem.features() if name in _NUMBER)
    return frozenset(combinations(numbers, 3))


def _pairs(problem: Problem) -> frozenset[tuple[str, str]]:
    names = problem.features()
    paths = [name for name in names if name.startswith("path:")]
    return frozenset((path, name) for path in paths for name in names if name.partition(":")[0] in _VALUE_GROUPS)


def most_new_first(kinds: Sequence[tuple[Sequence[frozenset[Any]], int]], count: int) -> list[int]:
    """The first `count` indices of an order in which each next one adds most to those before it.

    Each kind is a set for every index, and the weight of an element of these. Ties go to the lower index. What an
    index adds can only shrink while others are taken, so that an old number is an upper bound and few have to be
    counted anew.
    """
    seen: list[set[Any]] = [set() for _ in kinds]

    def added(index: int) -> int:
        return sum(weight * len(sets[index] - old) for (sets, weight), old in zip(kinds, seen, strict=True))

    waiting = [(-added(index), index, 0) for index in range(len(kinds[0][0]))]
    heapq.heapify(waiting)
    order: list[int] = []
    while waiting and len(order) < count:
        _, index, counted_at = heapq.heappop(waiting)
        if counted_at == len(order):
            for (sets, _), old in zip(kinds, seen, strict=True):
                old |= sets[index]
            order.append(index)
        else:
            heapq.heappush(waiting, (-added(index), index, len(order)))
    return order
