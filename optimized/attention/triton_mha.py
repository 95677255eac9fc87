"""`triton_masked_mha`: variable-length attention under a bit mask, in Triton (SPEC 2.7).

One kernel serves three uses: a masked call (with or without a key start), a dense causal call (aligned
bottom-right) and a dense full call. It is the flash-attention recurrence (Dao, arXiv 2307.08691): scores in
float32, base-2 exponentials, a running maximum and a running sum per row, P rounded to the storage dtype
before the product with V.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.attention.arguments import AttentionCall, check_attention_call
from optimized.attention.mha_kernels import (
    ALL_KEYS,
    CAUSAL,
    MASKED,
    MASKED_FROM_KEY_START,
    list_key_tiles_kernel,
    masked_mha_kernel,
)
from optimized.attention.tiles import MhaTiles, mha_tiles
from optimized.rounding import IS_INTERPRETED
from optimized.validation import device_of, require_launchable

LOG2_E = 1.4426950408889634

_LIST_WORDS = 32
"""Mask words that `list_key_tiles_kernel` reads at a time."""


class _KeyTileLists(NamedTuple):
    entries: Tensor
    """[B, query tiles, 1 + key tiles] int32: a count, then that many tile numbers; the rest is not read."""
    stride: int


def triton_masked_mha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    *,
    mask: Tensor | None = None,
    offset: bool = False,
    causal: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each request's queries over its own segment of keys.

    Request b owns rows `cu_seqlens_q[b]:cu_seqlens_q[b+1]` of q and `cu_seqlens_k[b]:cu_seqlens_k[b+1]` of k
    and v; no other row is read for it. Lengths of 0 are legal, and so are k and v with 0 rows. Rows of q that
    belong to no request get no result.

    Args:
        q: [Tq, H, D] bfloat16 or float16. k: [Tk, H, D]. v: [Tk, H, Dv], may be a strided view.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32, on the device of q.
        max_seqlen_q, max_seqlen_k: longest lengths of the batch.
        scale: factor of the scores `q . k`.
        mask: [B, padded_q, words] int32 (SPEC 2.1), or None. Bit `n & 31` of word `n >> 5` of row i says
            whether query i may see key n.
        offset: the segment's key n is bit `key_start + n`; `key_start` is the last word of query row 0, and
            the last word of a row is never data.
        causal: without a mask only: query i sees the keys `n <= k_len - q_len + i`.
        out: where the output goes; allocated if None.

    Returns:
        out [Tq, H, Dv] in the dtype of q, and the natural log-sum-exp [H, Tq] float32. A row without any key
        has output 0 and log-sum-exp -inf.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device; nothing is written.
    """
    call = check_attention_call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, offset, causal, out
    )
    if call.q.shape[0] == 0 or call.batch_size == 0 or max_seqlen_q == 0:
        return call.out, call.lse
    require_launchable("q", q)
    tiles = mha_tiles(call, max_seqlen_q, max_seqlen_k)
    if mask is None:
        keys = CAUSAL if causal else ALL_KEYS
    else:
        keys = MASKED_FROM_KEY_START if offset else MASKED
    with device_of(call.q):
        lists = None
        if mask is not None and not tiles.folded:
            lists = _list_key_tiles(call, tiles, keys, max_seqlen_q, max_seqlen_k)
        _launch(call, tiles, keys, lists, max_seqlen_q, scale)
    return call.out, call.lse


def _list_key_tiles(
    call: AttentionCall, tiles: MhaTiles, keys: tl.constexpr, max_seqlen_q: int, max_seqlen_k: int
) -> _KeyTileLists:
    assert call.mask is not None
    q_tiles = triton.cdiv(max_seqlen_q, tiles.block_m)
    stride = 1 + triton.cdiv(max_seqlen_k, tiles.block_n)
    entries = torch.empty(call.batch_size, q_tiles, stride, dtype=torch.int32, device=call.q.device)
    list_key_tiles_kernel[(q_tiles, call.batch_size)](
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.mask,
        entries,
        call.mask.stride(0),
        call.mask.stride(1),
        call.mask.shape[2],
        stride,
        KEYS=keys,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        LIST_WORDS=_LIST_WORDS,
    )
    return _KeyTileLists(entries, stride)


def _launch(
    call: AttentionCall,
    tiles: MhaTiles,
    keys: tl.constexpr,
    lists: _KeyTileLists | None,
    max_seqlen_q: int,
    scale: float,
) -> None:
    strides = [s for x in (call.q, call.k, call.v, call.out) for s in (x.stride(0), x.stride(1))]
    unit = 8 if not IS_INTERPRETED and all(s % 8 == 0 for s in strides) else 1
    mask = call.mask
    num_q_tiles = triton.cdiv(max_seqlen_q, tiles.block_m)
    num_groups = call.batch_size * call.num_heads
    grid = (num_q_tiles * triton.cdiv(num_groups, tiles.block_g),)
    masked_mha_kernel[grid](
        call.q,
        call.k,
        call.v,
        call.out,
        call.lse,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        mask,
        lists.entries if lists is not None else None,
        scale * LOG2_E,
        call.num_heads,
        num_groups,
        num_q_tiles,
        *(s // unit for s in strides),
        call.lse.stride(0),
        mask.stride(0) if mask is not None else 0,
        mask.stride(1) if mask is not None else 0,
        mask.shape[2] if mask is not None else 0,
        lists.stride if lists is not None else 0,
        STRIDE_UNIT=unit,
        KEYS=keys,
        USE_LIST=lists is not None,
        FOLDED=tiles.folded,
        D=call.q.shape[2],
        DV=call.v.shape[2],
        BLOCK_D=tiles.block_d,
        BLOCK_D_TAIL=tiles.block_d_tail,
        BLOCK_DV=tiles.block_dv,
        BLOCK_G=tiles.block_g,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
