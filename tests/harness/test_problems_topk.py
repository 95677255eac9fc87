"""Does every kind of top-k row have the property that it is named for?"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from harness.problems.names import HOLES, SLOT_ORDERS, TOPK_KINDS, TopkKind
from harness.problems.problem import Chunks, Dims, Problem, Request, TopkSpec
from harness.problems.topk import topk_rows

CONTEXT, QUERY, TOPK, BLOCK = 170, 41, 12, 16
SEQ = CONTEXT + QUERY


def make(kind: TopkKind, *, context: int = CONTEXT, query: int = QUERY, topk: int = TOPK, **spec: object) -> Problem:
    return Problem(
        dims=Dims(heads=1, kv_lora_rank=4, nope=4, rope=0, v=4, topk=topk),
        scale=0.5,
        requests=(Request(context_len=30, query_len=5), Request(context_len=context, query_len=query)),
        chunks=Chunks(row_budget=64, max_context_chunk=64),
        topk=TopkSpec.model_validate({"kinds": ("random", kind), "seed": 5, **spec}),
    )


def rows_of(problem: Problem) -> list[list[int]]:
    """Entries of each row of the second request."""
    rows = topk_rows(problem)
    assert rows.shape == (problem.num_tokens, problem.dims.topk)
    assert rows.min() >= -(2**31)
    assert rows.max() < 2**31
    return [[int(k) for k in row] for row in rows[5:]]


def keys_of(row: list[int], position: int) -> set[int]:
    """The allowed set of a row."""
    return {key for key in row if 0 <= key <= position}


Promise = Callable[[int, list[int], set[int]], bool]
"""position, entries, allowed set -> kept?"""

PROMISES: dict[TopkKind, Promise] = {
    "random": lambda p, row, keys: len(keys) == len(row) == TOPK,
    "window": lambda p, row, keys: keys == set(range(p - TOPK + 1, p + 1)),
    "sinks": lambda p, row, keys: keys == {0, 1, 2, 3},
    "sinks_window": lambda p, row, keys: keys == {0, 1, 2, *range(p - 8, p + 1)},
    "all": lambda p, row, keys: keys == set(range(TOPK)),
    "one_block": lambda p, row, keys: bool(keys) and len({k // BLOCK for k in keys}) == 1,
    "one_column": lambda p, row, keys: bool(keys) and len({k % 32 for k in keys}) == 1,
    "bit_31": lambda p, row, keys: bool(keys) and {k % 32 for k in keys} == {31},
    "last_word": lambda p, row, keys: {k // 32 for k in keys} in ({p // 32}, {(CONTEXT - 1) // 32}),
    "boundary_bits": lambda p, row, keys: {k % 32 for k in keys} == {0, 31} and len(keys) >= 11,
    "context_only": lambda p, row, keys: len(keys) == TOPK and max(keys) < CONTEXT,
    "suffix_only": lambda p, row, keys: len(keys) == min(TOPK, p - CONTEXT + 1) and min(keys) >= CONTEXT,
    "one_chunk": lambda p, row, keys: len(keys) == TOPK and max(keys) < CONTEXT,
    "straddle": lambda p, row, keys: max(keys) - min(keys) < 16,
    "self_only": lambda p, row, keys: keys == {p},
    "past_end": lambda p, row, keys: max(row) >= SEQ and len(keys) == TOPK // 2,
    "future": lambda p, row, keys: all(0 <= k < SEQ for k in row),
    "duplicates": lambda p, row, keys: len(keys) == 4 and all(row.count(k) == 3 for k in keys),
    "overlap": lambda p, row, keys: len(keys) == TOPK and max(keys) <= CONTEXT,
    "some_empty": lambda p, row, keys: len(keys) in (0, TOPK),
    "all_empty": lambda p, row, keys: row == [-1] * TOPK,
    "alternate": lambda p, row, keys: len(keys) == TOPK and {k % 2 for k in keys} == {p % 2},
}


@pytest.mark.parametrize("kind", TOPK_KINDS)
def test_each_row_of_a_kind_keeps_its_promise(kind: TopkKind) -> None:
    for i, row in enumerate(rows_of(make(kind))):
        position = CONTEXT + i
        keys = keys_of(row, position)
        assert PROMISES[kind](position, row, keys), (kind, position, row)


@pytest.mark.parametrize("kind", TOPK_KINDS)
@pytest.mark.parametrize(
    ("context", "query", "topk"), [(0, 1, 1), (0, 70, 3), (1, 2, 40), (33, 0, 4), (64, 3, 1), (31, 33, 64)]
)
def test_every_kind_serves_every_shape(kind: TopkKind, context: int, query: int, topk: int) -> None:
    problem = make(kind, context=context, query=query, topk=topk, any_negative=True)
    rows = rows_of(problem.replace(force="masked"))
    assert len(rows) == query
    if kind != "duplicates":
        for i, row in enumerate(rows):
            keys = [k for k in row if 0 <= k <= context + i]
            assert len(keys) == len(set(keys))


def test_kinds_that_speak_of_the_whole_request_say_it_over_all_rows() -> None:
    chunk_of = {
        k: i
        for i, chunk in enumerate(make("random").planned_chunks)
        for p in chunk
        if p.request == 1
        for k in range(p.start, p.start + p.length)
    }
    one_chunk = {chunk_of[k] for row in rows_of(make("one_chunk")) for k in row}
    assert len(one_chunk) == 1
    assert len({frozenset(row) for row in rows_of(make("overlap"))}) == 1
    future = [k > CONTEXT + i for i, row in enumerate(rows_of(make("future"))) for k in row]
    assert 0 < sum(future) < len(future)
    empty = [not keys_of(row, SEQ) for row in rows_of(make("some_empty"))]
    assert 0 < sum(empty) < len(empty)
    edges = {p.start for chunk in make("random").planned_chunks for p in chunk if p.request == 1} | {CONTEXT}
    straddled = {e for row in rows_of(make("straddle")) for e in edges if min(row_keys(row)) < e <= max(row_keys(row))}
    assert len(straddled) >= 2
    alternate = rows_of(make("alternate"))
    assert all(not set(a) & set(b) for a, b in pairwise(alternate))


def row_keys(row: list[int]) -> list[int]:
    return [k for k in row if k >= 0]


@pytest.mark.parametrize("order", SLOT_ORDERS)
def test_slots_are_ordered_as_asked(order: str) -> None:
    for kind in ("random", "duplicates", "sinks", "suffix_only"):
        for row in rows_of(make(kind, order=order)):
            keys = row_keys(row)
            if order != "shuffled":
                assert keys == sorted(keys, reverse=order == "descending")
    shuffled = [row_keys(row) for row in rows_of(make("random"))]
    assert sum(row == sorted(row) for row in shuffled) < 3


@pytest.mark.parametrize("holes", HOLES)
def test_holes_stand_where_asked(holes: str) -> None:
    patterns = set()
    for row in rows_of(make("sinks", holes=holes)):
        pattern = "".join("k" if k >= 0 else "-" for k in row)
        assert pattern.count("k") == 4
        patterns.add(pattern)
    expected = {"tail": {"kkkk--------"}, "front": {"--------kkkk"}, "middle": {"kk--------kk"}}
    if holes == "spread":
        assert len(patterns) > 10
    else:
        assert patterns == expected[holes]


def test_holes_may_hold_any_negative_number() -> None:
    holes = [k for row in rows_of(make("sinks", any_negative=True)) for k in row if k < 0]
    assert min(holes) < -(2**20)
    assert len(set(holes)) > 50
    assert {k for row in rows_of(make("sinks")) for k in row if k < 0} == {-1}


def test_a_fair_share_of_the_negative_numbers_is_the_lowest_of_all() -> None:
    holes = [k for row in rows_of(make("sinks", any_negative=True, lowest=True)) for k in row if k < 0]
    assert 0.15 < holes.count(-(2**31)) / len(holes) < 0.35
    assert len(set(holes)) > 50
    assert {k for row in rows_of(make("sinks", lowest=True)) for k in row if k < 0} == {-1}


def test_long_rows_are_distinct_and_spread_over_the_whole_sequence() -> None:
    problem = make("random", context=40_000, query=70, topk=2048)
    for i, row in enumerate(rows_of(problem)):
        assert len(set(row)) == 2048
        assert max(row) <= 40_000 + i
        assert min(row) < 200
        assert max(row) > 39_800
        assert row != sorted(row)
    assert all(len(set(row)) == 2048 for row in rows_of(make("window", context=40_000, query=70, topk=2048)))


def test_explicit_rows_are_taken_as_they_are() -> None:
    problem = make("random").replace(topk=TopkSpec(rows=((3, 3, -7),) * (QUERY + 5)))
    assert rows_of(problem)[0] == [3, 3, -7] + [-1] * (TOPK - 3)


def test_the_dense_path_gets_stale_rows() -> None:
    problem = make("random", context=3, query=4, topk=64)
    assert problem.expected_path() == "dense"
    rows = topk_rows(problem)
    assert rows.min() < -(2**30)
    assert rows.max() > 2**30


def test_rows_follow_the_seed_and_the_request() -> None:
    assert (topk_rows(make("random")) == topk_rows(make("random"))).all()
    assert (topk_rows(make("random")) != topk_rows(make("random", seed=6))).any()
    twins = Problem(
        dims=make("random").dims,
        scale=0.5,
        requests=(Request(context_len=50, query_len=4),) * 2,
        topk=TopkSpec(kinds=("random", "random")),
    )
    rows = topk_rows(twins)
    assert not np.array_equal(rows[:4], rows[4:])
