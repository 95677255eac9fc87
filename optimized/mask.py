"""Bit-packed top-k masks, shared by all heads.

A mask is `[B, padded_q, words]` int32: key `k` of a segment is bit `k & 31` (least significant first) of word
`k >> 5` of its query row. `padded_q` and `words` are rounded up so that every tile of the attention kernels
reads inside the allocation and 128 bits at a time.

    keys(b, i) = { t in the top-k row : 0 <= t < max_seq_len, t <= first_query_pos[b] + i }

Entries that are negative or past the end set no bit, duplicates set theirs once, order is irrelevant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton

from optimized.mask_kernels import scatter_topk_kernel, scatter_topk_single_req_kernel
from optimized.rounding import IS_INTERPRETED
from optimized.validation import (
    MAX_KERNEL_ROWS,
    device_of,
    require_int,
    require_launchable,
    require_lengths,
    require_tensor,
)

BITS_PER_WORD = 32
WORDS_PER_VECTOR = 4
"""Rows are whole 128-bit vectors, so that every row starts 16-byte aligned when the workspace does."""
DEFAULT_TOPK_MASK_WORKSPACE_WORDS = 33_554_432
"""128 MiB: the suffix mask of one 32,768-token prefill, exactly."""

_BLOCK = 1024  # words cleared and slots scattered by one loop step of a compiled program
_INTERPRETED_ELEMENTS = 1 << 20  # elements of one step of an interpreted program


def topk_mask_shape(
    batch_size: int, max_query_len: int, max_key_len: int, reserve_key_starts_word: bool = False
) -> tuple[int, int, int]:
    """`(B, padded_q, words)` of the mask of `batch_size` requests.

    Query rows are rounded up to the attention tile (128 up to 128 queries, else 256); words hold
    `max_key_len` bits, one more word if the key start is kept in the row, rounded up to a multiple of 4.

    Raises TypeError or ValueError for sizes that are no ints >= 0.
    """
    require_int("batch_size", batch_size, 0)
    require_int("max_query_len", max_query_len, 0)
    require_int("max_key_len", max_key_len, 0)
    tile_m = 128 if max_query_len <= 128 else 256
    words = math.ceil(max_key_len / BITS_PER_WORD) + int(reserve_key_starts_word)
    return batch_size, _round_up(max_query_len, tile_m), _round_up(words, WORDS_PER_VECTOR)


def masked_mha_workspace_fits(
    batch_size: int, max_query_len: int, max_context_chunk_seq_len: int, workspace_numel: int
) -> bool:
    """Whether the suffix mask and the mask of every context chunk fit `workspace_numel` int32 words.

    `max_context_chunk_seq_len` is the longest per-request length in any chunk (0 without context). The global
    mask has its own test in `try_build_global_mask`.
    """
    require_int("max_context_chunk_seq_len", max_context_chunk_seq_len, 0)
    require_int("workspace_numel", workspace_numel, 0, maximum=2**63 - 1)
    longest = max(max_query_len, max_context_chunk_seq_len)
    return math.prod(topk_mask_shape(batch_size, max_query_len, longest)) <= workspace_numel


def slice_topk_per_req(topk_all: torch.Tensor, q_lens: Sequence[int]) -> list[torch.Tensor]:
    """Top-k rows `[T, topk]` of a batch -> one `[q_i, topk]` view per request.

    Raises ValueError unless the `q_lens` add up to `T`.
    """
    require_tensor("topk_all", topk_all, (None, None), torch.int32)
    lengths = require_lengths("q_lens", q_lens)
    if sum(lengths) != topk_all.shape[0]:
        raise ValueError(
            f"q_lens add up to {sum(lengths)}, must be {topk_all.shape[0]}, the rows of topk_all"
        )
    return list(topk_all.split(lengths)) if lengths else []


def remap_topk_to_ranges(
    topk_per_req: Sequence[torch.Tensor],
    range_starts: Sequence[int] | torch.Tensor,
    range_lens: Sequence[int],
) -> list[torch.Tensor]:
    """Each entry `t` of request `b` -> `t - start[b]` if `start[b] <= t < start[b] + len[b]`, else -1.

    `range_starts` may be an integer tensor on the device of the rows, which is not copied to the host.
    """
    starts: list[int | torch.Tensor] = []
    if isinstance(range_starts, torch.Tensor):
        require_tensor("range_starts", range_starts, (len(topk_per_req),), (torch.int32, torch.int64))
        starts.extend(range_starts.to(torch.int32).unbind())
    else:
        starts.extend(require_lengths("range_starts", range_starts, len(topk_per_req)))
    lens = require_lengths("range_lens", range_lens, len(topk_per_req))
    remapped = []
    for b, (rows, start, length) in enumerate(zip(topk_per_req, starts, lens, strict=True)):
        require_tensor(f"topk_per_req[{b}]", rows, (None, None), torch.int32)
        # a very negative entry minus the start wraps to a large positive one: `rows >= start` shuts it out
        local = rows - start
        remapped.append(torch.where((rows >= start) & (local < length), local, -1))
    return remapped


def build_topk_mask(
    topk_indices_per_req: Sequence[torch.Tensor],
    q_lens: Sequence[int],
    max_q_len: int,
    max_seq_len: int,
    out: torch.Tensor,
    first_query_pos: torch.Tensor | None = None,
    *,
    reserve_key_starts_word: bool = False,
    query_start_loc: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the mask of a batch into `out` and return it as `[B, padded_q, words]` int32.

    `topk_indices_per_req[b]` is `[q_lens[b], topk]` int32. `out` is a flat int32 workspace of at least the
    needed words, or a contiguous int32 tensor of the mask's shape; it may hold anything. Every word of every
    padded row is written, except the key-start word (last word of query row 0 of each request) if reserved.
    With `first_query_pos [B]` int32 row `i` keeps only keys `<= first_query_pos[b] + i`. `query_start_loc
    [B + 1]` int32 is the device's copy of the cumulative `q_lens`; without it the host's list is copied.

    Raises TypeError or ValueError, before any write, for arguments of a wrong type, shape or device, and
    ValueError naming the words needed, the batch shape and the words held if `out` is too small.
    """
    batch = len(topk_indices_per_req)
    lens = require_lengths("q_lens", q_lens, batch)
    require_int("max_q_len", max_q_len, max(lens, default=0))
    require_int("max_seq_len", max_seq_len, 0)
    mask = _mask_view(out, topk_mask_shape(batch, max_q_len, max_seq_len, reserve_key_starts_word))
    topk: int | None = None
    for b, rows in enumerate(topk_indices_per_req):
        require_tensor(f"topk_indices_per_req[{b}]", rows, (lens[b], topk), torch.int32, out.device)
        topk = rows.shape[1]
    if first_query_pos is not None:
        require_tensor("first_query_pos", first_query_pos, (batch,), torch.int32, out.device)
        first_query_pos = first_query_pos.contiguous()
    if query_start_loc is not None:
        require_tensor("query_start_loc", query_start_loc, (batch + 1,), torch.int32, out.device)
        query_start_loc = query_start_loc.contiguous()
    if mask.numel() == 0:
        return mask
    require_launchable("out", out)
    packed = _packed_rows(topk_indices_per_req, sum(lens))
    _, padded_q, words = mask.shape
    require_int("batch * padded queries of the mask", batch * padded_q, 0, MAX_KERNEL_ROWS)
    block = _block_size(words, packed.shape[1])
    rows_per_program = min(1024, _INTERPRETED_ELEMENTS // block) if IS_INTERPRETED else 1
    shared = {
        "HAS_FIRST_POS": first_query_pos is not None,
        "RESERVED": reserve_key_starts_word,
        "ROWS": rows_per_program,
        "BLOCK": block,
    }
    positions = mask if first_query_pos is None else first_query_pos  # any pointer: not read without the flag
    sizes = (packed.shape[1], packed.stride(0), max_seq_len, padded_q, words)
    with device_of(mask):
        if batch == 1:
            grid = (triton.cdiv(padded_q, rows_per_program),)
            scatter_topk_single_req_kernel[grid](packed, mask, positions, lens[0], *sizes, **shared)
            return mask
        if query_start_loc is None:
            starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            query_start_loc = starts.to(mask.device)
        grid = (triton.cdiv(batch * padded_q, rows_per_program),)
        scatter_topk_kernel[grid](packed, mask, positions, query_start_loc, batch, *sizes, **shared)
    return mask


def try_build_global_mask(
    topk_per_req: Sequence[torch.Tensor],
    q_lens: Sequence[int],
    context_lens: Sequence[int],
    max_query_len: int,
    max_seq_len: int,
    topk_mask_workspace: torch.Tensor | None,
    *,
    first_query_pos: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """One causal mask over the whole sequences with the key-start word reserved, or None if it does not fit.

    `max_seq_len` is at least the longest `context + query` length. The key-start word is left as it is:
    `set_key_starts` writes it before each attention call. `first_query_pos` is the device's int32 copy of
    `context_lens`; without it the host's list is copied.
    """
    batch = len(topk_per_req)
    lens = require_lengths("q_lens", q_lens, batch)
    contexts = require_lengths("context_lens", context_lens, batch)
    longest = max((context + query for context, query in zip(contexts, lens, strict=True)), default=0)
    require_int("max_seq_len", max_seq_len, longest)
    if topk_mask_workspace is None:
        return None
    shape = topk_mask_shape(batch, max_query_len, max_seq_len, reserve_key_starts_word=True)
    if math.prod(shape) > topk_mask_workspace.numel():
        return None
    if first_query_pos is None:
        first_query_pos = torch.tensor(contexts, dtype=torch.int32, device=topk_mask_workspace.device)
    return build_topk_mask(
        topk_per_req,
        lens,
        max_query_len,
        max_seq_len,
        topk_mask_workspace,
        first_query_pos,
        reserve_key_starts_word=True,
        query_start_loc=query_start_loc,
    )


def set_key_starts(mask: torch.Tensor, key_starts: torch.Tensor) -> None:
    """Write `key_starts [B]` int32 into the reserved word: the last word of query row 0 of each request."""
    require_tensor("mask", mask, (None, None, None), torch.int32)
    require_tensor("key_starts", key_starts, (mask.shape[0],), torch.int32, mask.device)
    if mask.numel():
        mask[:, 0, -1].copy_(key_starts)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _mask_view(out: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """The `[B, padded_q, words]` part of a flat workspace, or a tensor that already has that shape."""
    if isinstance(out, torch.Tensor) and out.dim() == 3:
        require_tensor("out", out, shape, torch.int32)
    else:
        require_tensor("out", out, (None,), torch.int32)
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}, must be contiguous")
    needed = math.prod(shape)
    if out.numel() < needed:
        raise ValueError(
            f"out holds {out.numel()} int32 words, must hold {needed} for a top-k mask of batch shape "
            f"(requests, padded queries, words) = {shape}"
        )
    return out.view(-1)[:needed].view(shape)


def _packed_rows(per_req: Sequence[torch.Tensor], total: int) -> torch.Tensor:
    """All rows as one `[total, topk]` tensor with contiguous entries; neighbouring views are not copied."""
    held = [rows for rows in per_req if rows.shape[0]]
    if not held:
        return per_req[0]
    first = held[0]
    storage = first.untyped_storage().data_ptr()
    offset = first.storage_offset()
    for rows in held:
        adjoins = rows.untyped_storage().data_ptr() == storage and rows.storage_offset() == offset
        if not adjoins or rows.stride() != first.stride():
            return torch.cat(held)
        offset += rows.shape[0] * rows.stride(0)
    packed = first.as_strided((total, first.shape[1]), first.stride())
    return packed if packed.stride(1) == 1 else packed.contiguous()


def _block_size(words: int, topk: int) -> int:
    """Compiled: one block size, or it would be a compile key. Interpreted: no larger than the rows."""
    if not IS_INTERPRETED:
        return _BLOCK
    return min(_BLOCK, int(triton.next_power_of_2(max(words, topk, 1))))
