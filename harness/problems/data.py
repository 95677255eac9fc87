"""Input families: the numbers of a case, as float32 arrays made by exact operations.

Each family shows a class of faults that the others hide: flat scores show a wrong mask, sharp ones a wrong
rescaling, gaps between chunks a wrong merge, heavy tails and offsets in V a wrong rounding, scores far below 0 a
finite number in place of -inf. Latents are drawn
for whole sequences; `tensors.py` puts the context into the cache and the suffix into `kv_c_normed` and
`k_pe`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harness.problems.bits import F32, I64, Stream
from harness.problems.names import LOWEST_SCORES, Family
from harness.problems.problem import Problem

_Q, _LATENT, _ROPE, _WEIGHT, _PICK, _TAIL, _LEVEL = range(501, 508)
_MAX_QUERY_FACTOR = 4096.0
"""Keeps queries inside fp16 whatever the scale."""

_SHIFTED: frozenset[Family] = frozenset({"chunk_gap", "rising", "near_overflow", "low", "very_low", "low_rows"})
"""Families whose latent entry 0 moves the score of a key up or down, through key column 0 of every head."""
_SPLIT: frozenset[Family] = frozenset({"offset_v", "heavy_v"})
"""Families whose keys read the first half of the latent and whose values read the second."""
_GAPS = np.array([0, 16, -16, 32, -8, 24], dtype=np.float32)
_LOGIT = 512.0
"""Shift of `near_overflow`: exp(256) and more overflow float32 unless the maximum is subtracted."""
_LOW: dict[Family, tuple[float, ...]] = {
    "low": (LOWEST_SCORES["low"],),
    "very_low": (-4096.0, LOWEST_SCORES["very_low"]),
    "low_rows": (LOWEST_SCORES["low_rows"],),
}
"""Shifts below 0, one for each seed: exact in every storage type of 16 bits, the lowest just inside fp16. Bounds grow
with the scores: at the lowest about half of the wrong keys show in the numbers, at the others nearly all."""
_ROW_LEVELS = np.array([0.0, 1.0, 2.0**-3, 0.0], dtype=np.float32)
"""`low_rows`: what share of the shift a row takes, head by head."""


@dataclass(frozen=True)
class Values:
    """The numbers of a case, float32, not yet rounded to the storage type. `S` = sum of sequence lengths."""

    q: F32
    """`[T, H, nope + rope]`"""
    latent: F32
    """`[S, kv_lora_rank]`, request after request"""
    k_pe: F32
    """`[S, rope]`"""
    w_kv_b: F32
    """`[kv_lora_rank, H * (nope + v)]`"""


def draw_values(problem: Problem) -> Values:
    """The numbers of a problem from its data seed."""
    return Values(
        q=_queries(problem),
        latent=_latents(problem),
        k_pe=_rope_keys(problem),
        w_kv_b=_weights(problem),
    )


def _queries(problem: Problem) -> F32:
    dims, family = problem.dims, problem.data.family
    shape = (problem.num_tokens, dims.heads, dims.qk)
    if family in ("zero_q", "one_hot"):
        return np.zeros(shape, dtype=np.float32)
    stream = Stream(problem.data.seed, _Q)
    if family == "positive":
        return stream.uniforms(*shape)
    if family == "powers_of_two":
        q = stream.signs(*shape) * _small_powers(stream, *shape)
        return q * np.float32(2.0 ** math.frexp(min(_query_factor(problem), _MAX_QUERY_FACTOR))[1])
    strength = {"flat": 2.0**-10, "sharp": 8.0}.get(family, 1.0)
    q = stream.normals(*shape) * np.float32(min(_query_factor(problem) * strength, _MAX_QUERY_FACTOR))
    if family in _SHIFTED:
        # scale * q0 is in [1/2, 1): the shift of a key's score is its latent entry 0 times that
        q[:, :, 0] = np.float32(2.0 ** -math.frexp(problem.scale)[1])
    if family == "low_rows":
        q[:, :, 0] *= _ROW_LEVELS[_row_levels(problem)]
    if family == "rope_heavy":
        q[:, :, dims.nope :] *= np.float32(2.0**-6)
    return q


def _row_levels(problem: Problem) -> I64:
    """`[T, H]`: index of the level of each row of each head."""
    shape = (problem.num_tokens, problem.dims.heads)
    return Stream(problem.data.seed, _LEVEL).integers(len(_ROW_LEVELS), math.prod(shape)).reshape(shape)


def _query_factor(problem: Problem) -> float:
    """Factor that gives plain scores the standard deviation `temperature`, whatever the scale."""
    return problem.data.temperature / (problem.scale * math.sqrt(problem.dims.qk))


def _latents(problem: Problem) -> F32:
    rank, family = problem.dims.kv_lora_rank, problem.data.family
    total = sum(problem.seq_lens)
    stream = Stream(problem.data.seed, _LATENT)
    if family == "one_hot":
        latent = np.zeros((total, rank), dtype=np.float32)
        latent[np.arange(total), _positions(problem) % rank] = 1.0
        return latent
    if family == "positive":
        return stream.uniforms(total, rank)
    if family == "powers_of_two":
        return stream.signs(total, rank) * _small_powers(stream, total, rank)
    latent = stream.normals(total, rank)
    if family in ("ties", "repeated"):
        latent = latent[_repeated_rows(problem)]
    if family == "tiny":
        latent *= np.float32(2.0**-40 if problem.dtype == "bf16" else 2.0**-7)
    if family == "offset_v":
        latent[:, rank // 2 :] += 4.0 * Stream(problem.data.seed, _TAIL).signs(rank - rank // 2)
    if family == "heavy_v":
        exponent = Stream(problem.data.seed, _TAIL).geometric(8, total, rank - rank // 2)
        latent[:, rank // 2 :] = np.ldexp(latent[:, rank // 2 :], exponent)
    if family in _SHIFTED:
        latent[:, 0] = _score_shift(problem)
    return latent


def _rope_keys(problem: Problem) -> F32:
    rope, family = problem.dims.rope, problem.data.family
    total = sum(problem.seq_lens)
    stream = Stream(problem.data.seed, _ROPE)
    if family == "one_hot":
        return np.zeros((total, rope), dtype=np.float32)
    if family == "positive":
        return stream.uniforms(total, rope)
    if family == "powers_of_two":
        return stream.signs(total, rope) * _small_powers(stream, total, rope)
    k_pe = stream.normals(total, rope)
    if family in ("ties", "repeated"):
        k_pe = k_pe[_repeated_rows(problem)]
    if family == "rope_heavy":
        k_pe *= np.float32(2.0**6)
    return k_pe


def _weights(problem: Problem) -> F32:
    dims, family = problem.dims, problem.data.family
    rank = dims.kv_lora_rank
    stream = Stream(problem.data.seed, _WEIGHT)
    # latent entries that key columns and value columns may read: [low, high)
    k_rows, v_rows = (0, rank), (0, rank)
    if family in _SPLIT and rank > 1:
        k_rows, v_rows = (0, rank // 2), (rank // 2, rank)
    if family in _SHIFTED and rank > 1:
        k_rows, v_rows = (1, rank), (1, rank)
    shape = (rank, dims.heads, dims.nope + dims.v)
    w = np.zeros(shape, dtype=np.float32)
    for columns, (low, high) in ((slice(0, dims.nope), k_rows), (slice(dims.nope, None), v_rows)):
        part = w[low:high, :, columns]
        if problem.data.weights == "exact":
            row = stream.integers(high - low, dims.heads * part.shape[2]).reshape(part.shape[1:])
            sign = stream.signs(*row.shape) if family not in ("positive", "one_hot") else np.float32(1.0)
            np.put_along_axis(part, row[None], sign * np.ones((1, *row.shape), dtype=np.float32), axis=0)
        elif family == "positive":
            part[...] = stream.uniforms(*part.shape) * np.float32(1.0 / math.sqrt(high - low))
        else:
            part[...] = stream.normals(*part.shape) * np.float32(1.0 / math.sqrt(high - low))
    if family in _SHIFTED:
        w[:, :, 0] = 0.0
        w[0, :, 0] = 1.0
    return w.reshape(rank, -1)


def _small_powers(stream: Stream, *shape: int) -> F32:
    """1/4, 1/2, 1, 2 or 4."""
    exponent = stream.integers(5, math.prod(shape)).reshape(shape) - 2
    return np.ldexp(np.float32(1.0), exponent.astype(np.int32))


def _positions(problem: Problem) -> I64:
    """`[S]`: position of each token within its request."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(n, dtype=np.int64) for n in problem.seq_lens)])


def _repeated_rows(problem: Problem) -> I64:
    """`[S]`: the row that each token repeats: one row a request, or one of four for `ties`."""
    distinct = 1 if problem.data.family == "repeated" else 4
    stream = Stream(problem.data.seed, _PICK)
    rows, first = [np.zeros(0, dtype=np.int64)], 0
    for length in problem.seq_lens:
        rows.append(first + stream.integers(max(min(distinct, length), 1), length))
        first += length
    return np.concatenate(rows)


def _score_shift(problem: Problem) -> F32:
    """`[S]`: latent entry 0 of each token."""
    family = problem.data.family
    position = _positions(problem)
    if family == "near_overflow":
        return np.full(position.shape, _LOGIT, dtype=np.float32)
    if family in _LOW:
        levels = _LOW[family]
        return np.full(position.shape, levels[problem.data.seed % len(levels)], dtype=np.float32)
    if family == "rising":
        length = np.repeat(np.array(problem.seq_lens, dtype=np.int64), problem.seq_lens)
        return (position * 48 // np.maximum(length, 1)).astype(np.float32)
    # chunk_gap: one level for each segment of a request, the suffix last
    segment = np.zeros(position.shape, dtype=np.int64)
    starts = np.cumsum([0, *problem.seq_lens])
    parts = [0] * len(problem.requests)
    for chunk in problem.planned_chunks:
        for piece in chunk:
            low = starts[piece.request] + piece.start
            segment[low : low + piece.length] = parts[piece.request]
            parts[piece.request] += 1
    for index, request in enumerate(problem.requests):
        segment[starts[index] + request.context_len : starts[index + 1]] = parts[index]
    return _GAPS[segment % len(_GAPS)]
