"""Merge of two partials: attention results over disjoint key sets, each an output and a natural-log LSE.

    m = max(LSE_p, LSE_s);  w_p = exp(LSE_p - m);  w_s = exp(LSE_s - m)
    LSE = m + log(w_p + w_s);  out = (w_p out_p + w_s out_s) / (w_p + w_s)

An LSE of -inf says that the side has no keys; +inf is read as -inf (the convention of FlashAttention-2). The
formula is that of the combine step of flash decoding (Dao et al. 2023) and of cascade attention (Ye et al.
2024).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from optimized.chunks import ContextChunk
from optimized.rounding import IS_INTERPRETED, round_to, widen
from optimized.validation import (
    FLOAT_16_BIT_DTYPES,
    MAX_KERNEL_ROWS,
    device_of,
    require_distinct_elements,
    require_int,
    require_launchable,
    require_tensor,
    require_unit_stride,
    rows_are_aligned,
)

OUTPUT_DTYPES = (*FLOAT_16_BIT_DTYPES, torch.float32)
_ROWS = 8  # (token, head) pairs of one compiled program
_INTERPRETED_ELEMENTS = 1 << 20


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
) -> None:
    """Merge two partials of `T` tokens into `output`, and their LSE into `output_lse` if given.

    Outputs are `[T, H, D]` of one dtype (bfloat16, float16 or float32), LSEs `[H, T]` float32; every tensor
    has its own strides, only the last dimension of the outputs must be contiguous. `output` may be one of the
    sides and `output_lse` one of their LSEs. Both sides empty: output 0, LSE -inf. The output of an empty
    side is never read into the result, NaN or not.

    Raises TypeError or ValueError, before any write, for arguments of a wrong type, shape or device.
    """
    require_tensor("output", output, (None, None, None), OUTPUT_DTYPES)
    tokens, heads, width = output.shape
    for name, side in (("prefix_output", prefix_output), ("suffix_output", suffix_output)):
        require_tensor(name, side, output.shape, output.dtype, output.device)
        require_unit_stride(name, side)
    for name, lse in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse)):
        require_tensor(name, lse, (heads, tokens), torch.float32, output.device)
    require_unit_stride("output", output)
    require_distinct_elements("output", output)
    if output_lse is not None:
        require_tensor("output_lse", output_lse, (heads, tokens), torch.float32, output.device)
        require_distinct_elements("output_lse", output_lse)
    if output.numel() == 0:
        return
    require_launchable("output", output)
    pairs = require_int("tokens * heads of output", tokens * heads, 0, MAX_KERNEL_ROWS)
    columns = triton.next_power_of_2(width)
    rows = _ROWS
    if IS_INTERPRETED:
        rows = min(triton.next_power_of_2(pairs), max(1, _INTERPRETED_ELEMENTS // columns))
    lse_out = prefix_lse if output_lse is None else output_lse  # any pointer: not written without the flag
    with device_of(output):
        merge_attn_states_kernel[(triton.cdiv(pairs, rows),)](
            output,
            prefix_output,
            suffix_output,
            lse_out,
            prefix_lse,
            suffix_lse,
            pairs,
            heads,
            output.stride(0),
            output.stride(1),
            prefix_output.stride(0),
            prefix_output.stride(1),
            suffix_output.stride(0),
            suffix_output.stride(1),
            lse_out.stride(0),
            lse_out.stride(1),
            prefix_lse.stride(0),
            prefix_lse.stride(1),
            suffix_lse.stride(0),
            suffix_lse.stride(1),
            WRITE_LSE=output_lse is not None,
            ALIGNED=rows_are_aligned(output, prefix_output, suffix_output),
            WIDTH=width,
            COLUMNS=columns,
            ROWS=rows,
        )


def init_context_partial(
    num_tokens: int, num_heads: int, v_head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The partial of no keys: output `[T, H, v]` of 0 and LSE `[H, T]` of -inf."""
    require_int("num_tokens", num_tokens, 0)
    require_int("num_heads", num_heads, 1)
    require_int("v_head_dim", v_head_dim, 1)
    output = torch.zeros((num_tokens, num_heads, v_head_dim), dtype=dtype, device=device)
    lse = torch.full((num_heads, num_tokens), float("-inf"), dtype=torch.float32, device=device)
    return output, lse


def accumulate_context_chunk(
    output: torch.Tensor,
    lse: torch.Tensor,
    chunk: ContextChunk,
    chunk_output: torch.Tensor,
    chunk_lse: torch.Tensor,
) -> None:
    """Put the attention result of one chunk into the running partial of the batch, in place.

    `output [T, H, v]` and `lse [H, T]` cover the batch, `chunk_output [n, H, v]` and `chunk_lse [H, n]` the
    tokens of `chunk.token_slice`. The tokens before `chunk.continuation_token_end` belong to a request whose
    earlier context is in the partial already and are merged; the others are copied.

    Raises ValueError for a chunk that does not fit the tensors.
    """
    start, stop = chunk.token_slice.start, chunk.token_slice.stop
    require_tensor("output", output, (None, None, None), OUTPUT_DTYPES)
    tokens, heads, width = output.shape
    if stop > tokens:
        raise ValueError(
            f"output has {tokens} tokens, must have at least {stop}, the end of the chunk's tokens"
        )
    require_tensor("lse", lse, (heads, tokens), torch.float32, output.device)
    require_tensor("chunk_output", chunk_output, (stop - start, heads, width), output.dtype, output.device)
    require_tensor("chunk_lse", chunk_lse, (heads, stop - start), torch.float32, output.device)
    merged = chunk.continuation_token_end - start
    if merged:
        running, running_lse = output[start : start + merged], lse[:, start : start + merged]
        merge_attn_states(
            running,
            running,
            running_lse,
            chunk_output[:merged],
            chunk_lse[:, :merged],
            output_lse=running_lse,
        )
    output[start + merged : stop].copy_(chunk_output[merged:])
    lse[:, start + merged : stop].copy_(chunk_lse[:, merged:])


@triton.jit
def _load_lse(ptrs: tl.tensor, exists: tl.tensor) -> tl.tensor:
    lse = tl.load(ptrs, mask=exists, other=float("-inf"))
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit(
    do_not_specialize=[
        "pairs",
        "heads",
        "out_token_stride",
        "out_head_stride",
        "prefix_token_stride",
        "prefix_head_stride",
        "suffix_token_stride",
        "suffix_head_stride",
        "out_lse_head_stride",
        "out_lse_token_stride",
        "prefix_lse_head_stride",
        "prefix_lse_token_stride",
        "suffix_lse_head_stride",
        "suffix_lse_token_stride",
    ],
    do_not_specialize_on_alignment=[
        "out_ptr",
        "prefix_ptr",
        "suffix_ptr",
        "out_lse_ptr",
        "prefix_lse_ptr",
        "suffix_lse_ptr",
    ],
)
def merge_attn_states_kernel(
    out_ptr: tl.tensor,  # [tokens, heads, WIDTH]
    prefix_ptr: tl.tensor,
    suffix_ptr: tl.tensor,
    out_lse_ptr: tl.tensor,  # float32 [heads, tokens]
    prefix_lse_ptr: tl.tensor,
    suffix_lse_ptr: tl.tensor,
    pairs: tl.tensor,
    heads: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    prefix_token_stride: tl.tensor,
    prefix_head_stride: tl.tensor,
    suffix_token_stride: tl.tensor,
    suffix_head_stride: tl.tensor,
    out_lse_head_stride: tl.tensor,
    out_lse_token_stride: tl.tensor,
    prefix_lse_head_stride: tl.tensor,
    prefix_lse_token_stride: tl.tensor,
    suffix_lse_head_stride: tl.tensor,
    suffix_lse_token_stride: tl.tensor,
    WRITE_LSE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """A program merges `ROWS` (token, head) pairs, and reads no other: `out` may be one of its inputs."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = pair < pairs
    token = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    prefix_lse_ptrs = prefix_lse_ptr + head * prefix_lse_head_stride + token * prefix_lse_token_stride
    suffix_lse_ptrs = suffix_lse_ptr + head * suffix_lse_head_stride + token * suffix_lse_token_stride
    prefix_lse = _load_lse(prefix_lse_ptrs, exists)
    suffix_lse = _load_lse(suffix_lse_ptrs, exists)
    # a NaN LSE is a fault of the caller's and must stay visible
    prefix_leads = (prefix_lse > suffix_lse) | (prefix_lse != prefix_lse)
    largest = tl.where(prefix_leads, prefix_lse, suffix_lse)
    empty = largest == float("-inf")
    shift = tl.where(empty, 0.0, largest)  # -inf - -inf would be NaN
    prefix_weight = tl.exp(prefix_lse - shift)
    suffix_weight = tl.exp(suffix_lse - shift)
    total = tl.where(empty, 1.0, prefix_weight + suffix_weight)
    column = tl.arange(0, COLUMNS)[None, :]
    live = exists[:, None] & (column < WIDTH)
    # an empty side is not even loaded: its output may be NaN, and 0 * NaN is NaN
    from_prefix = live & (prefix_lse != float("-inf"))[:, None]
    from_suffix = live & (suffix_lse != float("-inf"))[:, None]
    prefix_rows = prefix_ptr + token * prefix_token_stride + head * prefix_head_stride
    suffix_rows = suffix_ptr + token * suffix_token_stride + head * suffix_head_stride
    out_rows = out_ptr + token * out_token_stride + head * out_head_stride
    if ALIGNED:
        prefix_rows = tl.multiple_of(prefix_rows, 16)
        suffix_rows = tl.multiple_of(suffix_rows, 16)
        out_rows = tl.multiple_of(out_rows, 16)
    prefix = widen(tl.load(prefix_rows[:, None] + column, mask=from_prefix, other=0))
    suffix = widen(tl.load(suffix_rows[:, None] + column, mask=from_suffix, other=0))
    merged = (prefix * prefix_weight[:, None] + suffix * suffix_weight[:, None]) / total[:, None]
    # in place, a value that several threads hold must have been read by all of them before one overwrites it
    tl.debug_barrier()
    tl.store(out_rows[:, None] + column, round_to(merged, out_ptr.dtype.element_ty), mask=live)
    if WRITE_LSE:
        out_lse_ptrs = out_lse_ptr + head * out_lse_head_stride + token * out_lse_token_stride
        tl.store(out_lse_ptrs, largest + tl.log(total), mask=exists)
