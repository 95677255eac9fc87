"""`triton_sparse_mqa`: the absorbed form of sparse MLA over listed cache rows (SPEC 2.8)."""

import torch
import triton
from torch import Tensor

from optimized.attention.tiles import MqaTiles, mqa_tiles
from optimized.attention.triton_mha import LOG2_E
from optimized.kv_cache import cache_row_shape
from optimized.rounding import IS_INTERPRETED
from optimized.sparse_mqa_kernel import FP8_DS_MLA, FP8_E4M3, PLAIN, sparse_mqa_kernel
from optimized.validation import (
    FLOAT_16_BIT_DTYPES,
    device_of,
    require_int,
    require_launchable,
    require_tensor,
    require_unit_stride,
)

_FORMATS = {"auto": PLAIN, "fp8_e4m3": FP8_E4M3, "fp8_ds_mla": FP8_DS_MLA}
_INT32_MAX = torch.iinfo(torch.int32).max


def distinct_slots(indices: Tensor, topk_length: Tensor | None, num_slots: int) -> tuple[Tensor, Tensor]:
    """Each row's set of slots, so that the kernel meets every key once.

    Args:
        indices: [T, topk] int32 or int64 in any order; entries outside `[0, num_slots)` are ignored.
        topk_length: [T], or None: entries of a row at or after its count are ignored.

    Returns:
        slots [T, topk], ascending, duplicates replaced by -1, and counts [T] int32: how many leading entries
        of a row to look at.
    """
    valid = (indices >= 0) & (indices < num_slots)
    if topk_length is not None:
        valid &= torch.arange(indices.shape[1], device=indices.device) < topk_length.unsqueeze(1)
    end = min(num_slots, _INT32_MAX) if indices.dtype == torch.int32 else num_slots
    slots = torch.where(valid, indices, end)
    if num_slots <= _INT32_MAX:
        slots = slots.to(torch.int32)
    slots = slots.sort(dim=1).values
    repeated = slots[:, 1:] == slots[:, :-1]
    slots[:, 1:].masked_fill_(repeated, -1)
    return slots, valid.sum(dim=1, dtype=torch.int32)


def triton_sparse_mqa(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    topk_length: Tensor | None = None,
    *,
    v_dim: int,
    kv_cache_dtype: str = "auto",
    kv_cache_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Attention of every query row over its own set of cache rows: whole rows are keys, latents values.

    Args:
        q: [T, H, kv_lora_rank + rope] bfloat16 or float16, `[q_nope W_UK | q_pe]`.
        kv: cache [num_blocks, block_size, row] or plain rows [slots, row]; the last stride is 1, the others
            are free. Slot s is row `s % block_size` of block `s // block_size`.
        indices: [T, topk] int32 or int64 slots, in any order. A slot counts once; values outside the cache
            are ignored.
        scale: factor of the scores.
        topk_length: [T] int32 or int64, or None: entries of a row at or after its count are ignored.
        v_dim: kv_lora_rank.
        kv_cache_dtype: row format, see `optimized.kv_cache`. Quantised rows are rounded to the dtype of q.
        kv_cache_scale: scale of `fp8_e4m3`.

    Returns:
        latent output [T, H, v_dim] in the dtype of q, and the natural log-sum-exp [H, T] float32. A row
        without any key has output 0 and log-sum-exp -inf.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device; nothing is written.
    """
    require_tensor("q", q, (None, None, None), FLOAT_16_BIT_DTYPES)
    num_rows, num_heads, width = q.shape
    require_int("v_dim", v_dim, 1, width)
    row_width, dtypes = cache_row_shape(kv_cache_dtype, v_dim, width - v_dim, q.dtype)
    is_plain = isinstance(kv, Tensor) and kv.dim() == 2
    require_tensor("kv", kv, (None, row_width) if is_plain else (None, None, row_width), dtypes, q.device)
    require_unit_stride("q", q)
    require_unit_stride("kv", kv)
    require_tensor("indices", indices, (num_rows, None), (torch.int32, torch.int64), q.device)
    if topk_length is not None:
        require_tensor("topk_length", topk_length, (num_rows,), (torch.int32, torch.int64), q.device)
    out = torch.empty(num_rows, num_heads, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_heads, num_rows, dtype=torch.float32, device=q.device)
    if num_rows == 0 or num_heads == 0:
        return out, lse
    require_launchable("q", q)
    if is_plain:
        kv = kv.unsqueeze(1)
    num_slots = kv.shape[0] * kv.shape[1]
    slots, counts = distinct_slots(indices, topk_length, num_slots)
    if kv_cache_dtype != "auto":
        kv = kv.view(torch.uint8)
    tiles = mqa_tiles(q, v_dim, indices.shape[1])
    _launch(q, kv, slots, counts, out, lse, scale, kv_cache_scale, kv_cache_dtype, tiles)
    return out, lse


def _launch(
    q: Tensor,
    kv: Tensor,
    slots: Tensor,
    counts: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    kv_scale: float,
    kv_cache_dtype: str,
    tiles: MqaTiles,
) -> None:
    """Launch for arguments that `triton_sparse_mqa` has checked; kv is [num_blocks, block_size, row]."""
    num_rows, num_heads, width = q.shape
    latent = out.shape[2]
    strides = [q.stride(0), q.stride(1), kv.stride(0), kv.stride(1)]
    unit = 8 if not IS_INTERPRETED and all(s % 8 == 0 for s in strides) else 1
    with device_of(q):
        sparse_mqa_kernel[(triton.cdiv(num_rows, tiles.block_t), triton.cdiv(num_heads, tiles.block_h))](
            q,
            kv,
            slots,
            counts,
            out,
            lse,
            scale * LOG2_E,
            float(kv_scale),
            num_rows,
            num_heads,
            max(kv.shape[1], 1),
            *(s // unit for s in strides),
            slots.stride(0),
            STRIDE_UNIT=unit,
            FORMAT=_FORMATS[kv_cache_dtype],
            FOLDED=tiles.folded,
            LATENT=latent,
            ROPE=width - latent,
            BLOCK_LATENT=tiles.block_latent,
            BLOCK_ROPE=tiles.block_rope,
            BLOCK_T=tiles.block_t,
            BLOCK_H=tiles.block_h,
            BLOCK_N=tiles.block_n,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
