"""Is a right chunk plan passed, and every wrong field of one named?"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.checks.link import first_bad
from harness.checks.plan import ExpectedChunk, check_plan, check_rows_held, expected_plan
from harness.problems.splits import split_context
from optimized.chunks import ChunkedContext, build_chunked_context
from reports.records import CheckRecord, Status

CONTEXTS, QUERIES = [40, 0, 19, 9], [5, 3, 4, 3]
Change = Callable[[ChunkedContext], ChunkedContext | None]


def plan(contexts: list[int] = CONTEXTS, queries: list[int] = QUERIES) -> ChunkedContext | None:
    return build_chunked_context(
        contexts,
        queries,
        row_budget=32,
        max_context_chunk=32,
        split_alignment=4,
        row_width=20,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def check(chunked: Any, contexts: list[int] = CONTEXTS, queries: list[int] = QUERIES) -> CheckRecord | None:
    return first_bad(
        check_plan(
            chunked,
            context_lens=contexts,
            query_lens=queries,
            row_budget=32,
            max_context_chunk=32,
            split_alignment=4,
        )
    )


def with_chunk(chunked: ChunkedContext, index: int, /, **fields: Any) -> ChunkedContext:
    chunks = list(chunked.chunks)
    chunks[index] = replace(chunks[index], **fields)
    return replace(chunked, chunks=chunks)


def test_the_examples_of_the_specification() -> None:
    assert expected_plan([768, 512, 512], 1024, 1024, 16) == [
        ExpectedChunk(0, (0, 0), (768, 256)),
        ExpectedChunk(1, (256, 0), (256, 512)),
    ]
    assert expected_plan([64, 0, 64, 0], 1024, 1024, 16) == [
        ExpectedChunk(0, (0,), (64,)),
        ExpectedChunk(2, (0,), (64,)),
    ]


def test_two_planners_written_apart_agree() -> None:
    r = random.Random(5)
    for _ in range(400):
        contexts = [r.choice((0, r.randint(1, 90))) for _ in range(r.randint(0, 6))]
        alignment = r.choice((1, 4, 16))
        budget, longest = (r.randint(alignment, 100) for _ in range(2))
        ours = expected_plan(contexts, budget, longest, alignment)
        other = split_context(contexts, budget, longest, alignment)
        assert [(c.first, c.starts, c.lengths) for c in ours] == [
            (chunk[0].request, tuple(p.start for p in chunk), tuple(p.length for p in chunk)) for chunk in other
        ]


@pytest.mark.parametrize(
    ("contexts", "queries"),
    [(CONTEXTS, QUERIES), ([0, 0], [3, 4]), ([], []), ([64], [1]), ([5, 5, 0, 0, 5], [0, 2, 1, 3, 4])],
)
def test_a_right_plan_passes(contexts: list[int], queries: list[int]) -> None:
    assert check(plan(contexts, queries), contexts, queries) is None


@pytest.mark.parametrize(
    ("index", "field", "value"),
    [
        (0, "index", 1),
        (1, "request_slice", slice(0, 2)),
        (1, "token_slice", slice(0, 4)),
        (0, "continuation_token_end", 0),
        (1, "continuation_token_end", 4),
        (0, "is_continuation", True),
        (1, "is_continuation", False),
        (2, "num_context_tokens", 27),
        (2, "query_start_loc", torch.tensor([0, 4, 8])),
        (2, "query_start_loc", torch.tensor([8, 12, 15])),
        (2, "max_query_len", 3),
        (2, "cu_seq_lens", torch.tensor([0, 18, 28])),
        (2, "max_seq_len", 28),
        (2, "token_to_seq", torch.tensor([0] * 18 + [1] * 10)),
    ],
)
def test_every_derived_field_is_checked(index: int, field: str, value: object) -> None:
    chunked = plan()
    assert chunked is not None
    if field == "continuation_token_end" and index == 0:  # means nothing where nothing is continued
        assert check(with_chunk(chunked, index, **{field: value})) is None
        return
    bad = check(with_chunk(chunked, index, **{field: value}))
    assert bad is not None
    assert (bad.stage, bad.status, bad.place.chunk) == ("plan", Status.FAIL, index)
    assert bad.check == f"plan.{field}"


@pytest.mark.parametrize(
    "change",
    [
        lambda c: with_chunk(c, 1, starts=torch.tensor([31])),
        lambda c: with_chunk(c, 1, starts=torch.tensor([0])),
        lambda c: with_chunk(c, 0, seq_lens=torch.tensor([28])),
        lambda c: replace(c, chunks=c.chunks[:2]),
        lambda c: replace(c, chunks=c.chunks[1:]),
        lambda c: replace(c, chunks=[*c.chunks, c.chunks[-1]]),
        lambda c: replace(c, chunks=[c.chunks[1], c.chunks[0], c.chunks[2]]),
        lambda c: None,
    ],
    ids=["start off by one", "start again", "short", "last missing", "first missing", "twice", "swapped", "none"],
)
def test_wrong_ranges_are_accused(change: Change) -> None:
    chunked = plan()
    assert chunked is not None
    bad = check(change(chunked))
    assert bad is not None
    assert bad.check == "plan.chunks"


def test_a_plan_without_context_is_accused() -> None:
    bad = check(plan(), [0, 0, 0, 0], QUERIES)
    assert bad is not None
    assert "present" in bad.message


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"context_lens": torch.tensor([40, 0, 19, 8])}, "plan.context_lens"),
        ({"context_lens_list": [40, 0, 19, 8]}, "plan.context_lens"),
        ({"empty_token_slices": []}, "plan.empty_token_slices"),
        ({"empty_token_slices": [slice(5, 9)]}, "plan.empty_token_slices"),
    ],
)
def test_batch_fields_are_checked(fields: dict[str, Any], name: str) -> None:
    chunked = plan()
    assert chunked is not None
    bad = check(replace(chunked, **fields))
    assert bad is not None
    assert bad.check == name


def test_the_workspace_must_hold_the_budget() -> None:
    assert check_rows_held(torch.empty(32, 20), 32, 20).status is Status.PASS
    assert check_rows_held(torch.empty(31, 20), 32, 20).status is Status.FAIL
