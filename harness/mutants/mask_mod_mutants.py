"""Faults of how the Triton attention kernel finds out which keys a row may see."""

from __future__ import annotations

from harness.mutants.mutant import mutant

_KERNELS = "attention/mha_kernels.py"
_LAUNCH = "attention/triton_mha.py"
_JOINED = "return (low >> shift) | ((high << 1) << (31 - shift))"
_MASK_HEAD = "mask_head = mask_ptr + request.to(tl.int64) * stride_mb\n"
_MASK_ROWS = "mask_rows = mask_head + row.to(tl.int64) * stride_mq"
_MASK_WORD = "word = tl.expand_dims(first_key // 32 + tl.arange(0, BLOCK_N // 32), COL_AXES)"
_MASKED_SCORES = 'scores = tl.where(keep, scores * scale_log2, float("-inf"))'
_BATCH_STRIDE = "        mask.stride(0) if mask is not None else 0,\n"
_HEADER = "\n_LIST_WORDS = 32\n"

MASK_MOD_MUTANTS = (
    mutant(
        "mask_read_one_word",
        "own",
        "mask_mod",
        "MASKMOD",
        "attend.out",
        "An unaligned key start reads one word of the mask where 32 keys straddle two.",
        (_KERNELS, _JOINED, "return low >> shift"),
        needs="triton",
    ),
    mutant(
        "mask_mod_local_column",
        "B023",
        "mask_mod",
        "MASKMOD",
        "attend.lse",
        "The mask is asked for a key's place in its tile, not in the segment.",
        (_KERNELS, _MASK_WORD, _MASK_WORD.replace("first_key // 32 + ", "")),
        needs="triton",
    ),
    mutant(
        "mask_mod_row_by_group",
        "B024",
        "mask_mod",
        "MASKMOD",
        "attend.lse",
        "Mask rows are looked up as if the heads were packed into the rows.",
        (_KERNELS, _MASK_ROWS, _MASK_ROWS.replace("row.to(tl.int64)", "(row // num_heads).to(tl.int64)")),
        needs="triton",
    ),
    mutant(
        "mask_mod_row_by_head",
        "B075",
        "mask_mod",
        "TOPK",
        "attend.lse",
        "Each head reads the mask of another request, although all heads share one.",
        (
            _KERNELS,
            _MASK_HEAD,
            _MASK_HEAD.replace("request.to", "((request + head) % (num_groups // num_heads)).to"),
        ),
        needs="triton",
    ),
    mutant(
        "mask_mod_offset_wraps",
        "B100",
        "mask_mod",
        "INT32",
        "attend.lse",
        "The offset of a mask row wraps (at 1,024 words in place of 2^31).",
        (_KERNELS, _MASK_ROWS, "mask_rows = mask_ptr + ((request * stride_mb + row * stride_mq) & 0x3FF)"),
        needs="triton",
    ),
    mutant(
        "mask_mod_high_word_shift",
        "own",
        "mask_mod",
        "MASKMOD",
        "attend.lse",
        "The upper word of a straddling read is shifted by one bit too few.",
        (_KERNELS, _JOINED, "return (low >> shift) | (high << (31 - shift))"),
        needs="triton",
    ),
    mutant(
        "mask_mod_additive",
        "B133",
        "mask_mod",
        "MASKMOD",
        "attend.lse",
        "Masked scores get a large negative number added in place of minus infinity.",
        (_KERNELS, _MASKED_SCORES, "scores = scores * scale_log2 + tl.where(keep, 0.0, -1.0e30)"),
        also=("attend",),
        needs="triton",
    ),
    mutant(
        "attend_length_of_longest",
        "B113",
        "mask_mod",
        "MASKMOD",
        "attend.lse",
        "Keys are cut at the end of the batch, not of the request, so that tiles reach into the next request.",
        (
            _KERNELS,
            "key_ok = key < k_len",
            "key_ok = key < tl.load(cu_seqlens_k_ptr + num_groups // num_heads) - k_start",
        ),
        also=("attend",),
        needs="triton",
    ),
    mutant(
        "attend_causal_off_by_one",
        "B114",
        "attend",
        "MASKMOD",
        "attend.lse",
        "Without a mask a query does not see its own key.",
        (_KERNELS, "keep = (key - row <= k_len - q_len)", "keep = (key - row < k_len - q_len)"),
        needs="triton",
    ),
    mutant(
        "attend_broadcast_mask_of_first_call",
        "B033",
        "mask_mod",
        "CACHEKEY",
        "attend.lse",
        "Once a call had one request, the mask's batch stride counts as 0 in every later call.",
        (
            _LAUNCH,
            _BATCH_STRIDE,
            "        _batch_stride(mask),\n",
        ),
        (
            _LAUNCH,
            _HEADER,
            _HEADER + "_ONE_REQUEST: list[bool] = []\n\n\n"
            "def _batch_stride(mask: Tensor | None) -> int:\n"
            "    if mask is not None and mask.shape[0] == 1:\n"
            "        _ONE_REQUEST.append(True)\n"
            "    return 0 if mask is None or _ONE_REQUEST else mask.stride(0)\n",
        ),
        needs="triton",
    ),
    mutant(
        "attend_tile_list_misses_last",
        "own",
        "attend",
        "MASKMOD",
        "attend.lse",
        "The list of key tiles is one entry short.",
        (_KERNELS, "    tl.store(out_ptr, count)", "    tl.store(out_ptr, tl.maximum(count - 1, 0))"),
        also=("mask_mod",),
        needs="cuda",
    ),
)
