"""The cases that all mutants meet, in one fixed order.

Hypothesis draws a pool, several times as many as are wanted; of these, in turn, the case is taken that reaches most
triples of structural features (`harness/problems/features.py`) which the cases before it did not. Most faults need
two or three things together, such as a path, a cache format and a scale: so that these mix from the start, and no
mutant's place in a table is the luck of one draw.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import combinations

from hypothesis import Phase

from harness.engine.driver import derived_seed, run_hypothesis
from harness.problems.features import FEATURES
from harness.problems.problem import Problem
from harness.problems.profiles import ProfileName
from harness.problems.strategies import cases

POOL_FACTOR = 4
_VALUE_GROUPS = ("family", "weights", "poison", "topk", "topk_order", "topk_holes", "scale", "lengths", "block_order")
"""Features of the numbers, of which every case has some: they say little about which code runs."""
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
    return [drawn[index] for index in most_new_first([_triples(problem) for problem in drawn], count)]


def _triples(problem: Problem) -> frozenset[tuple[int, int, int]]:
    numbers = sorted(_NUMBER[name] for name in problem.features() if name in _NUMBER)
    return frozenset(combinations(numbers, 3))


def most_new_first(sets: Sequence[frozenset[tuple[int, int, int]]], count: int) -> list[int]:
    """The first `count` indices of an order in which each next set adds most elements to those before it.

    Ties go to the lower index. What a set adds can only shrink while others are taken, so that an old number is an
    upper bound and few sets have to be counted anew.
    """
    seen: set[tuple[int, int, int]] = set()
    waiting = [(-len(elements), index, 0) for index, elements in enumerate(sets)]
    heapq.heapify(waiting)
    order: list[int] = []
    while waiting and len(order) < count:
        _, index, counted_at = heapq.heappop(waiting)
        if counted_at == len(order):
            seen |= sets[index]
            order.append(index)
        else:
            heapq.heappush(waiting, (-len(sets[index] - seen), index, len(order)))
    return order
