"""The kernel that reads a paged cache, and its launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from optimized.fp8 import decode_e4m3, load_bfloat16, load_float32
from optimized.rounding import IS_INTERPRETED, round_to
from optimized.validation import device_of, rows_are_aligned

DS_MLA_LATENT = 512
DS_MLA_ROPE = 64
DS_MLA_TILE = 128
DS_MLA_SCALES_AT = DS_MLA_LATENT  # byte offsets in a packed row
DS_MLA_ROPE_AT = DS_MLA_SCALES_AT + DS_MLA_LATENT // DS_MLA_TILE * 4
DS_MLA_ROW_BYTES = DS_MLA_ROPE_AT + DS_MLA_ROPE * 2

_LATENT: tl.constexpr = tl.constexpr(DS_MLA_LATENT)
_TILE: tl.constexpr = tl.constexpr(DS_MLA_TILE)
_SCALES_AT: tl.constexpr = tl.constexpr(DS_MLA_SCALES_AT)
_ROPE_AT: tl.constexpr = tl.constexpr(DS_MLA_ROPE_AT)

_COLUMNS = 64  # divides the packed latent's tiles, so that a block of columns has one scale
_TOKENS = 16  # rows of one compiled program
_INTERPRETED_TOKENS = 4096


def launch_gather(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    seq_starts: torch.Tensor | None,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: float,
) -> None:
    """Launch for arguments that `gather_and_maybe_dequant_cache` has checked."""
    if kv_cache_dtype == "auto":  # a copy of bits, NaN payloads included
        src_cache, dst = src_cache.view(torch.int16), dst.view(torch.int16)
    else:
        src_cache = src_cache.view(torch.uint8)
    width = dst.shape[1]
    tokens = min(_INTERPRETED_TOKENS, triton.next_power_of_2(num_tokens)) if IS_INTERPRETED else _TOKENS
    columns = _COLUMNS
    if IS_INTERPRETED and kv_cache_dtype != "fp8_ds_mla":
        columns = triton.next_power_of_2(width)
    with device_of(dst):
        gather_cache_kernel[(triton.cdiv(num_tokens, tokens),)](
            src_cache,
            dst,
            block_table,
            cu_seq_lens,
            token_to_seq,
            cu_seq_lens if seq_starts is None else seq_starts,  # any pointer: not read without the flag
            scale,
            num_tokens,
            src_cache.shape[1],
            src_cache.stride(0),
            src_cache.stride(1),
            dst.stride(0),
            block_table.stride(0),
            block_table.stride(1),
            FORMAT=kv_cache_dtype,
            HAS_STARTS=seq_starts is not None,
            ALIGNED=rows_are_aligned(src_cache, dst),
            WIDTH=width,
            TOKENS=tokens,
            COLUMNS=columns,
        )


@triton.jit(
    do_not_specialize=[
        "scale",
        "num_tokens",
        "block_size",
        "src_block_stride",
        "src_row_stride",
        "dst_row_stride",
        "table_row_stride",
        "table_column_stride",
    ],
    do_not_specialize_on_alignment=[
        "src_ptr",
        "dst_ptr",
        "block_table_ptr",
        "cu_seq_lens_ptr",
        "token_to_seq_ptr",
        "seq_starts_ptr",
    ],
)
def gather_cache_kernel(
    src_ptr: tl.tensor,  # int16 or uint8 [blocks, block_size, row]
    dst_ptr: tl.tensor,  # [tokens, WIDTH]
    block_table_ptr: tl.tensor,  # int32 [requests, max_blocks]
    cu_seq_lens_ptr: tl.tensor,  # int32 [requests + 1]
    token_to_seq_ptr: tl.tensor,  # int32 [tokens]
    seq_starts_ptr: tl.tensor,  # int32 [requests]
    scale: tl.tensor,
    num_tokens: tl.tensor,
    block_size: tl.tensor,
    src_block_stride: tl.tensor,
    src_row_stride: tl.tensor,
    dst_row_stride: tl.tensor,
    table_row_stride: tl.tensor,
    table_column_stride: tl.tensor,
    FORMAT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """A program copies `TOKENS` rows; block id x stride may pass 2^31, so that offsets are int64."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    request = tl.load(token_to_seq_ptr + token, mask=exists, other=0).to(tl.int64)
    position = token - tl.load(cu_seq_lens_ptr + request, mask=exists, other=0)
    if HAS_STARTS:
        position += tl.load(seq_starts_ptr + request, mask=exists, other=0)
    entry = (position // block_size).to(tl.int64)
    block_ptrs = block_table_ptr + request * table_row_stride + entry * table_column_stride
    block = tl.load(block_ptrs, mask=exists, other=0).to(tl.int64)
    row = (position % block_size).to(tl.int64)
    src_rows = src_ptr + block * src_block_stride + row * src_row_stride
    dst_rows = dst_ptr + token.to(tl.int64) * dst_row_stride
    if ALIGNED:
        src_rows = tl.multiple_of(src_rows, 16)
        dst_rows = tl.multiple_of(dst_rows, 16)
    src_rows = src_rows[:, None]
    dst_rows = dst_rows[:, None]
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        live = exists[:, None] & (column < WIDTH)
        if FORMAT == "auto":
            tl.store(dst_rows + column, tl.load(src_rows + column, mask=live, other=0), mask=live)
        else:
            if FORMAT == "fp8_e4m3":
                value = decode_e4m3(tl.load(src_rows + column, mask=live, other=0)) * scale
            elif first < _LATENT:
                tile_scale = load_float32(src_rows + (_SCALES_AT + first // _TILE * 4), exists[:, None])
                value = decode_e4m3(tl.load(src_rows + column, mask=live, other=0)) * tile_scale
            else:
                value = load_bfloat16(src_rows + _ROPE_AT + 2 * (column - _LATENT), live)
            tl.store(dst_rows + column, round_to(value, dst_ptr.dtype.element_ty), mask=live)
