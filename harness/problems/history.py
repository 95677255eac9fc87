"""What the calls of a sequence have in common, and which coverage features that gives.

A problem with a history stands for a call that other calls went before. A layer keeps what an engine keeps from
call to call: its weights, its workspaces, its compiled kernels, and for the layers of one model the metadata of the
batch. Needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.problems.problem import Problem

BEFORE = (
    "same_layer",
    "same_metadata",
    "other_scale",
    "other_sizes",
    "other_path",
    "grows",
    "shrinks",
    "one_request_then_many",
    "many_requests_then_one",
    "same_size_class",
)
"""How a call differs from the one directly before it."""
SIZE_CLASS = 16
"""Compilers keep one kernel for all sizes that this divides."""


def same_sizes(one: Problem, other: Problem) -> bool:
    """Whether both calls are of layers with the same sizes, storage type and cache format."""
    return (one.dims, one.dtype, one.paging.kv_cache_dtype) == (other.dims, other.dtype, other.paging.kv_cache_dtype)


def same_metadata(one: Problem, other: Problem) -> bool:
    """Whether one metadata object serves both calls: same lengths, cache pages, chunks, sizes and mask workspace."""
    return (
        same_sizes(one, other)
        and one.layout.num_decode_tokens == other.layout.num_decode_tokens
        and all(
            getattr(one, name) == getattr(other, name)
            for name in ("requests", "paging", "chunks", "mask_workspace_words")
        )
    )


def same_layer(one: Problem, other: Problem) -> bool:
    """Whether one layer serves both calls: same sizes, scales and weights."""
    a, b = one.data, other.data
    return (
        same_sizes(one, other)
        and (one.scale, one.paging.kv_cache_scale) == (other.scale, other.paging.kv_cache_scale)
        and (a.family, a.weights, a.seed) == (b.family, b.weights, b.seed)
    )


def before(problem: Problem) -> set[str]:
    """Those of `BEFORE` that hold between this call and the one before it; none without a history."""
    if not problem.history:
        return set()
    last = problem.history[-1]
    sizes = same_sizes(last, problem)
    launched = zip(_launch_sizes(last), _launch_sizes(problem), strict=True)
    flags = {
        "same_layer": same_layer(last, problem),
        "same_metadata": same_metadata(last, problem),
        "other_scale": sizes and last.scale != problem.scale,
        "other_sizes": not sizes,
        "other_path": last.expected_path() != problem.expected_path(),
        "grows": problem.num_tokens > last.num_tokens,
        "shrinks": problem.num_tokens < last.num_tokens,
        "one_request_then_many": len(last.requests) == 1 and len(problem.requests) > 1,
        "many_requests_then_one": len(last.requests) > 1 and len(problem.requests) == 1,
        "same_size_class": any(a != b and min(a, b) > 0 and a % SIZE_CLASS == b % SIZE_CLASS == 0 for a, b in launched),
    }
    return {name for name, holds in flags.items() if holds}


def _launch_sizes(problem: Problem) -> tuple[int, ...]:
    return problem.num_tokens, problem.max_query_len, problem.max_seq_len, problem.longest_chunk
