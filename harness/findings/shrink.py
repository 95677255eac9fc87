"""Make a failing case smaller while its fingerprint stays the same, in bounded time.

Works on the problem itself and not on Hypothesis's choices, because captured, traced and hand-written cases
have none, and because a try costs a whole prefill: a few dozen tries in the right order must do. Each pass
proposes simpler problems, the greatest simplification first; a proposal that still fails is the new start of
its pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.findings.shrink_history import Changes, Pass, all_calls, changed, drop_history, earlier_calls
from harness.problems.problem import Chunks, DataSpec, Layout, Paging, Problem, Request
from harness.subjects.domain import Domain

MAX_TRIES = 500
SMALL = 16
"""Dims are cut to this before anything smaller is tried: widths below are rarely what a fault needs."""
PLAIN_KINDS = ("all", "random")
"""Kinds of top-k rows, the simplest first."""


@dataclass(frozen=True)
class Shrunk:
    """The smallest failing problem, and how many were tried."""

    problem: Problem
    tries: int


def shrink(
    problem: Problem, fails: Callable[[Problem], bool], *, seconds: float, domain: Domain | None = None
) -> Shrunk:
    """Greedy search for a simpler problem.

    Args:
        problem: a failing one.
        fails: whether a candidate still fails in the same way.
        seconds: no try is started after so long.
        domain: candidates are moved inside, unless the problem itself lies outside: what is not legal for the subject
            may fail in the same way for another reason.
    """
    if domain is not None and domain.outside(problem) is not None:
        domain = None
    deadline = time.monotonic() + seconds
    tried = {problem.case_id}
    best, progress = problem, True
    while progress:
        progress = False
        for propose in PASSES:
            again = True
            while again:
                again = False
                for changes in propose(best):
                    if time.monotonic() > deadline or len(tried) > MAX_TRIES:
                        return Shrunk(best, len(tried) - 1)
                    candidate = changed(best, changes)
                    if candidate is not None and domain is not None:
                        candidate = domain.fit(candidate)
                        candidate = candidate if _width(candidate) <= _width(best) else None
                    if candidate is None or candidate.case_id in tried:
                        continue
                    tried.add(candidate.case_id)
                    if fails(candidate):
                        best, again, progress = candidate, True, True
                        break
    return Shrunk(best, len(tried) - 1)


def _width(p: Problem) -> int:
    """Of all dims; a narrow contract may know no smaller ones."""
    dims = p.dims
    return dims.heads + dims.kv_lora_rank + dims.nope + dims.rope + dims.v + dims.topk


def _halve_all(p: Problem) -> Iterator[Changes]:
    """All lengths, chunk budgets and the top-k together, so that path and chunk count tend to stay."""
    for cut in (8, 4, 2):
        requests = [(i, -(-r.context_len // cut), -(-r.query_len // cut)) for i, r in enumerate(p.requests)]
        least = p.chunks.split_alignment
        chunks = p.chunks.model_copy(
            update={
                "row_budget": max(least, p.chunks.row_budget // cut),
                "max_context_chunk": max(least, p.chunks.max_context_chunk // cut),
            }
        )
        dims = p.dims.model_copy(update={"topk": max(1, p.dims.topk // cut)})
        yield {**_requests(p, requests, dims.topk), "chunks": chunks, "dims": dims}


def _drop_requests(p: Problem) -> Iterator[Changes]:
    n = len(p.requests)
    size = n // 2
    while size:
        for start in range(0, n, size):
            kept = [(i, r.context_len, r.query_len) for i, r in enumerate(p.requests)]
            del kept[start : start + size]
            if kept:
                yield _requests(p, kept)
        size //= 2


def _small_dims(p: Problem) -> Iterator[Changes]:
    small = {name: min(getattr(p.dims, name), SMALL) for name in ("kv_lora_rank", "nope", "rope", "v")}
    yield {"dims": p.dims.model_copy(update={**small, "heads": 1, "tensor_parallel_size": 1})}
    yield {"dims": p.dims.model_copy(update=small)}
    for name, value in {**small, "heads": 1, "tensor_parallel_size": 1, "rope": 0}.items():
        yield {"dims": p.dims.model_copy(update={name: value})}


def _plain_fields(p: Problem) -> Iterator[Changes]:
    """Every special feature that can go, goes."""
    plain_paging = Paging(block_size=p.paging.block_size, seed=p.paging.seed)
    plain_data = DataSpec(seed=p.data.seed)
    plain_topk = {"order": "ascending", "holes": "tail", "any_negative": False, "lowest": False}
    yield {"layout": Layout(), "paging": plain_paging}
    yield {"layout": Layout()}
    yield {"paging": plain_paging}
    yield {"data": plain_data}
    yield {"topk": p.topk.model_copy(update=plain_topk)}
    if p.topk.rows is None:
        for kind in PLAIN_KINDS if set(p.topk.kinds) - set(PLAIN_KINDS) else PLAIN_KINDS[:1]:
            yield {"topk": p.topk.model_copy(update={"kinds": (kind,) * len(p.requests)})}
    yield {"chunks": Chunks(), "mask_workspace_words": None, "force": None}
    yield {"mask_workspace_words": None, "force": None}
    if p.mask_workspace_words is not None:
        yield {"mask_workspace_words": None, "force": "masked_remap"}
    yield {"dtype": "bf16"}
    yield {"scale": 1.0}
    yield from ({"layout": p.layout.model_copy(update={f: v})} for f, v in Layout().model_dump().items())
    yield from ({"paging": p.paging.model_copy(update={f: v})} for f, v in plain_paging.model_dump().items())


def _short_lengths(p: Problem) -> Iterator[Changes]:
    """Query lengths towards 1 and contexts towards 0: all of them, then one by one."""
    lengths = [(i, r.context_len, r.query_len) for i, r in enumerate(p.requests)]
    for most in _towards(1, p.max_query_len):
        yield _requests(p, [(i, c, min(q, most)) for i, c, q in lengths])
    for most in _towards(0, p.max_context_len):
        yield _requests(p, [(i, min(c, most), q) for i, c, q in lengths])
    if len(lengths) > 1:
        for at, (i, c, q) in enumerate(lengths):
            for fewer in _towards(min(1, q), q):
                yield _requests(p, [*lengths[:at], (i, c, fewer), *lengths[at + 1 :]])
            for fewer in _towards(0, c):
                yield _requests(p, [*lengths[:at], (i, fewer, q), *lengths[at + 1 :]])


def _small_topk(p: Problem) -> Iterator[Changes]:
    for topk in _towards(1, p.dims.topk):
        lengths = [(i, r.context_len, r.query_len) for i, r in enumerate(p.requests)]
        yield {**_requests(p, lengths, topk), "dims": p.dims.model_copy(update={"topk": topk})}


_ONE_CALL: tuple[Pass, ...] = (_drop_requests, _halve_all, _small_dims, _plain_fields, _short_lengths, _small_topk)
PASSES: tuple[Pass, ...] = (drop_history, all_calls(_ONE_CALL), *_ONE_CALL, earlier_calls(_ONE_CALL))


def _towards(low: int, high: int) -> Iterator[int]:
    """Values below `high`, nearest to `low` first, each step half as bold."""
    step = high - low
    while step > 0:
        yield high - step
        step //= 2


def _requests(p: Problem, kept: list[tuple[int, int, int]], topk: int | None = None) -> Changes:
    """Only these requests (index, context length, query length), with what runs along requests and tokens."""
    spec = p.topk
    if spec.rows is None:
        spec = spec.model_copy(update={"kinds": tuple(spec.kinds[i] for i, _, _ in kept)})
    else:
        starts = p.token_offsets
        rows = tuple(row[:topk] for i, _, q in kept for row in spec.rows[starts[i] : starts[i] + q])
        spec = spec.model_copy(update={"rows": rows, "kinds": ()})
    return {"requests": tuple(Request(context_len=c, query_len=q) for _, c, q in kept), "topk": spec}
