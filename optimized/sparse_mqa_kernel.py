"""The kernel of `triton_sparse_mqa`: latent attention of query rows over listed cache slots.

Both modes run the same text. Compiled, one program takes one query row and a tile of heads; interpreted,
where an operation costs tens of microseconds whatever its size, tiles carry a leading axis of query rows
(FOLDED).
"""

import triton
import triton.language as tl

from optimized.fp8 import decode_e4m3, load_bfloat16, load_float32
from optimized.rounding import dot, round_to

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)

# row formats of the cache (see optimized.kv_cache)
PLAIN: tl.constexpr = tl.constexpr(0)
FP8_E4M3: tl.constexpr = tl.constexpr(1)
FP8_DS_MLA: tl.constexpr = tl.constexpr(2)

_DS_MLA_SCALES: tl.constexpr = tl.constexpr(512)
_DS_MLA_ROPE: tl.constexpr = tl.constexpr(528)

_ARGS = [
    "scale_log2",
    "kv_scale",
    "num_rows",
    "num_heads",
    "block_size",
    "stride_qt",
    "stride_qh",
    "stride_block",
    "stride_slot",
    "stride_it",
]


@triton.jit(do_not_specialize=_ARGS, do_not_specialize_on_alignment=_ARGS)
def sparse_mqa_kernel(
    q_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    scale_log2: tl.tensor,
    kv_scale: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    block_size: tl.int64,
    stride_qt: tl.int64,
    stride_qh: tl.int64,
    stride_block: tl.int64,
    stride_slot: tl.int64,
    stride_it: tl.int64,
    STRIDE_UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    FOLDED: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Latent attention of BLOCK_T query rows (1 unless FOLDED) and BLOCK_H heads.

    Row t attends to those of the first `counts[t]` entries of `slots[t]` that are not -1. The first LATENT
    columns of a cache row are its value too. Strides of q and the cache come in units of STRIDE_UNIT
    elements, so that the compiler can see when rows are aligned for wide loads although no stride is a
    compile key.
    """
    if STRIDE_UNIT != 1:
        stride_qt *= STRIDE_UNIT
        stride_qh *= STRIDE_UNIT
        stride_block *= STRIDE_UNIT
        stride_slot *= STRIDE_UNIT
    # tiles are [rows, heads, keys or dims] when folded, else [heads, keys or dims]
    HEAD_AXES: tl.constexpr = (0, 2) if FOLDED else (1,)
    DIM_AXES: tl.constexpr = (0, 1) if FOLDED else (0,)
    KEEP_AXIS: tl.constexpr = 1 if FOLDED else 0
    LAST_AXIS: tl.constexpr = 2 if FOLDED else 1
    STATS: tl.constexpr = (BLOCK_T, BLOCK_H) if FOLDED else (BLOCK_H,)
    SCORES: tl.constexpr = (BLOCK_T, BLOCK_H, BLOCK_N) if FOLDED else (BLOCK_H, BLOCK_N)
    LATENTS: tl.constexpr = (BLOCK_T, BLOCK_N, BLOCK_LATENT) if FOLDED else (BLOCK_N, BLOCK_LATENT)
    SCALE_TILES: tl.constexpr = (BLOCK_T, BLOCK_N, 4, 128) if FOLDED else (BLOCK_N, 4, 128)
    ACC: tl.constexpr = (BLOCK_T, BLOCK_H, BLOCK_LATENT) if FOLDED else (BLOCK_H, BLOCK_LATENT)

    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = tl.expand_dims(heads.to(tl.int64), HEAD_AXES)
    q_ok = tl.expand_dims(heads < num_heads, HEAD_AXES)
    if FOLDED:
        rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        row_ok = rows < num_rows
        count = tl.load(counts_ptr + rows, mask=row_ok, other=0)
        longest = tl.max(count, axis=0)
        count = count[:, None]
        slot_rows = slots_ptr + rows[:, None] * stride_it
        row = rows[:, None, None]
        q_ok &= row_ok[:, None, None]
    else:
        row = tl.program_id(0).to(tl.int64)
        count = tl.load(counts_ptr + row)
        longest = count
        slot_rows = slots_ptr + row * stride_it

    dims = tl.arange(0, BLOCK_LATENT)
    dims_ok = tl.expand_dims(dims < LATENT, DIM_AXES)
    dim = tl.expand_dims(dims, DIM_AXES)
    q_rows = q_ptr + row * stride_qt + head * stride_qh
    q = tl.load(q_rows + dim, mask=q_ok & dims_ok, other=0.0)
    if BLOCK_ROPE > 0:
        rope_dims = tl.arange(0, BLOCK_ROPE)
        rope_ok = tl.expand_dims(rope_dims < ROPE, DIM_AXES)
        rope_dim = tl.expand_dims(rope_dims, DIM_AXES)
        q_rope = tl.load(q_rows + (LATENT + rope_dim), mask=q_ok & rope_ok, other=0.0)

    row_max = tl.full(STATS, float("-inf"), tl.float32)
    row_sum = tl.full(STATS, 0.0, tl.float32)
    acc = tl.full(ACC, 0.0, tl.float32)
    for first in range(0, longest, BLOCK_N):
        entries = first + tl.arange(0, BLOCK_N)
        if FOLDED:
            entries = entries[None, :]
        slot = tl.load(slot_rows + entries, mask=entries < count, other=-1).to(tl.int64)
        keep = slot >= 0
        slot = tl.where(keep, slot, 0)
        kv_offsets = (slot // block_size) * stride_block + (slot % block_size) * stride_slot
        kv_rows = kv_ptr + tl.expand_dims(kv_offsets, LAST_AXIS)
        kv_ok = tl.expand_dims(keep, LAST_AXIS)

        latent = tl.load(kv_rows + dim, mask=kv_ok & dims_ok, other=0)
        if FORMAT == FP8_E4M3:
            latent = round_to(decode_e4m3(latent) * kv_scale, q.dtype)
        elif FORMAT == FP8_DS_MLA:
            scale_at = tl.arange(0, 4) * 4 + _DS_MLA_SCALES
            scales = load_float32(kv_rows + tl.expand_dims(scale_at, DIM_AXES), kv_ok)
            scales = tl.broadcast_to(tl.expand_dims(scales, LAST_AXIS + 1), SCALE_TILES)
            latent = round_to(decode_e4m3(latent) * tl.reshape(scales, LATENTS), q.dtype)
        latent_t = tl.trans(latent, 0, 2, 1) if FOLDED else tl.trans(latent)
        scores = dot(q, latent_t, tl.full(SCORES, 0.0, tl.float32))
        if BLOCK_ROPE > 0:
            if FORMAT == FP8_DS_MLA:
                rope = round_to(
                    load_bfloat16(kv_rows + (2 * rope_dim + _DS_MLA_ROPE), kv_ok & rope_ok), q.dtype
                )
            else:
                rope = tl.load(kv_rows + (LATENT + rope_dim), mask=kv_ok & rope_ok, other=0)
                if FORMAT == FP8_E4M3:
                    rope = round_to(decode_e4m3(rope) * kv_scale, q.dtype)
            rope_t = tl.trans(rope, 0, 2, 1) if FOLDED else tl.trans(rope)
            scores = dot(q_rope, rope_t, scores)

        scores = tl.where(tl.expand_dims(keep, KEEP_AXIS), scores * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=LAST_AXIS))
        # a row without any key so far keeps -inf; exp2 must not see -inf - (-inf)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.math.exp2(scores - tl.expand_dims(shift, LAST_AXIS))
        decay = tl.math.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(p, axis=LAST_AXIS)
        row_max = new_max
        acc = dot(round_to(p, q.dtype), latent, acc * tl.expand_dims(decay, LAST_AXIS))

    # NaN scores give a NaN sum, which must reach the results; only a true zero is an empty row
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.math.log2(divisor)) * LN_2)
    out = round_to(acc / tl.expand_dims(divisor, LAST_AXIS), out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * num_heads + head) * LATENT + dim, out, mask=q_ok & dims_ok)
    if FOLDED:
        lse_ptrs = lse_ptr + heads.to(tl.int64)[None, :] * num_rows + rows[:, None]
        tl.store(lse_ptrs, lse, mask=(heads < num_heads)[None, :] & row_ok[:, None])
    else:
        tl.store(lse_ptr + heads.to(tl.int64) * num_rows + row, lse, mask=heads < num_heads)
