"""Faults of what the Triton attention kernel computes: addresses, scores, exponentials, sums, stores."""

from __future__ import annotations

from harness.mutants.mutant import mutant

_KERNELS = "attention/mha_kernels.py"
_LAUNCH = "attention/triton_mha.py"
_LSE = 'lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.math.log2(divisor)) * LN_2)'
_K_HEAD = "k_head = k_ptr + k_start.to(tl.int64) * stride_kt + head * stride_kh"
_PV = "acc = dot(round_to(p, v.dtype), v, acc * tl.expand_dims(decay, LAST_AXIS))"
_SCALE = "        scale * LOG2_E,\n"
_FIRST_MAX = 'row_max = tl.full(STATS, float("-inf"), tl.float32)'
_MASKED_SCORES = 'scores = tl.where(keep, scores * scale_log2, float("-inf"))'
_SHIFT = 'shift = tl.where(new_max == float("-inf"), 0.0, new_max)'
_HEADER = "\n_LIST_WORDS = 32\n"

ATTENTION_MUTANTS = (
    mutant(
        "attend_unguarded_rescale",
        "B013",
        "attend",
        "MERGE-LSE",
        "attend.lse",
        "A row whose first key tile is empty is rescaled by exp(-inf - -inf).",
        (_KERNELS, _SHIFT, "shift = new_max"),
        needs="triton",
    ),
    mutant(
        "attend_empty_lse_plus_inf",
        "B043",
        "attend",
        "MERGE-LSE",
        "attend.lse",
        "A row without keys gets LSE +inf, and the merge does not read that as empty.",
        (_KERNELS, _LSE, _LSE.replace('"-inf"', '"inf"')),
        ("merge.py", 'return tl.where(lse == float("inf"), float("-inf"), lse)', "return lse"),
        needs="triton",
    ),
    mutant(
        "attend_empty_lse_zero",
        "B039",
        "attend",
        "EMPTY",
        "attend.lse",
        "A row without keys gets LSE 0.",
        (_KERNELS, _LSE, _LSE.replace('float("-inf")', "0.0")),
        needs="triton",
    ),
    mutant(
        "attend_empty_lse_unwritten",
        "B115",
        "attend",
        "EMPTY",
        "attend.lse",
        "The LSE of a row without keys is not written.",
        (
            _KERNELS,
            "tl.store(lse_ptr + head * stride_lh + token, tl.expand_dims(lse, LAST_AXIS), mask=row_ok)",
            "lse = tl.expand_dims(lse, LAST_AXIS)\n"
            '    tl.store(lse_ptr + head * stride_lh + token, lse, mask=row_ok & (lse > float("-inf")))',
        ),
        ("attention/arguments.py", "lse=torch.empty(", "lse=torch.zeros("),
        needs="triton",
    ),
    mutant(
        "attend_probabilities_clipped",
        "B038",
        "attend",
        "FP8",
        "attend.out",
        "Probabilities are cut at one half before the product with V, and not in the row sum.",
        (_KERNELS, _PV, _PV.replace("round_to(p, v.dtype)", "round_to(tl.minimum(p, 0.5), v.dtype)")),
        needs="triton",
    ),
    mutant(
        "attend_max_starts_finite",
        "own",
        "attend",
        "MERGE-LSE",
        "attend.lse",
        "The running maximum starts at -100, so that the probabilities of rows far below it vanish.",
        (_KERNELS, _FIRST_MAX, _FIRST_MAX.replace('float("-inf")', "-100.0")),
        needs="triton",
    ),
    mutant(
        "attend_masked_scores_finite",
        "own",
        "attend",
        "MERGE-LSE",
        "attend.lse",
        "Masked scores are -1000, and a row whose maximum is no higher counts as empty.",
        (_KERNELS, _MASKED_SCORES, _MASKED_SCORES.replace('float("-inf")', "-1000.0")),
        (_KERNELS, _SHIFT, _SHIFT.replace('== float("-inf")', "<= -1000.0")),
        needs="triton",
    ),
    mutant(
        "attend_accumulator_not_rescaled",
        "own",
        "attend",
        "MERGE-LSE",
        "attend.out",
        "The accumulator keeps the scale of an earlier maximum.",
        (_KERNELS, _PV, _PV.replace("acc * tl.expand_dims(decay, LAST_AXIS)", "acc")),
        needs="triton",
    ),
    mutant(
        "attend_sum_not_rescaled",
        "own",
        "attend",
        "MERGE-LSE",
        "attend.lse",
        "The row sum keeps the scale of an earlier maximum.",
        (
            _KERNELS,
            "row_sum = row_sum * decay + tl.sum(p, axis=LAST_AXIS)",
            "row_sum = row_sum + tl.sum(p, axis=LAST_AXIS)",
        ),
        needs="triton",
    ),
    mutant(
        "attend_reduced_query_precision",
        "B129",
        "attend",
        "DTYPE",
        "attend.lse",
        "Masked tiles multiply fp16 queries with 10 significant bits: a default of the dot product.",
        (
            _KERNELS,
            "    dim_k = tl.expand_dims(dims, ROW_AXES)\n",
            "    if KEYS >= MASKED and q.dtype == tl.float16:\n"
            "        q = (q.to(tl.uint16, bitcast=True) & 0xFFFE).to(tl.float16, bitcast=True)\n"
            "    dim_k = tl.expand_dims(dims, ROW_AXES)\n",
        ),
        needs="triton",
    ),
    mutant(
        "attend_key_offset_wraps",
        "B057",
        "attend",
        "INT32",
        "attend.lse",
        "The offset of a request's first key wraps (at 1,024 elements in place of 2^31).",
        (_KERNELS, _K_HEAD, _K_HEAD.replace("k_start.to(tl.int64) * stride_kt", "((k_start * stride_kt) & 0x3FF)")),
        needs="triton",
    ),
    mutant(
        "attend_query_offset_wraps",
        "B098",
        "attend",
        "INT32",
        "attend.lse",
        "The offset of a query row wraps (at 1,024 elements in place of 2^31).",
        (
            _KERNELS,
            "q_rows = q_ptr + head * stride_qh + token * stride_qt",
            "q_rows = q_ptr + head * stride_qh + ((token * stride_qt) & 0x3FF)",
        ),
        needs="triton",
    ),
    mutant(
        "attend_odd_head_takes_neighbour",
        "B156",
        "attend",
        "HEADDIM",
        "attend.lse",
        "Heads go in pairs; an odd last head is computed with the keys of the one before.",
        (
            _KERNELS,
            _K_HEAD,
            "paired = tl.where((head == num_heads - 1) & (num_heads % 2 == 1) & (head > 0), head - 1, head)\n    "
            + _K_HEAD.replace("head * stride_kh", "paired * stride_kh"),
        ),
        needs="triton",
    ),
    mutant(
        "attend_reads_values_past_end",
        "B060",
        "attend",
        "GATHER",
        "attend.out",
        "Values are read by whole pages, and the weight 0 is relied on for the rows behind the end, which hold NaN.",
        (_KERNELS, "v_ok = (key_v < k_len) & (dim_v < DV)", "v_ok = (key_v >= 0) & (dim_v < DV)"),
        (
            _LAUNCH,
            "    mask = call.mask\n",
            "    mask = call.mask\n"
            "    pages = torch.full_like(call.v.repeat(2, 1, 1), torch.nan)\n"
            "    pages = torch.cat([call.v, pages, pages.new_full((256, *pages.shape[1:]), torch.nan)])\n"
            "    strides[4], strides[5], unit = pages.stride(0), pages.stride(1), 1\n",
        ),
        (
            _LAUNCH,
            "        call.k,\n        call.v,\n        call.out,\n",
            "        call.k,\n        pages,\n        call.out,\n",
        ),
        needs="triton",
    ),
    mutant(
        "attend_scale_from_width",
        "B082",
        "attend",
        "HEADDIM",
        "attend.lse",
        "The softmax scale is taken from the head dim, not from the argument.",
        (_LAUNCH, _SCALE, "        call.q.shape[2] ** -0.5 * LOG2_E,\n"),
        needs="triton",
    ),
    mutant(
        "attend_divides_by_scale",
        "B084",
        "attend",
        "HEADDIM",
        "attend.lse",
        "Scores are divided by the scale.",
        (_LAUNCH, _SCALE, "        LOG2_E / scale,\n"),
        needs="triton",
    ),
    mutant(
        "attend_scale_of_first_call",
        "B035",
        "attend",
        "CACHEKEY",
        "attend.lse",
        "The scale of the first call is kept for all.",
        (_LAUNCH, _SCALE, '        _HELD.setdefault("scale", scale) * LOG2_E,\n'),
        (_LAUNCH, _HEADER, _HEADER + "_HELD: dict[str, float] = {}\n"),
        needs="triton",
    ),
    mutant(
        "attend_tail_of_head_dim_lost",
        "own",
        "attend",
        "HEADDIM",
        "attend.lse",
        "Of a head dim that 8 does not divide the rest is left out of the scores.",
        (
            _KERNELS,
            "k = tl.load(k_dims + k_keys, mask=key_ok & (dim_k < D), other=0.0)",
            "k = tl.load(k_dims + k_keys, mask=key_ok & (dim_k < D - D % 8), other=0.0)",
        ),
        needs="triton",
    ),
    mutant(
        "attend_rounds_probabilities_twice",
        "own",
        "attend",
        "DTYPE",
        "attend.out",
        "Probabilities keep 5 significant bits.",
        (
            _KERNELS,
            _PV,
            "coarse = (p.to(tl.uint32, bitcast=True) & 0xFFF80000).to(tl.float32, bitcast=True)\n        "
            + _PV.replace("round_to(p,", "round_to(coarse,"),
        ),
        needs="triton",
    ),
    mutant(
        "attend_stores_lse_base2",
        "own",
        "attend",
        "MERGE-LSE",
        "attend.lse",
        "The kernel reports a base-2 LSE where a natural one is declared.",
        (_KERNELS, _LSE, _LSE.replace(" * LN_2)", ")")),
        needs="triton",
    ),
)
