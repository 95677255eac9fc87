"""Faults of sparse MQA: slots, absorption, the kernel over listed rows."""

from __future__ import annotations

from harness.mutants.mutant import mutant

_KERNEL = "sparse_mqa_kernel.py"
_HOST = "sparse_mqa.py"
_SLOTS = "slots.py"
_PATH = "mqa_path.py"
_LATENT = "latent = tl.load(kv_rows + dim, mask=kv_ok & dims_ok, other=0)"
_ROPE_E4M3 = "rope = round_to(decode_e4m3(rope) * kv_scale, q.dtype)"
_LSE = 'lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.math.log2(divisor)) * LN_2)'
_FIRST_MAX = 'row_max = tl.full(STATS, float("-inf"), tl.float32)'
_SCORES = 'scores = tl.where(tl.expand_dims(keep, KEEP_AXIS), scores * scale_log2, float("-inf"))'
_SHIFT = 'shift = tl.where(new_max == float("-inf"), 0.0, new_max)'
_COUNTS = "return slots, valid.sum(dim=1, dtype=torch.int32)"

MQA_MUTANTS = (
    mutant(
        "mqa_multiplies_invalid_rows",
        "B016",
        "mqa",
        "TOPK",
        "mqa.out",
        "Rows of invalid entries are read and weighted by 0; the slot that stands for them may hold NaN.",
        (_KERNEL, _LATENT, "latent = tl.load(kv_rows + dim, mask=(kv_ok | ~kv_ok) & dims_ok, other=0)"),
    ),
    mutant(
        "mqa_reads_stale_tail",
        "B071",
        "mqa",
        "TOPK",
        "mqa.lse",
        "The number of valid entries is not passed, so that the whole width is attended, its stale tail too.",
        (
            _HOST,
            "slots = torch.where(valid, indices, end)",
            "slots = torch.where(valid, indices, max(num_slots - 1, 0))",
        ),
        (_HOST, _COUNTS, "return slots, torch.full_like(valid.sum(dim=1, dtype=torch.int32), slots.shape[1])"),
    ),
    mutant(
        "mqa_counts_duplicates",
        "own",
        "mqa",
        "TOPK",
        "mqa.lse",
        "A slot that is listed twice is attended twice.",
        (
            _HOST,
            "slots[:, 1:].masked_fill_(repeated, -1)",
            "slots[:, 1:].masked_fill_(repeated & (slots[:, 1:] < 0), -1)",
        ),
    ),
    mutant(
        "mqa_empty_lse_plus_inf",
        "B045",
        "mqa",
        "MERGE-LSE",
        "mqa.lse",
        "A row without keys gets LSE +inf.",
        (_KERNEL, _LSE, _LSE.replace('"-inf"', '"inf"')),
    ),
    mutant(
        "mqa_max_starts_finite",
        "own",
        "mqa",
        "MERGE-LSE",
        "mqa.lse",
        "The running maximum starts at -100, so that the probabilities of rows far below it vanish.",
        (_KERNEL, _FIRST_MAX, _FIRST_MAX.replace('float("-inf")', "-100.0")),
    ),
    mutant(
        "mqa_invalid_scores_finite",
        "own",
        "mqa",
        "MERGE-LSE",
        "mqa.lse",
        "Scores of invalid entries are -1000, and a row whose maximum is no higher counts as empty.",
        (_KERNEL, _SCORES, _SCORES.replace('float("-inf")', "-1000.0")),
        (_KERNEL, _SHIFT, _SHIFT.replace('== float("-inf")', "<= -1000.0")),
    ),
    mutant(
        "mqa_slot_row_wraps",
        "B153",
        "mqa",
        "INT32",
        "mqa.lse",
        "The offset of a row of slots wraps (at 256 entries in place of 2^31).",
        (
            _KERNEL,
            "slot_rows = slots_ptr + rows[:, None] * stride_it",
            "slot_rows = slots_ptr + ((rows[:, None] * stride_it) & 0xFF)",
        ),
        (_KERNEL, "slot_rows = slots_ptr + row * stride_it", "slot_rows = slots_ptr + ((row * stride_it) & 0xFF)"),
    ),
    mutant(
        "mqa_rope_offset_wraps",
        "B099",
        "mqa",
        "INT32",
        "mqa.lse",
        "The offset of a row's rope part wraps (at 1,024 elements in place of 2^31).",
        (
            _KERNEL,
            "rope = tl.load(kv_rows + (LATENT + rope_dim), mask=kv_ok & rope_ok, other=0)",
            "wrapped = tl.expand_dims(kv_offsets & 0x3FF, LAST_AXIS)\n"
            "                rope = tl.load(kv_ptr + wrapped + (LATENT + rope_dim), mask=kv_ok & rope_ok, other=0)",
        ),
    ),
    mutant(
        "mqa_rope_saturates_at_latent",
        "B086",
        "mqa",
        "FP8",
        "mqa.lse",
        "The rope part of an FP8 row is cut at the largest magnitude of its latent.",
        (
            _KERNEL,
            _ROPE_E4M3,
            "most = tl.expand_dims(tl.max(tl.abs(widen(latent)), axis=LAST_AXIS), LAST_AXIS)\n"
            "                    value = tl.minimum(tl.maximum(decode_e4m3(rope) * kv_scale, -most), most)\n"
            "                    rope = round_to(value, q.dtype)",
        ),
        (
            _KERNEL,
            "from optimized.rounding import dot, round_to\n",
            "from optimized.rounding import dot, round_to, widen\n",
        ),
    ),
    mutant(
        "mqa_values_not_scaled",
        "own",
        "mqa",
        "FP8",
        "mqa.out",
        "Values of an FP8 row are used without the scale.",
        (
            _KERNEL,
            "acc = dot(round_to(p, q.dtype), latent, acc * tl.expand_dims(decay, LAST_AXIS))",
            "weight = p / kv_scale if FORMAT == FP8_E4M3 else p\n"
            "        acc = dot(round_to(weight, q.dtype), latent, acc * tl.expand_dims(decay, LAST_AXIS))",
        ),
    ),
    mutant(
        "mqa_rope_left_out",
        "own",
        "mqa",
        "HEADDIM",
        "mqa.lse",
        "Scores are those of the latent part alone.",
        (_KERNEL, "scores = dot(q_rope, rope_t, scores)", "scores = scores * 1.0"),
    ),
    mutant(
        "mqa_last_entry_left_out",
        "own",
        "mqa",
        "TOPK",
        "mqa.lse",
        "The last entry of a row is not attended.",
        (_KERNEL, "mask=entries < count, other=-1)", "mask=entries < count - 1, other=-1)"),
    ),
    mutant(
        "slots_virtual_offset",
        "B095",
        "slots",
        "CP",
        "slots.rows",
        "A position is added to its block without being reduced to an offset in the block.",
        (_SLOTS, "blocks * block_size + safe % block_size", "blocks * block_size + safe"),
    ),
    mutant(
        "slots_suffix_in_context",
        "own",
        "slots",
        "GATHER",
        "slots.rows",
        "Keys of the suffix are looked up in the cache too.",
        (
            _SLOTS,
            "(positions < context_lens[requests].unsqueeze(1))",
            "(positions <= context_lens[requests].unsqueeze(1))",
        ),
    ),
    mutant(
        "slots_future_keys",
        "own",
        "slots",
        "MASKMOD",
        "slots.rows",
        "A query may list new tokens behind its own.",
        (_SLOTS, "owned = (rows >= starts) & (rows <= tokens)", "owned = (rows >= starts) & (rows < topk.shape[0])"),
    ),
    mutant(
        "slots_table_of_first_request",
        "own",
        "slots",
        "GATHER",
        "slots.rows",
        "All requests look their blocks up in the first row of the table.",
        (
            _SLOTS,
            "block_table[requests.unsqueeze(1), safe // block_size]",
            "block_table[0 * requests.unsqueeze(1), safe // block_size]",
        ),
    ),
    mutant(
        "absorb_rope_from_front",
        "own",
        "absorb",
        "HEADDIM",
        "absorb.q_rope",
        "The rope part of a query is taken from the front of the head.",
        (_PATH, "absorbed[..., lora:] = q[..., nope:]", "absorbed[..., lora:] = q[..., : q.shape[2] - nope]"),
    ),
    mutant(
        "absorb_neighbour_head",
        "own",
        "absorb",
        "HEADDIM",
        "absorb.out",
        "Queries are absorbed with the weight of the next head.",
        (
            _PATH,
            "torch.bmm(q[..., :nope].transpose(0, 1), w_uk)",
            "torch.bmm(q[..., :nope].transpose(0, 1), w_uk.roll(1, 0))",
        ),
    ),
    mutant(
        "unproject_neighbour_head",
        "own",
        "unproject",
        "HEADDIM",
        "unproject.out",
        "Latent outputs go through the value weight of the next head.",
        (_PATH, "torch.bmm(latent.transpose(0, 1), w_uv)", "torch.bmm(latent.transpose(0, 1), w_uv.roll(1, 0))"),
    ),
)
