"""Top-k rows: which keys each query selects, kind by kind.

A kind describes the candidates of a row as a count `n` and a map from rank to key; the row then takes at most
`topk` of them, orders them, and places its holes (slots without a key). Work and memory are proportional to
`rows * topk`, so that 8,192 rows over 32,768 keys stay cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.problems.bits import I64, Stream
from harness.problems.names import TopkKind
from harness.problems.parts import TopkSpec
from harness.problems.problem import Problem

_REQUEST_TAG = 2**20
_STALE_TAG = 401
_SORT_LIMIT = 2**21
"""Up to this many (row, key) pairs a row is an exactly uniform draw; beyond, one draw from each stratum."""
_STEPS = (7919, 104729)
"""Primes; no row is a multiple of both, so one of them is coprime to the row's length."""
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Rows:
    """What a kind needs to know about one request."""

    context: int
    query: int
    topk: int
    block_size: int
    chunk_ranges: list[tuple[int, int]]
    """(start, length) of this request's context in each chunk that holds some of it."""
    stream: Stream

    @property
    def seq(self) -> int:
        return self.context + self.query

    @property
    def position(self) -> I64:
        """`[query]`: position of each query within the request."""
        return self.context + np.arange(self.query, dtype=np.int64)


Choice = tuple[I64, Callable[[I64], I64]]
"""Candidates per row `[query]`, and the map from ranks `[query, topk]` to keys of the same shape."""


def topk_rows(problem: Problem) -> I64:
    """`[T, topk]` int64 rows in int32 range, request-local positions, holes negative or past the end."""
    spec, width = problem.topk, problem.dims.topk
    if spec.rows is not None:
        explicit = np.full((problem.num_tokens, width), -1, dtype=np.int64)
        for row, keys in enumerate(spec.rows):
            explicit[row, : len(keys)] = keys
        return explicit
    if problem.expected_path() == "dense":
        # the dense path never reads its rows, and the engine leaves them stale
        stale = Stream(spec.seed, _STALE_TAG).raw(problem.num_tokens * width)
        return stale.view(np.int64).reshape(-1, width) >> 32
    parts = [_request_rows(problem, index, kind) for index, kind in enumerate(spec.kinds)]
    return np.concatenate([np.zeros((0, width), dtype=np.int64), *parts])


def _request_rows(problem: Problem, index: int, kind: TopkKind) -> I64:
    spec, request = problem.topk, problem.requests[index]
    stream = Stream(spec.seed, _REQUEST_TAG + index)
    pieces = [p for chunk in problem.planned_chunks for p in chunk if p.request == index]
    rows = Rows(
        context=request.context_len,
        query=request.query_len,
        topk=problem.dims.topk,
        block_size=problem.paging.block_size,
        chunk_ranges=[(p.start, p.length) for p in pieces],
        stream=stream,
    )
    count, to_key = _KINDS[kind](rows)
    count = np.maximum(count, 0)
    limit = rows.topk if kind != "past_end" else rows.topk // 2
    rank = _pick(count, rows.topk, stream)
    taken = np.minimum(count, limit)
    slot = np.arange(rows.topk, dtype=np.int64)[None, :]
    filled = slot < taken[:, None]
    keys = np.where(filled, to_key(np.where(filled, rank, 0)), 0)
    if kind == "duplicates":
        distinct = np.maximum((taken + 2) // 3, 1)
        keys = np.take_along_axis(keys, slot % distinct[:, None], axis=1)
        taken = np.where(taken > 0, rows.topk, 0)
        filled = slot < taken[:, None]
    if spec.order != "shuffled":
        sign = 1 if spec.order == "ascending" else -1
        sortable: I64 = np.where(filled, sign * keys, INT32_MAX).astype(np.int64)
        keys = sign * np.sort(sortable, axis=1, kind="stable")
    keys = np.where(filled, keys, _hole_values(rows, kind, spec))
    return _place_holes(keys, taken, spec.holes, stream)


def _pick(count: I64, topk: int, stream: Stream) -> I64:
    """`[rows, topk]` distinct ranks below `count` in random order; columns past `count` are meaningless."""
    rows, most = len(count), int(count.max(initial=0))
    if rows * most <= _SORT_LIMIT:
        width = max(most, topk)
        weight = stream.raw(rows * width).reshape(rows, width) >> np.uint64(1)
        weight[np.arange(width)[None, :] >= count[:, None]] = np.uint64(2**64 - 1)
        return np.argsort(weight, axis=1, kind="stable")[:, :topk].astype(np.int64)
    taken = np.maximum(np.minimum(count, topk), 1)[:, None]
    step = np.where(taken % _STEPS[0] == 0, _STEPS[1], _STEPS[0])
    offset = stream.integers(2**31, rows)[:, None]
    stratum = (offset + step * np.arange(topk, dtype=np.int64)[None, :]) % taken
    low = stratum * count[:, None] // taken
    high = np.maximum((stratum + 1) * count[:, None] // taken, low + 1)
    jitter = stream.integers(2**31, rows * topk).reshape(rows, topk) % (high - low)
    return (low + jitter).astype(np.int64)


def _hole_values(rows: Rows, kind: TopkKind, spec: TopkSpec) -> I64:
    shape, size = (rows.query, rows.topk), rows.query * rows.topk
    if kind == "past_end":
        beyond = rows.seq + rows.stream.integers(70, size).reshape(shape)
        return np.where(rows.stream.integers(8, size).reshape(shape) == 0, INT32_MAX, beyond)
    if spec.any_negative:
        near = -1 - rows.stream.integers(64, size)
        far = -1 - rows.stream.integers(2**31, size)
        holes = np.where(rows.stream.integers(2, size) == 0, near, far)
        if spec.lowest:
            holes = np.where(rows.stream.integers(4, size) == 0, INT32_MIN, holes)
        return holes.reshape(shape)
    return np.full(shape, -1, dtype=np.int64)


def _place_holes(keys: I64, taken: I64, holes: str, stream: Stream) -> I64:
    """Move the holes from the tail of each row to where they belong."""
    topk = keys.shape[1]
    slot = np.arange(topk, dtype=np.int64)[None, :]
    empty = topk - taken[:, None]
    if holes == "front":
        source = (slot - empty) % topk
    elif holes == "middle":
        half = taken[:, None] // 2
        hole_or_rest = np.where(slot < half + empty, slot + taken[:, None] - half, slot - empty)
        source = np.where(slot < half, slot, hole_or_rest)
    elif holes == "spread":
        source = _pick(np.full(len(keys), topk, dtype=np.int64), topk, stream)
    else:
        return keys
    return np.take_along_axis(keys, source, axis=1)


def _range(low: I64 | int, high: I64 | int, rows: Rows) -> Choice:
    """Keys `[low, high)` of each row."""
    first = np.zeros(rows.query, dtype=np.int64) + low
    return (np.zeros(rows.query, dtype=np.int64) + high) - first, lambda rank: first[:, None] + rank


def _causal(rows: Rows) -> Choice:
    return _range(0, rows.position + 1, rows)


def _stride(first: int, step: int, rows: Rows) -> Choice:
    """Keys `first, first + step, ...` up to each query's own position."""
    return (rows.position - first) // step + 1, lambda rank: first + step * rank


def _window(rows: Rows) -> Choice:
    return _range(np.maximum(rows.position - rows.topk + 1, 0), rows.position + 1, rows)


def _sinks_window(rows: Rows) -> Choice:
    sinks = np.minimum(max(rows.topk // 4, 1), rows.position + 1)
    low = np.maximum(sinks, rows.position + 1 - (rows.topk - sinks))

    def to_key(rank: I64) -> I64:
        return np.where(rank < sinks[:, None], rank, low[:, None] + rank - sinks[:, None])

    return sinks + np.maximum(rows.position + 1 - low, 0), to_key


def _one_block(rows: Rows) -> Choice:
    size = rows.block_size
    block = rows.stream.integers(2**31, rows.query) % (rows.position // size + 1)
    return _range(block * size, np.minimum((block + 1) * size, rows.position + 1), rows)


def _last_word(rows: Rows) -> Choice:
    """The last word of the row, or the last word of the context: both are partial words as a rule."""
    of_context = (rows.stream.integers(2, rows.query) == 1) & (rows.context > 0)
    last = np.where(of_context, rows.context - 1, rows.position)
    return _range(last // 32 * 32, last + 1, rows)


def _boundary_bits(rows: Rows) -> Choice:
    position = rows.position
    return (position + 32) // 32 + (position + 1) // 32, lambda rank: rank // 2 * 32 + rank % 2 * 31


def _one_chunk(rows: Rows) -> Choice:
    if not rows.chunk_ranges:
        return _range(rows.context, rows.position + 1, rows)
    start, length = rows.chunk_ranges[int(rows.stream.integers(len(rows.chunk_ranges), 1)[0])]
    return _range(start, start + length, rows)


def _straddle(rows: Rows) -> Choice:
    """Up to eight keys on either side of a chunk boundary, of the suffix start, or of a word boundary."""
    edges = [start for start, _ in rows.chunk_ranges if start] + ([rows.context] if rows.context else [])
    edge = np.array(edges or [32], dtype=np.int64)[rows.stream.integers(len(edges) or 1, rows.query)]
    return _range(np.maximum(edge - 8, 0), np.minimum(edge + 8, rows.position + 1), rows)


def _overlap(rows: Rows) -> Choice:
    """One set of keys for every row of the request."""
    base = _pick(np.array([rows.context + 1], dtype=np.int64), rows.topk, rows.stream)[0]
    count = np.full(rows.query, min(rows.topk, rows.context + 1), dtype=np.int64)
    return count, lambda rank: base[rank]


def _some_empty(rows: Rows) -> Choice:
    count, to_key = _causal(rows)
    return np.where(rows.stream.integers(3, rows.query) == 0, 0, count), to_key


def _alternate(rows: Rows) -> Choice:
    """Even keys for even positions, odd keys for odd ones: neighbouring rows share no key."""
    parity = rows.position % 2
    return (rows.position - parity) // 2 + 1, lambda rank: parity[:, None] + 2 * rank


_KINDS: dict[TopkKind, Callable[[Rows], Choice]] = {
    "random": _causal,
    "window": _window,
    "sinks": lambda rows: _range(0, np.minimum(min(rows.topk, 4), rows.position + 1), rows),
    "sinks_window": _sinks_window,
    "all": lambda rows: _range(0, np.minimum(rows.topk, rows.position + 1), rows),
    "one_block": _one_block,
    "one_column": lambda rows: _stride(int(rows.stream.integers(32, 1)[0]), 32, rows),
    "bit_31": lambda rows: _stride(31, 32, rows),
    "last_word": _last_word,
    "boundary_bits": _boundary_bits,
    "context_only": lambda rows: _range(0, rows.context, rows),
    "suffix_only": lambda rows: _range(rows.context, rows.position + 1, rows),
    "one_chunk": _one_chunk,
    "straddle": _straddle,
    "self_only": lambda rows: _range(rows.position, rows.position + 1, rows),
    "past_end": _causal,
    "future": lambda rows: _range(0, rows.seq, rows),
    "duplicates": _causal,
    "overlap": _overlap,
    "some_empty": _some_empty,
    "all_empty": lambda rows: _range(0, 0, rows),
    "alternate": _alternate,
}
