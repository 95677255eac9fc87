"""Does the plan cover every context row once, in order, within the budget, and as greedily as it says?"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from optimized.chunks import (
    ChunkedContext,
    PlannedChunk,
    build_chunked_context,
    context_workspace_rows,
    plan_context_chunks,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_context_that_does_not_fit_is_split_at_the_alignment() -> None:
    assert plan_context_chunks([768, 512, 512], 1024, 1024, 16) == [
        PlannedChunk(0, (0, 0), (768, 256)),
        PlannedChunk(1, (256, 0), (256, 512)),
    ]


def test_request_without_context_is_in_no_chunk_and_ends_the_run() -> None:
    assert plan_context_chunks([64, 0, 64, 0], 1024, 1024, 16) == [
        PlannedChunk(0, (0,), (64,)),
        PlannedChunk(2, (0,), (64,)),
    ]


@pytest.mark.parametrize(
    ("contexts", "budget", "longest", "alignment", "lengths"),
    [
        ([], 16, 16, 16, []),
        ([0, 0], 16, 16, 16, []),
        ([1024], 1024, 1024, 16, [(1024,)]),  # fits whole
        ([1025], 1024, 1024, 16, [(1024,), (1,)]),
        ([32, 17], 48, 48, 16, [(32, 16), (1,)]),
        ([40, 40], 48, 48, 16, [(40,), (40,)]),  # no room for an aligned prefix: closed without one
        ([100], 64, 32, 16, [(32,), (32,), (36,)]),  # the rest fits whole, beyond the longest prefix
        ([10, 10], 10, 10, 1, [(10,), (10,)]),
        ([11, 10], 10, 10, 1, [(10,), (1, 9), (1,)]),
        ([30], 8, 8, 3, [(6,), (6,), (6,), (6,), (6,)]),
    ],
)
def test_plan_of_small_batches(
    contexts: list[int], budget: int, longest: int, alignment: int, lengths: list[tuple[int, ...]]
) -> None:
    assert [c.lengths for c in plan_context_chunks(contexts, budget, longest, alignment)] == lengths


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.just(0), st.integers(1, 300)), max_size=8),
    st.integers(1, 20),
    st.integers(0, 200),
    st.integers(0, 200),
)
@example([768, 512, 512], 16, 1008, 1008)
def test_plan_is_complete_ordered_bounded_and_greedy(
    contexts: list[int], alignment: int, extra_budget: int, extra_prefix: int
) -> None:
    budget, longest = alignment + extra_budget, alignment + extra_prefix
    plan = plan_context_chunks(contexts, budget, longest, alignment)
    done = [0] * len(contexts)
    order = []
    for index, chunk in enumerate(plan):
        used = 0
        requests = range(chunk.request_slice.start, chunk.request_slice.stop)
        assert len(requests) == len(chunk.starts) == len(chunk.lengths) > 0
        for place, (request, start, length) in enumerate(
            zip(requests, chunk.starts, chunk.lengths, strict=True)
        ):
            assert length > 0
            assert start == done[request], "a context row is missing, doubled or out of order"
            assert start == 0 or place == 0, "only the first request may be a continuation"
            remaining, room = contexts[request] - start, budget - used
            if remaining <= room:
                assert length == remaining, "a context that fits was cut"
            else:
                assert place == len(requests) - 1, "a prefix did not close its chunk"
                assert length == min(room, longest, remaining - 1) // alignment * alignment
            done[request] += length
            used += length
            order.append((request, start))
        assert used == chunk.num_rows <= budget
        assert chunk.is_continuation == (chunk.starts[0] > 0)
        follower = chunk.request_slice.stop
        cut = done[follower - 1] < contexts[follower - 1]
        if not cut and follower < len(contexts) and contexts[follower]:
            # closed before a request with context: not even an aligned prefix of it had room
            assert contexts[follower] > budget - used
            assert min(budget - used, longest, contexts[follower] - 1) < alignment
        assert cut == (index + 1 < len(plan) and plan[index + 1].is_continuation)
    assert done == contexts
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([16], 15, 16, 16), ValueError, "row_budget is 15, must be >= 16"),
        (([16], 16, 15, 16), ValueError, "max_context_chunk is 15, must be >= 16"),
        (([16], 16, 16, 0), ValueError, "split_alignment is 0, must be >= 1"),
        (([16, -1], 16, 16, 16), ValueError, r"context_lens\[1\] is -1, must be >= 0"),
        (([16, 2.0], 16, 16, 16), TypeError, r"context_lens\[1\] is a float, must be an int"),
        (([16], True, 16, 1), TypeError, "row_budget is a bool, must be an int"),
    ],
)
def test_bad_plans_are_refused_by_name(
    arguments: tuple[list[int], int, int, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_context_chunks(*arguments)


def build(
    contexts: list[int], queries: list[int], budget: int, workspace: torch.Tensor | None = None
) -> ChunkedContext | None:
    return build_chunked_context(
        contexts,
        queries,
        row_budget=budget,
        max_context_chunk=budget,
        split_alignment=4,
        row_width=6,
        dtype=torch.bfloat16,
        device=DEVICE,
        workspace=workspace,
    )


def test_no_context_gives_no_chunked_context() -> None:
    assert build([0, 0], [3, 4], 8) is None
    assert build([], [], 8) is None
    assert build([0, 1], [3, 4], 8) is not None


def test_chunk_fields_of_a_split_batch() -> None:
    # requests: 0 has no context, 1 is split, 2 has no new tokens, 3 and 4 have no context, 5 is whole
    context = build([0, 11, 3, 0, 0, 2], [2, 3, 0, 1, 4, 5], 8)
    assert context is not None
    assert context.context_lens_list == [0, 11, 3, 0, 0, 2]
    assert context.context_lens.tolist() == [0, 11, 3, 0, 0, 2]
    assert context.workspace.shape == (8, 6)
    assert context.workspace.dtype == torch.bfloat16
    assert context.empty_token_slices == [slice(0, 2), slice(5, 10)]
    first, second, third = context.chunks
    assert [c.index for c in context.chunks] == [0, 1, 2]

    assert first.request_slice == slice(1, 2)
    assert first.token_slice == slice(2, 5)
    assert (first.is_continuation, first.continuation_token_end) == (False, 2)
    assert first.starts.tolist() == [0]
    assert first.cu_seq_lens.tolist() == [0, 8]

    assert second.request_slice == slice(1, 3)
    assert second.token_slice == slice(2, 5)
    assert (second.is_continuation, second.continuation_token_end) == (True, 5)
    assert second.num_context_tokens == 6
    assert second.query_start_loc.tolist() == [0, 3, 3]
    assert second.max_query_len == 3
    assert second.cu_seq_lens.tolist() == [0, 3, 6]
    assert second.starts.tolist() == [8, 0]
    assert second.max_seq_len == 3
    assert second.seq_lens.tolist() == [3, 3]
    assert second.token_to_seq.tolist() == [0, 0, 0, 1, 1, 1]

    assert third.request_slice == slice(5, 6)
    assert third.token_slice == slice(10, 15)
    assert third.query_start_loc.tolist() == [0, 5]
    assert third.token_to_seq.tolist() == [0, 0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), max_size=6),
    st.integers(4, 40),
)
def test_chunks_and_empty_slices_cover_every_query_token(
    requests: list[tuple[int, int]], budget: int
) -> None:
    contexts, queries = [c for c, _ in requests], [q for _, q in requests]
    context = build(contexts, queries, budget)
    if context is None:
        assert not any(contexts)
        return
    first_token = [sum(queries[:b]) for b in range(len(queries) + 1)]
    without_context = {t for s in context.empty_token_slices for t in range(s.start, s.stop)}
    expected = {
        t for b, c in enumerate(contexts) if c == 0 for t in range(first_token[b], first_token[b + 1])
    }
    assert without_context == expected
    assert [c.index for c in context.chunks] == list(range(len(context.chunks)))
    seen: set[int] = set()
    for chunk in context.chunks:
        requests_here = range(*chunk.request_slice.indices(len(contexts)))
        tokens = chunk.token_slice
        assert tokens == slice(first_token[requests_here.start], first_token[requests_here.stop])
        assert chunk.query_start_loc.tolist() == [
            first_token[b] - tokens.start for b in [*requests_here, requests_here.stop]
        ]
        assert chunk.max_query_len == max(queries[b] for b in requests_here)
        continued = queries[requests_here.start] if chunk.is_continuation else 0
        assert chunk.continuation_token_end == tokens.start + continued
        # tokens of a continuation were seen before, all others are new
        assert set(range(tokens.start, chunk.continuation_token_end)) <= seen
        assert seen.isdisjoint(range(chunk.continuation_token_end, tokens.stop))
        seen |= set(range(tokens.start, tokens.stop))
        lens = chunk.seq_lens.tolist()
        assert chunk.num_context_tokens == sum(lens) == chunk.cu_seq_lens.tolist()[-1] <= budget
        assert chunk.cu_seq_lens.tolist() == [sum(lens[:n]) for n in range(len(lens) + 1)]
        assert chunk.token_to_seq.tolist() == [n for n, length in enumerate(lens) for _ in range(length)]
        assert chunk.max_seq_len == max(lens)
        assert chunk.seq_lens.device.type == "cpu"
        for name in ("query_start_loc", "cu_seq_lens", "starts", "token_to_seq"):
            tensor = getattr(chunk, name)
            assert (tensor.dtype, tensor.device.type) == (torch.int32, DEVICE.type), name
    assert seen | without_context == set(range(first_token[-1]))


def test_given_workspace_is_used_and_a_small_one_refused() -> None:
    workspace = torch.empty((9, 6), dtype=torch.bfloat16, device=DEVICE)
    context = build([3], [1], 8, workspace)
    assert context is not None
    assert context.workspace is workspace
    with pytest.raises(ValueError, match="workspace has 7 rows, must have row_budget = 8"):
        build([3], [1], 8, workspace[:7])
    with pytest.raises(ValueError, match=r"workspace has shape \(9, 5\), must be \(any, 6\)"):
        build([3], [1], 8, workspace[:, :5])
    with pytest.raises(TypeError, match=r"workspace has dtype torch.float16, must be torch.bfloat16"):
        build([3], [1], 8, workspace.half())


def test_query_and_context_lists_must_agree() -> None:
    with pytest.raises(ValueError, match="query_lens has 1 entries, must have 2"):
        build([3, 4], [1], 8)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((4096, 8, 16, 2048), 16_384),  # capped by 8 requests of 2,048 rows
        ((1024, 256, 64, 2048), 65_536),  # 4 * 256 * 64 = 65,536
        ((163_840, 1024, 64, 2048), 65_536),
        ((100, 4, 16, 2048), 800),
        ((100, 64, 16, 2048), 4096),
        ((1000, 1, 64, 32), 64),  # never below one block
    ],
)
def test_workspace_rows_follow_the_engine(sizes: tuple[int, int, int, int], rows: int) -> None:
    assert context_workspace_rows(*sizes) == rows
