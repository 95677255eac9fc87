"""The two kernels that write top-k masks: one for a single request, one for many.

Compiled, a program owns one mask row; interpreted, where a program costs milliseconds, it owns many. Sizes
and strides are run-time arguments that Triton may not specialise on: a new sequence length compiles nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _clear_then_set(
    row: tl.tensor,
    row_exists: tl.tensor,
    query: tl.tensor,
    query_exists: tl.tensor,
    topk_row: tl.tensor,
    limit: tl.tensor,
    topk_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    topk: tl.tensor,
    topk_stride: tl.tensor,
    words: tl.tensor,
    RESERVED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Clear mask rows `row`, then set the bits of the entries `0 <= t < limit` of top-k rows `topk_row`."""
    row_ptrs = mask_ptr + row.to(tl.int64)[:, None] * words
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)[None, :]
        wanted = row_exists[:, None] & (word < words)
        if RESERVED:
            wanted = wanted & ((query[:, None] > 0) | (word < words - 1))
        tl.store(row_ptrs + word, 0, mask=wanted)
    # the words of a row are cleared and set by different threads: no bit may be set before all are cleared
    tl.debug_barrier()
    entry_row_ptrs = topk_ptr + topk_row.to(tl.int64)[:, None] * topk_stride
    for start in range(0, topk, BLOCK):
        slot = start + tl.arange(0, BLOCK)[None, :]
        entry = tl.load(entry_row_ptrs + slot, mask=query_exists[:, None] & (slot < topk), other=-1)
        chosen = (entry >= 0) & (entry < limit[:, None])
        # entries may share a word, and a duplicate shares its bit: OR is atomic and may be repeated
        tl.atomic_or(row_ptrs + (entry >> 5), 1 << (entry & 31), mask=chosen, sem="relaxed")


@triton.jit
def _causal_limit(first_query_pos: tl.tensor, query: tl.tensor, max_seq_len: tl.tensor) -> tl.tensor:
    """First key that a query may not see; int64 inside, as a position may be near the end of int32."""
    return tl.minimum(first_query_pos.to(tl.int64) + query + 1, max_seq_len).to(tl.int32)


_UNSPECIALISED = ["topk", "topk_stride", "max_seq_len", "padded_q", "words"]
_POINTERS = ["topk_ptr", "mask_ptr", "first_pos_ptr"]


@triton.jit(do_not_specialize=["q_len", *_UNSPECIALISED], do_not_specialize_on_alignment=_POINTERS)
def scatter_topk_single_req_kernel(
    topk_ptr: tl.tensor,  # int32 [q_len, topk], rows topk_stride apart
    mask_ptr: tl.tensor,  # int32 [padded_q, words]
    first_pos_ptr: tl.tensor,  # int32 [1]
    q_len: tl.tensor,
    topk: tl.tensor,
    topk_stride: tl.tensor,
    max_seq_len: tl.tensor,
    padded_q: tl.tensor,
    words: tl.tensor,
    HAS_FIRST_POS: tl.constexpr,
    RESERVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Mask of one request: a program owns `ROWS` mask rows, a mask row is a top-k row."""
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    limit = tl.zeros_like(query) + max_seq_len
    if HAS_FIRST_POS:
        limit = _causal_limit(tl.load(first_pos_ptr), query, max_seq_len)
    _clear_then_set(
        query,
        query < padded_q,
        query,
        query < q_len,
        query,
        limit,
        topk_ptr,
        mask_ptr,
        topk,
        topk_stride,
        words,
        RESERVED,
        BLOCK,
    )


@triton.jit(
    do_not_specialize=["batch", *_UNSPECIALISED], do_not_specialize_on_alignment=[*_POINTERS, "starts_ptr"]
)
def scatter_topk_kernel(
    topk_ptr: tl.tensor,  # int32 [total queries, topk], rows topk_stride apart
    mask_ptr: tl.tensor,  # int32 [batch, padded_q, words]
    first_pos_ptr: tl.tensor,  # int32 [batch]
    starts_ptr: tl.tensor,  # int32 [batch + 1], first top-k row of each request
    batch: tl.tensor,
    topk: tl.tensor,
    topk_stride: tl.tensor,
    max_seq_len: tl.tensor,
    padded_q: tl.tensor,
    words: tl.tensor,
    HAS_FIRST_POS: tl.constexpr,
    RESERVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Masks of many requests: a program owns `ROWS` of the `batch * padded_q` mask rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = row // padded_q
    query = row % padded_q
    row_exists = request < batch
    first_row = tl.load(starts_ptr + request, mask=row_exists, other=0)
    next_row = tl.load(starts_ptr + request + 1, mask=row_exists, other=0)
    limit = tl.zeros_like(query) + max_seq_len
    if HAS_FIRST_POS:
        first_pos = tl.load(first_pos_ptr + request, mask=row_exists, other=0)
        limit = _causal_limit(first_pos, query, max_seq_len)
    _clear_then_set(
        row,
        row_exists,
        query,
        first_row + query < next_row,
        first_row + query,
        limit,
        topk_ptr,
        mask_ptr,
        topk,
        topk_stride,
        words,
        RESERVED,
        BLOCK,
    )
