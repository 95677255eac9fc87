"""Up-projection of latent rows to per-head keys and values.

    K_h(j) = [W_UK,h c_j | k_pe_j],   V_h(j) = W_UV,h c_j

K and V are rounded to the dtype of the latent rows here, once: the products are accumulated in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from optimized.rounding import IS_INTERPRETED
from optimized.validation import (
    FLOAT_16_BIT_DTYPES,
    MAX_KERNEL_ROWS,
    device_of,
    require_int,
    require_tensor,
    require_unit_stride,
    rows_are_aligned,
)

KERNEL_NOPE, KERNEL_ROPE = 128, 64
"""Head dims that the concat kernel serves (DeepSeek-V3.2, any number of heads)."""
_ROWS = 32  # (token, head) pairs of one compiled program
_INTERPRETED_ROWS = 4096


def project_kv(
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    w_kv_b: torch.Tensor,
    num_heads: int,
    nope: int,
    v_head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent rows `[n, kv_lora_rank]` and `k_pe [n, 1, rope]` -> K `[n, H, nope + rope]` and V `[n, H, v]`.

    `w_kv_b` is `[kv_lora_rank, H * (nope + v)]`: per head `nope` key columns, then `v` value columns. V is a
    strided view of the product, K is contiguous. Raises TypeError or ValueError for other shapes and dtypes.
    """
    require_int("num_heads", num_heads, 1)
    require_int("nope", nope, 0)
    require_int("v_head_dim", v_head_dim, 1)
    require_tensor("kv_c_normed", kv_c_normed, (None, None), FLOAT_16_BIT_DTYPES)
    tokens, lora = kv_c_normed.shape
    dtype, device = kv_c_normed.dtype, kv_c_normed.device
    require_tensor("k_pe", k_pe, (tokens, 1, None), dtype, device)
    require_tensor("w_kv_b", w_kv_b, (lora, num_heads * (nope + v_head_dim)), dtype, device)
    product = _matmul_rounded_once(kv_c_normed, w_kv_b)
    k_nope, v = product.view(tokens, num_heads, nope + v_head_dim).split((nope, v_head_dim), dim=-1)
    return concat_k_nope_k_pe(k_nope, k_pe), v


def concat_k_nope_k_pe(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """`k_nope [n, H, nope]`, `k_pe [n, 1, rope]` -> contiguous `[n, H, nope + rope]`, `k_pe` to all heads."""
    require_tensor("k_nope", k_nope, (None, None, None), FLOAT_16_BIT_DTYPES)
    tokens, heads, nope = k_nope.shape
    require_tensor("k_pe", k_pe, (tokens, 1, None), k_nope.dtype, k_nope.device)
    rope = k_pe.shape[2]
    k = k_nope.new_empty((tokens, heads, nope + rope))
    kernel_runs = IS_INTERPRETED or k.is_cuda
    if (nope, rope) == (KERNEL_NOPE, KERNEL_ROPE) and kernel_runs and k.numel():
        require_unit_stride("k_nope", k_nope)
        require_unit_stride("k_pe", k_pe)
        _launch_concat(k_nope, k_pe, k)
    else:
        k[..., :nope].copy_(k_nope)
        k[..., nope:].copy_(k_pe.expand(tokens, heads, rope))
    return k


def _matmul_rounded_once(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` accumulated in float32 and rounded once to the dtype of `a`."""
    if not a.is_cuda:  # 16-bit products on the CPU take several roads; this one is exact but for float32 sums
        return (a.float() @ b.float()).to(a.dtype)
    with _full_precision_reductions():
        return a @ b


@contextmanager
def _full_precision_reductions() -> Iterator[None]:
    """cuBLAS may add split-K partial sums in 16 bits, a second rounding, unless told otherwise."""
    settings = torch.backends.cuda.matmul
    bf16 = settings.allow_bf16_reduced_precision_reduction
    fp16 = settings.allow_fp16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    settings.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = bf16
        settings.allow_fp16_reduced_precision_reduction = fp16


def _launch_concat(k_nope: torch.Tensor, k_pe: torch.Tensor, k: torch.Tensor) -> None:
    tokens, heads, _ = k.shape
    pairs = require_int("tokens * heads of k_nope", tokens * heads, 0, MAX_KERNEL_ROWS)
    rows = min(_INTERPRETED_ROWS, triton.next_power_of_2(pairs)) if IS_INTERPRETED else _ROWS
    with device_of(k):
        concat_k_kernel[(triton.cdiv(pairs, rows),)](
            k_nope.view(torch.int16),  # a copy of bits
            k_pe.view(torch.int16),
            k.view(torch.int16),
            pairs,
            heads,
            k_nope.stride(0),
            k_nope.stride(1),
            k_pe.stride(0),
            NOPE=KERNEL_NOPE,
            ROPE=KERNEL_ROPE,
            ALIGNED=rows_are_aligned(k_nope, k_pe, k),
            ROWS=rows,
        )


@triton.jit(
    do_not_specialize=["pairs", "heads", "nope_token_stride", "nope_head_stride", "pe_token_stride"],
    do_not_specialize_on_alignment=["nope_ptr", "pe_ptr", "k_ptr"],
)
def concat_k_kernel(
    nope_ptr: tl.tensor,  # int16 [tokens, heads, NOPE]
    pe_ptr: tl.tensor,  # int16 [tokens, 1, ROPE]
    k_ptr: tl.tensor,  # int16 [tokens, heads, NOPE + ROPE], contiguous
    pairs: tl.tensor,
    heads: tl.tensor,
    nope_token_stride: tl.tensor,
    nope_head_stride: tl.tensor,
    pe_token_stride: tl.tensor,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """A program puts the key parts of `ROWS` (token, head) pairs side by side."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = (pair < pairs)[:, None]
    token = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    nope_rows = nope_ptr + token * nope_token_stride + head * nope_head_stride
    pe_rows = pe_ptr + token * pe_token_stride
    k_rows = k_ptr + pair.to(tl.int64) * (NOPE + ROPE)
    if ALIGNED:
        nope_rows = tl.multiple_of(nope_rows, 16)
        pe_rows = tl.multiple_of(pe_rows, 16)
        k_rows = tl.multiple_of(k_rows, 16)
    nope_column = tl.arange(0, NOPE)[None, :]
    rope_column = tl.arange(0, ROPE)[None, :]
    nope = tl.load(nope_rows[:, None] + nope_column, mask=exists, other=0)
    tl.store(k_rows[:, None] + nope_column, nope, mask=exists)
    rope = tl.load(pe_rows[:, None] + rope_column, mask=exists, other=0)
    tl.store(k_rows[:, None] + NOPE + rope_column, rope, mask=exists)
