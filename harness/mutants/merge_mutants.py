"""Faults of the merge of partials and of the running context partial."""

from __future__ import annotations

from harness.mutants.mutant import mutant

_MERGE = "merge.py"
_PATH = "mha_path.py"
_ACCUMULATE = "accumulate_context_chunk(out, lse, chunk, chunk_out, chunk_lse)"
_COPY = "    output[start + merged : stop].copy_(chunk_output[merged:])\n"

MERGE_MUTANTS = (
    mutant(
        "merge_base2",
        "B048",
        "merge",
        "MERGE-LSE",
        "merge.lse",
        "The suffix LSE is taken for base 2 in a natural-log merge.",
        (_MERGE, "    suffix_lse = _load_lse(", "    suffix_lse = 1.4426950408889634 * _load_lse("),
    ),
    mutant(
        "merge_base2_weights",
        "B050",
        "merge",
        "CP",
        "merge.lse",
        "Both sides are weighted by powers of two, and the result is a base-2 logarithm.",
        (_MERGE, "tl.exp(prefix_lse - shift)", "tl.math.exp2(prefix_lse - shift)"),
        (_MERGE, "tl.exp(suffix_lse - shift)", "tl.math.exp2(suffix_lse - shift)"),
        (_MERGE, "largest + tl.log(total)", "largest + tl.math.log2(total)"),
    ),
    mutant(
        "merge_unguarded_empty_row",
        "B041",
        "merge",
        "MERGE-LSE",
        "merge.lse",
        "A row that is empty on both sides is shifted by -inf.",
        (_MERGE, "shift = tl.where(empty, 0.0, largest)", "shift = largest"),
    ),
    mutant(
        "merge_reads_empty_side",
        "B154",
        "merge",
        "CP",
        "merge.alone",
        "The output of an empty side is read and multiplied by 0.",
        (_MERGE, 'from_prefix = live & (prefix_lse != float("-inf"))[:, None]', "from_prefix = live"),
        (_MERGE, 'from_suffix = live & (suffix_lse != float("-inf"))[:, None]', "from_suffix = live"),
    ),
    mutant(
        "merge_suffix_by_prefix_strides",
        "B053",
        "merge",
        "HEADDIM",
        "merge.alone",
        "The suffix output is read with the strides of the prefix output.",
        (
            _MERGE,
            "            suffix_output.stride(0),\n            suffix_output.stride(1),\n",
            "            prefix_output.stride(0),\n            prefix_output.stride(1),\n",
        ),
    ),
    mutant(
        "merge_suffix_lse_by_prefix_strides",
        "B053",
        "merge",
        "HEADDIM",
        "merge.lse",
        "The suffix LSE is read with the strides of the prefix LSE.",
        (
            _MERGE,
            "            suffix_lse.stride(0),\n            suffix_lse.stride(1),\n",
            "            prefix_lse.stride(0),\n            prefix_lse.stride(1),\n",
        ),
    ),
    mutant(
        "merge_plain_average",
        "own",
        "merge",
        "MERGE-LSE",
        "merge.out",
        "The sides are added with their weights and not divided by the sum.",
        (_MERGE, "suffix * suffix_weight[:, None]) / total[:, None]", "suffix * suffix_weight[:, None])"),
    ),
    mutant(
        "merge_lse_without_log",
        "own",
        "merge",
        "MERGE-LSE",
        "merge.lse",
        "The merged LSE is the larger of the two.",
        (_MERGE, "largest + tl.log(total)", "largest + 0.0 * total"),
    ),
    mutant(
        "partial_starts_at_zero_lse",
        "B093",
        "merge",
        "CP",
        "merge.partial_lse",
        "The LSE of tokens without context starts at 0, a weight of 1.",
        (
            _MERGE,
            'lse = torch.full((num_heads, num_tokens), float("-inf"), dtype=torch.float32, device=device)',
            "lse = torch.zeros((num_heads, num_tokens), dtype=torch.float32, device=device)",
        ),
    ),
    mutant(
        "partial_lse_not_updated",
        "B063",
        "merge",
        "CHUNK",
        "merge.lse",
        "A continued request's LSE stays that of its earlier chunks.",
        (_MERGE, "            output_lse=running_lse,\n", ""),
    ),
    mutant(
        "partial_skips_output_beside_empty_row",
        "B094",
        "merge",
        "CP",
        "merge.partial_out",
        "A chunk that leaves any row without keys has its LSE put down, but not its output.",
        (_MERGE, _COPY, "    if not bool(torch.isneginf(chunk_lse).any()):\n    " + _COPY),
    ),
    mutant(
        "partial_continuation_overwritten",
        "own",
        "merge",
        "CHUNK",
        "merge.lse",
        "A continued request takes the later chunk's result in place of merging it.",
        (_MERGE, "merged = chunk.continuation_token_end - start\n", "merged = 0\n"),
    ),
    mutant(
        "partial_first_token_not_merged",
        "own",
        "merge",
        "CHUNK",
        "merge.lse",
        "The last token of a continued request is copied, not merged.",
        (
            _MERGE,
            "merged = chunk.continuation_token_end - start\n",
            "merged = max(chunk.continuation_token_end - start - 1, 0)\n",
        ),
    ),
    mutant(
        "partial_exhausted_rows_overwritten",
        "B056",
        "merge",
        "CHUNK",
        "merge.partial_out",
        "Rows of requests whose context is used up take the output of another row of the later chunk.",
        (
            _PATH,
            _ACCUMULATE,
            _ACCUMULATE + "\n"
            "            done = min(chunk.token_slice.start, len(chunk_out))\n"
            "            out[:done] = chunk_out[:done]",
        ),
    ),
    mutant(
        "partial_lse_base2",
        "B051",
        "merge",
        "CP",
        "merge.partial_lse",
        "The LSE of context chunks is taken for base 2 on its way to the merge.",
        (_PATH, _ACCUMULATE, "accumulate_context_chunk(out, lse, chunk, chunk_out, chunk_lse * 0.6931471805599453)"),
    ),
)
