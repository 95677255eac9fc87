"""Does shrinking keep the fault, make cases small, and stop in time?"""

from __future__ import annotations

import time

import pytest

from harness.findings.shrink import shrink
from harness.problems.problem import (
    Chunks,
    DataSpec,
    Dims,
    Layout,
    Paging,
    Problem,
    Request,
    TopkSpec,
)
from harness.subjects.contract import Contract
from harness.subjects.domain import Domain
from tests.harness import engine_fakes

BIG = Problem(
    dims=Dims(heads=8, kv_lora_rank=512, nope=128, rope=64, v=128, topk=64, tensor_parallel_size=2),
    dtype="fp16",
    scale=0.3,
    requests=tuple(Request(context_len=c, query_len=q) for c, q in ((300, 17), (0, 40), (77, 129), (512, 3))),
    paging=Paging(block_size=8, order="permuted", table_pad=3, spare_blocks=5),
    chunks=Chunks(row_budget=128, max_context_chunk=64, split_alignment=16),
    mask_workspace_words=4096,
    topk=TopkSpec(kinds=("random", "bit_31", "window", "future"), order="descending", holes="front"),
    data=DataSpec(family="heavy_v", weights="exact", seed=3),
    layout=Layout(num_decode_tokens=3, q_pad=8, out_pad=4, topk_pad=1),
)

NAMES = ("kv_lora_rank", "nope", "rope", "v")


def test_is_everything_that_does_not_matter_taken_away() -> None:
    result = shrink(BIG, lambda p: p.max_query_len >= 20, seconds=30)
    small = result.problem
    assert [(r.context_len, r.query_len) for r in small.requests] == [(0, 20)]
    assert (small.dims.heads, small.dims.kv_lora_rank, small.dims.topk, small.dtype) == (1, 16, 1, "bf16")
    assert (small.layout, small.data.family, small.topk.kinds) == (Layout(), "normal", ("all",))
    assert small.mask_workspace_words is None
    assert result.tries < 150


@pytest.mark.parametrize(
    ("fault", "size"),
    [
        (lambda p: len(p.planned_chunks) >= 2 and p.num_tokens > 0, (1, 1, 34)),
        (lambda p: sum(c > 0 for c in p.context_lens) >= 2, (2, 2, 4)),
        (lambda p: p.max_seq_len > p.dims.topk and p.max_context_len > 31, (1, 1, 33)),
    ],
)
def test_do_faults_of_chunks_batches_and_lengths_become_small(fault, size) -> None:
    small = shrink(BIG, fault, seconds=30).problem
    assert fault(small)
    requests, tokens, keys = size
    assert len(small.requests) <= requests
    assert small.num_tokens <= tokens
    assert sum(small.seq_lens) <= keys


def test_do_explicit_top_k_rows_follow_their_requests() -> None:
    rows = tuple((10 * token, 10 * token + 1) for token in range(9))
    case = engine_fakes.problem((0, 4), (0, 5)).replace(topk=TopkSpec(rows=rows))
    small = shrink(case, lambda p: (60, 61) in (p.topk.rows or ()), seconds=30).problem
    assert len(small.requests) == 1
    assert small.topk.rows == ((40, 41), (50, 51), (60, 61))


def test_are_the_calls_before_the_judged_one_dropped_or_made_small() -> None:
    case = BIG.replace(history=(BIG, engine_fakes.problem((9, 30))))
    assert shrink(case, lambda p: p.num_tokens >= 1, seconds=30).problem.history == ()
    needs_one = shrink(case, lambda p: any(call.max_query_len >= 20 for call in p.history), seconds=30).problem
    (call,) = needs_one.history
    assert [(r.context_len, r.query_len) for r in call.requests] == [(0, 20)]
    assert call.dims.heads == 1


def test_does_a_case_that_cannot_shrink_stay_itself() -> None:
    result = shrink(BIG, lambda p: False, seconds=30)
    assert result.problem == BIG
    assert result.tries > 10


def test_does_it_stop_when_the_time_is_over() -> None:
    def slow(problem: Problem) -> bool:
        time.sleep(0.05)
        return True

    start = time.monotonic()
    result = shrink(BIG, slow, seconds=0.3)
    assert time.monotonic() - start < 1.0
    assert result.tries <= 7


def test_is_no_case_tried_that_is_not_legal_for_the_subject() -> None:
    domain = Domain("attend", Contract(head_dim_multiple=8, zero_lengths=False, topk_multiple=4))
    start = domain.fit(engine_fakes.problem((30, 9), (5, 12)))
    tried: list[Problem] = []

    def fails(problem: Problem) -> bool:
        tried.append(problem)
        return problem.num_tokens >= 3

    found = shrink(start, fails, seconds=20.0, domain=domain)
    assert tried
    assert [p for p in tried if domain.outside(p) is not None] == []
    assert (found.problem.num_tokens, len(found.problem.requests)) == (3, 1)
    assert found.problem.dims.topk == 4


def test_is_a_case_made_smaller_that_was_never_legal_for_the_subject() -> None:
    domain = Domain("attend", Contract(head_dim_multiple=32))
    start = engine_fakes.problem((30, 9), (5, 12))
    assert domain.outside(start) is not None
    found = shrink(start, lambda problem: problem.num_tokens >= 3, seconds=20.0, domain=domain)
    assert (found.problem.num_tokens, found.problem.dims.nope) == (3, 16)


def test_does_shrinking_never_widen_the_dims() -> None:
    small, large = (16, 8, 4, 8), (512, 128, 64, 128)
    domain = Domain("attend", Contract(dims=(large, small)))
    start = engine_fakes.problem((30, 9), (5, 12))
    start = domain.fit(start.replace(dims=start.dims.model_copy(update=dict(zip(NAMES, small, strict=True)))))
    found = shrink(start, lambda problem: problem.num_tokens >= 3, seconds=20.0, domain=domain)
    assert (found.problem.num_tokens, tuple(getattr(found.problem.dims, name) for name in NAMES)) == (3, small)
