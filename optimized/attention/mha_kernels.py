"""The Triton kernels of `triton_masked_mha`: one that lists key tiles, one that attends.

Both modes run the same text. Compiled, tiles are [rows, columns] and one program takes one head of one request;
interpreted, where an operation costs tens of microseconds whatever its size, tiles carry a leading axis of such
groups (FOLDED).
Sizes and strides are run-time arguments that Triton may not specialise on: a new batch compiles nothing.
"""

import triton
import triton.language as tl

from optimized.rounding import device_function, dot, round_to

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)

# which keys of its segment a row may see
ALL_KEYS: tl.constexpr = tl.constexpr(0)
CAUSAL: tl.constexpr = tl.constexpr(1)
MASKED: tl.constexpr = tl.constexpr(2)
MASKED_FROM_KEY_START: tl.constexpr = tl.constexpr(3)

_LIST_ARGS = ["stride_mb", "stride_mq", "words", "list_stride"]
_MHA_ARGS = [
    "scale_log2",
    "num_heads",
    "num_groups",
    "num_q_tiles",
    "stride_qt",
    "stride_qh",
    "stride_kt",
    "stride_kh",
    "stride_vt",
    "stride_vh",
    "stride_ot",
    "stride_oh",
    "stride_lh",
    *_LIST_ARGS,
]
# slices of a longer table of offsets need not be aligned, and no load of them is wide
_OFFSETS = ["cu_seqlens_q_ptr", "cu_seqlens_k_ptr"]


@device_function
def _key_start(mask_batch_ptr: tl.tensor, ok: tl.tensor, words: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """The first key of this call's segment, counted in mask bits: from the last word of query row 0, or 0."""
    if KEYS == MASKED_FROM_KEY_START:
        return tl.load(mask_batch_ptr + words - 1, mask=ok, other=0)
    return 0


@device_function
def _keep_words(
    row_ptrs: tl.tensor,
    row_ok: tl.tensor,
    key_start: tl.tensor,
    word: tl.tensor,
    words: tl.tensor,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Mask words `word`, counted from bit `key_start`: bit i is the segment's key `32 * word + i`.

    32 keys from an unaligned start straddle two words of the mask, so both are read and joined. Words outside
    the mask's data (and the key-start word, which is no data) count as 0 and are not read.
    `(high << 1) << (31 - r)` is `high << (32 - r)` without ever shifting by 32.
    """
    if KEYS == MASKED:
        low = tl.load(row_ptrs + word, mask=row_ok & (word < words), other=0)
        return low.to(tl.uint32, bitcast=True)
    data_words = words - 1
    index = (key_start >> 5) + word
    shift = (key_start & 31).to(tl.uint32)
    low_ok = row_ok & (index >= 0) & (index < data_words)
    high_ok = row_ok & (index >= -1) & (index + 1 < data_words)
    low = tl.load(row_ptrs + index, mask=low_ok, other=0).to(tl.uint32, bitcast=True)
    high = tl.load(row_ptrs + index + 1, mask=high_ok, other=0).to(tl.uint32, bitcast=True)
    return (low >> shift) | ((high << 1) << (31 - shift))


@triton.jit(do_not_specialize=_LIST_ARGS, do_not_specialize_on_alignment=[*_LIST_ARGS, *_OFFSETS])
def list_key_tiles_kernel(
    cu_seqlens_q_ptr: tl.tensor,
    cu_seqlens_k_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    list_ptr: tl.tensor,
    stride_mb: tl.int64,
    stride_mq: tl.int64,
    words: tl.int64,
    list_stride: tl.int64,
    KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LIST_WORDS: tl.constexpr,
) -> None:
    """List the key tiles that hold any mask bit of one tile of query rows: entry 0 is the count."""
    q_tile = tl.program_id(0)
    request = tl.program_id(1)
    q_len = tl.load(cu_seqlens_q_ptr + request + 1) - tl.load(cu_seqlens_q_ptr + request)
    k_len = tl.load(cu_seqlens_k_ptr + request + 1) - tl.load(cu_seqlens_k_ptr + request)
    rows = q_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = (rows < q_len)[:, None]
    out_ptr = list_ptr + (request.to(tl.int64) * tl.num_programs(0) + q_tile) * list_stride
    mask_batch_ptr = mask_ptr + request.to(tl.int64) * stride_mb
    row_ptrs = mask_batch_ptr + rows.to(tl.int64)[:, None] * stride_mq
    key_start = _key_start(mask_batch_ptr, True, words, KEYS)

    WORDS_A_TILE: tl.constexpr = BLOCK_N // 32
    TILES: tl.constexpr = LIST_WORDS // WORDS_A_TILE
    count = 0
    for first_word in range(0, tl.cdiv(k_len, 32), LIST_WORDS):
        word = first_word + tl.arange(0, LIST_WORDS)
        in_segment = row_ok & (word * 32 < k_len)[None, :]
        keep = _keep_words(row_ptrs, in_segment, key_start, word[None, :], words, KEYS)
        any_row = tl.max((keep != 0).to(tl.int32), axis=0)
        any_key = tl.max(tl.reshape(any_row, [TILES, WORDS_A_TILE]), axis=1)
        place = count + tl.cumsum(any_key, axis=0)
        tile = first_word // WORDS_A_TILE + tl.arange(0, TILES)
        tl.store(out_ptr + place, tile, mask=any_key != 0)
        count += tl.sum(any_key, axis=0)
    tl.store(out_ptr, count)


@triton.jit(do_not_specialize=_MHA_ARGS, do_not_specialize_on_alignment=[*_MHA_ARGS, *_OFFSETS])
def masked_mha_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    cu_seqlens_q_ptr: tl.tensor,
    cu_seqlens_k_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    list_ptr: tl.tensor,
    scale_log2: tl.tensor,
    num_heads: tl.tensor,
    num_groups: tl.tensor,
    num_q_tiles: tl.tensor,
    stride_qt: tl.int64,
    stride_qh: tl.int64,
    stride_kt: tl.int64,
    stride_kh: tl.int64,
    stride_vt: tl.int64,
    stride_vh: tl.int64,
    stride_ot: tl.int64,
    stride_oh: tl.int64,
    stride_lh: tl.int64,
    stride_mb: tl.int64,
    stride_mq: tl.int64,
    words: tl.int64,
    list_stride: tl.int64,
    STRIDE_UNIT: tl.constexpr,
    KEYS: tl.constexpr,
    USE_LIST: tl.constexpr,
    FOLDED: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D_TAIL: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Attention of one tile of query rows, for one group (a request and a head) or BLOCK_G folded groups.

    Program `tile + num_q_tiles * g` takes query tile `tile` of group g; group `g` is head `g % num_heads` of
    request `g // num_heads`. Strides of q, k, v and out come in units of STRIDE_UNIT elements, so that the
    compiler can see when rows are aligned for 128-bit loads although no stride is a compile key.
    """
    if STRIDE_UNIT != 1:
        stride_qt *= STRIDE_UNIT
        stride_qh *= STRIDE_UNIT
        stride_kt *= STRIDE_UNIT
        stride_kh *= STRIDE_UNIT
        stride_vt *= STRIDE_UNIT
        stride_vh *= STRIDE_UNIT
        stride_ot *= STRIDE_UNIT
        stride_oh *= STRIDE_UNIT
    # axes that lay a vector along the rows, or the columns, of a tile
    ROW_AXES: tl.constexpr = (0, 2) if FOLDED else (1,)
    COL_AXES: tl.constexpr = (0, 1) if FOLDED else (0,)
    BIT_AXES: tl.constexpr = (0, 1, 2) if FOLDED else (0, 1)
    LAST_AXIS: tl.constexpr = 2 if FOLDED else 1
    STATS: tl.constexpr = (BLOCK_G, BLOCK_M) if FOLDED else (BLOCK_M,)
    SCORES: tl.constexpr = (BLOCK_G, BLOCK_M, BLOCK_N) if FOLDED else (BLOCK_M, BLOCK_N)
    ACC: tl.constexpr = (BLOCK_G, BLOCK_M, BLOCK_DV) if FOLDED else (BLOCK_M, BLOCK_DV)

    q_tile = tl.program_id(0) % num_q_tiles
    first_row = q_tile * BLOCK_M
    group = tl.program_id(0) // num_q_tiles
    group_ok = True
    if FOLDED:
        group = (group * BLOCK_G + tl.arange(0, BLOCK_G))[:, None, None]
        group_ok = group < num_groups
    request = group // num_heads
    head = (group % num_heads).to(tl.int64)
    q_start = tl.load(cu_seqlens_q_ptr + request, mask=group_ok, other=0)
    q_len = tl.load(cu_seqlens_q_ptr + request + 1, mask=group_ok, other=0) - q_start
    k_start = tl.load(cu_seqlens_k_ptr + request, mask=group_ok, other=0)
    k_len = tl.load(cu_seqlens_k_ptr + request + 1, mask=group_ok, other=0) - k_start
    if FOLDED:
        longest = tl.max(k_len)
    else:
        if first_row >= q_len:
            return
        longest = k_len
        if KEYS == CAUSAL:
            longest = tl.minimum(k_len, first_row + BLOCK_M + k_len - q_len)

    row = tl.expand_dims(first_row + tl.arange(0, BLOCK_M), ROW_AXES)
    row_ok = row < q_len
    token = (q_start + row).to(tl.int64)
    q_rows = q_ptr + head * stride_qh + token * stride_qt
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    dim = tl.expand_dims(dims, COL_AXES)
    q = tl.load(q_rows + dim, mask=row_ok & (dim < D), other=0.0)
    k_head = k_ptr + k_start.to(tl.int64) * stride_kt + head * stride_kh
    v_head = v_ptr + k_start.to(tl.int64) * stride_vt + head * stride_vh
    dim_k = tl.expand_dims(dims, ROW_AXES)
    dim_v = tl.expand_dims(dims_v, COL_AXES)
    k_dims = k_head + dim_k
    v_dims = v_head + dim_v
    if BLOCK_D_TAIL > 0:
        tail = BLOCK_D + tl.arange(0, BLOCK_D_TAIL)
        tail_q = tl.expand_dims(tail, COL_AXES)
        q_tail = tl.load(q_rows + tail_q, mask=row_ok & (tail_q < D), other=0.0)
        tail_k = tl.expand_dims(tail, ROW_AXES)
        k_tail_dims = k_head + tail_k

    if KEYS >= MASKED:
        mask_head = mask_ptr + request.to(tl.int64) * stride_mb
        mask_rows = mask_head + row.to(tl.int64) * stride_mq
        key_start = _key_start(mask_head, group_ok, words, KEYS)
    if USE_LIST:
        tiles_ptr = list_ptr + (request.to(tl.int64) * num_q_tiles + q_tile) * list_stride
        num_tiles = tl.load(tiles_ptr)
    else:
        num_tiles = tl.maximum(longest + BLOCK_N - 1, 0) // BLOCK_N

    row_max = tl.full(STATS, float("-inf"), tl.float32)
    row_sum = tl.full(STATS, 0.0, tl.float32)
    acc = tl.full(ACC, 0.0, tl.float32)
    for step in range(0, num_tiles):
        if USE_LIST:
            first_key = tl.load(tiles_ptr + 1 + step) * BLOCK_N
        else:
            first_key = step * BLOCK_N
        keys = first_key + tl.arange(0, BLOCK_N)
        key = tl.expand_dims(keys, COL_AXES)
        key_ok = key < k_len

        k_keys = key.to(tl.int64) * stride_kt
        k = tl.load(k_dims + k_keys, mask=key_ok & (dim_k < D), other=0.0)
        scores = dot(q, k, tl.full(SCORES, 0.0, tl.float32))
        if BLOCK_D_TAIL > 0:
            k_tail = tl.load(k_tail_dims + k_keys, mask=key_ok & (tail_k < D), other=0.0)
            scores = dot(q_tail, k_tail, scores)

        if KEYS >= MASKED:
            word = tl.expand_dims(first_key // 32 + tl.arange(0, BLOCK_N // 32), COL_AXES)
            kept = _keep_words(mask_rows, row_ok, key_start, word, words, KEYS)
            bit = tl.expand_dims(tl.arange(0, 32).to(tl.uint32), BIT_AXES)
            bits = (tl.expand_dims(kept, LAST_AXIS + 1) >> bit) & 1
            keep = (tl.reshape(bits, SCORES) != 0) & key_ok
        elif KEYS == CAUSAL:
            # query i sees the keys up to i + k_len - q_len
            keep = (key - row <= k_len - q_len) & key_ok
        else:
            keep = key_ok

        scores = tl.where(keep, scores * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=LAST_AXIS))
        # a row without any key so far keeps -inf; exp2 must not see -inf - (-inf)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.math.exp2(scores - tl.expand_dims(shift, LAST_AXIS))
        decay = tl.math.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(p, axis=LAST_AXIS)
        row_max = new_max

        key_v = tl.expand_dims(keys, ROW_AXES)
        v_ok = (key_v < k_len) & (dim_v < DV)
        v = tl.load(v_dims + key_v.to(tl.int64) * stride_vt, mask=v_ok, other=0.0)
        acc = dot(round_to(p, v.dtype), v, acc * tl.expand_dims(decay, LAST_AXIS))

    # NaN scores give a NaN sum, which must reach the results; only a true zero is an empty row
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.math.log2(divisor)) * LN_2)
    out = acc / tl.expand_dims(divisor, LAST_AXIS)
    out_rows = out_ptr + head * stride_oh + token * stride_ot
    tl.store(out_rows + dim_v, round_to(out, out_ptr.dtype.element_ty), mask=row_ok & (dim_v < DV))
    tl.store(lse_ptr + head * stride_lh + token, tl.expand_dims(lse, LAST_AXIS), mask=row_ok)
