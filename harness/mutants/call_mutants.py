"""Faults of the chunk loop: an attention call that is given what belongs to another."""

from __future__ import annotations

from harness.mutants.mutant import mutant

_PATH = "mha_path.py"
_SUFFIX_STARTS = "set_key_starts(masks.global_mask, self.context_lens_device)"
_PROJECT = "k, v = self._project(name, rows[:, :lora], rows[:, lora:].unsqueeze(1))\n"
_CHUNK_MASK = "        call_mask = CallMask() if masks is None else self._chunk_mask(name, chunk, masks)\n"
_LENS = "lens: list[int] = chunk.seq_lens.tolist()"

CALL_MUTANTS = (
    mutant(
        "chunk_key_start_off_by_one",
        "own",
        "chunk_loop",
        "CHUNK",
        "chunk_loop.key_start",
        "The global mask of a context chunk is read from one key too far.",
        (_PATH, "set_key_starts(mask, chunk.starts)", "set_key_starts(mask, chunk.starts + 1)"),
    ),
    mutant(
        "chunk_key_start_not_set",
        "own",
        "chunk_loop",
        "CHUNK",
        "chunk_loop.key_start",
        "A chunk reads the global mask from where the call before it did.",
        (_PATH, "            set_key_starts(mask, chunk.starts)\n", ""),
    ),
    mutant(
        "suffix_key_starts_ignored",
        "B123",
        "chunk_loop",
        "SPARSE",
        "chunk_loop.offset",
        "The suffix call reads the global mask in coordinates of the suffix.",
        (
            _PATH,
            "return CallMask(masks.global_mask, offset=True)",
            "return CallMask(masks.global_mask, offset=False)",
        ),
    ),
    mutant(
        "suffix_key_starts_from_queries",
        "B074",
        "chunk_loop",
        "TOPK",
        "chunk_loop.key_start",
        "The suffix call's key starts are the running sum of query lengths, not the context lengths.",
        (_PATH, _SUFFIX_STARTS, "set_key_starts(masks.global_mask, self.meta.query_start_loc[:-1])"),
    ),
    mutant(
        "suffix_mask_not_causal",
        "own",
        "mask",
        "MASKMOD",
        "mask.bits",
        "The suffix's own mask keeps keys behind the query.",
        (
            _PATH,
            "            masks.workspace,\n            own_first_pos,\n            starts,",
            "            masks.workspace,\n            own_first_pos + self.meta.max_query_len,\n            starts,",
        ),
    ),
    mutant(
        "suffix_remapped_by_longest_context",
        "own",
        "remap",
        "CHUNK",
        "remap.rows",
        "All suffixes are taken to start behind the longest context.",
        (
            _PATH,
            "starts = self.meta.context_lens_cpu\n",
            "starts = [max(self.meta.context_lens_cpu)] * self.meta.num_requests\n",
        ),
    ),
    mutant(
        "suffix_key_length_of_chunk",
        "B028",
        "chunk_loop",
        "MASKMOD",
        "chunk_loop.max_seqlen_k",
        "The suffix call is given the longest key length of the first context chunk.",
        (
            _PATH,
            "return self._attend(name, 0, self.batch.q, k, v, starts, starts, longest, longest, call_mask)",
            "keys = longest\n"
            "        if self.meta.chunked_context is not None:\n"
            "            keys = min(self.meta.chunked_context.chunks[0].max_seq_len, len(k))\n"
            "        return self._attend(name, 0, self.batch.q, k, v, starts, starts, longest, keys, call_mask)",
        ),
    ),
    mutant(
        "suffix_mask_words_of_whole_batch",
        "B151",
        "mask",
        "CHUNK",
        "mask.shape",
        "The words of the suffix mask are counted for the sum of the lengths, not for the longest.",
        (
            _PATH,
            "            self.meta.max_query_len,\n            masks.workspace,",
            "            self.meta.num_tokens,\n            masks.workspace,",
        ),
    ),
    mutant(
        "chunk_mask_words_of_queries",
        "B020",
        "mask",
        "BITMASK",
        "mask.bits",
        "The mask of a context chunk is sized for the longest query length, not for the longest key length.",
        (
            _PATH,
            "mask = self._build_mask(name, topk, q_lens, chunk.max_seq_len, masks.workspace, None, starts, lens)",
            "mask = self._build_mask(name, topk, q_lens, max(q_lens), masks.workspace, None, starts, lens)",
        ),
        also=("chunk_loop",),
    ),
    mutant(
        "chunk_lengths_of_chunk_before",
        "B103",
        "remap",
        "ASYNC",
        "remap.rows",
        "Key lengths are read from a host buffer that still holds the chunk before.",
        (
            _PATH,
            _LENS,
            "assert self.meta.chunked_context is not None\n"
            "        held = self.meta.chunked_context.chunks[max(chunk.index - 1, 0)].seq_lens.tolist()\n"
            "        lens: list[int] = held if len(held) == len(starts) else chunk.seq_lens.tolist()",
        ),
    ),
    mutant(
        "chunk_causal",
        "B114",
        "chunk_loop",
        "MASKMOD",
        "chunk_loop.causal",
        "A context chunk of the dense path is attended causally.",
        (
            _PATH,
            "CallMask() if masks is None else self._chunk_mask",
            "CallMask(causal=True) if masks is None else self._chunk_mask",
        ),
    ),
    mutant(
        "chunk_values_of_chunk_before",
        "B139",
        "chunk_loop",
        "GATHER",
        "chunk_loop.v",
        "Keys of a chunk meet the values of the chunk before: a double buffer off by one.",
        (
            _PATH,
            _PROJECT,
            _PROJECT + '        held, self.held = self.__dict__.get("held", v), v\n'
            "        v = held[: len(v)] if len(held) >= len(v) else v\n",
        ),
    ),
    mutant(
        "chunk_values_overwritten_by_next_gather",
        "B017",
        "chunk_loop",
        "DETERMINISM",
        "chunk_loop.v",
        "The next chunk is gathered into the values of this one before they are attended.",
        (
            _PATH,
            _CHUNK_MASK,
            _CHUNK_MASK + "        if chunk.index + 1 < len(context.chunks):\n"
            "            ahead = context.chunks[chunk.index + 1]\n"
            "            landed = rows.new_empty((ahead.num_context_tokens, rows.shape[1]))\n"
            "            gather_and_maybe_dequant_cache(\n"
            "                self.batch.cache,\n"
            "                landed,\n"
            "                self.meta.block_table[ahead.request_slice],\n"
            "                ahead.cu_seq_lens,\n"
            "                ahead.token_to_seq,\n"
            "                ahead.num_context_tokens,\n"
            "                self.layer.kv_cache_dtype,\n"
            "                self.layer.kv_cache_scale,\n"
            "                ahead.starts,\n"
            "            )\n"
            "            count, width = min(len(v), len(landed)), min(v.shape[2], landed.shape[1])\n"
            "            v[:count, 0, :width] = landed[:count, :width]\n",
        ),
    ),
    mutant(
        "chunk_rope_halves_swapped",
        "B140",
        "chunk_loop",
        "HEADDIM",
        "chunk_loop.k_pe",
        "The halves of the shared key part are swapped for context keys only.",
        (
            _PATH,
            _PROJECT,
            _PROJECT.replace(
                "rows[:, lora:].unsqueeze(1)",
                "rows[:, lora:].roll(self.layer.dims.qk_rope_head_dim // 2, 1).unsqueeze(1)",
            ),
        ),
    ),
    mutant(
        "chunk_mask_workspace_reused",
        "B106",
        "chunk_loop",
        "ASYNC",
        "chunk_loop.mask_bits",
        "The gather of a later chunk writes into memory that the global mask still lies in.",
        (
            _PATH,
            _PROJECT,
            _PROJECT + "        if masks is not None and chunk.index:\n"
            "            masks.workspace[: rows.shape[1]] = rows[0].to(torch.int32)\n",
        ),
    ),
    mutant(
        "chunk_queries_of_batch_start",
        "own",
        "chunk_loop",
        "CHUNK",
        "chunk_loop.q",
        "A chunk attends with the first queries of the batch.",
        (
            _PATH,
            "self.batch.q[chunk.token_slice],",
            "self.batch.q[: chunk.token_slice.stop - chunk.token_slice.start],",
        ),
    ),
    mutant(
        "chunk_empty_lse_plus_inf",
        "B044",
        "attend",
        "MERGE-LSE",
        "attend.lse",
        "In a context chunk a row without keys gets LSE +inf.",
        (
            _PATH,
            "        if self.trace is not None:\n            mask = call_mask.mask\n",
            '        if name.startswith("chunk"):\n'
            "            lse = torch.where(torch.isneginf(lse), torch.inf, lse)\n"
            "        if self.trace is not None:\n            mask = call_mask.mask\n",
        ),
    ),
    mutant(
        "chunk_last_one_skipped",
        "own",
        "chunk_loop",
        "CHUNK",
        "chunk_loop.calls",
        "The last of several context chunks is not attended.",
        (_PATH, "for chunk in context.chunks:", "for chunk in context.chunks[: max(len(context.chunks) - 1, 1)]:"),
    ),
    mutant(
        "output_clears_row_behind",
        "B137",
        "guard",
        "EMPTY",
        "guard.output",
        "The output row behind the last token is written as well.",
        (
            _PATH,
            "        out = self.batch.output_heads(self.layer.dims.num_heads)\n",
            "        out = self.batch.output_heads(self.layer.dims.num_heads)\n"
            "        rows, stride = self.meta.num_tokens + 1, self.batch.output.stride(0)\n"
            "        self.batch.output.as_strided((rows, 1), (stride, 1)).zero_()\n",
        ),
    ),
    mutant(
        "final_merge_sides_swapped",
        "own",
        "merge",
        "MERGE-LSE",
        "merge.out",
        "The final merge weights each side by the other's LSE.",
        (
            _PATH,
            "merge_attn_states(out, context_out, context_lse, suffix_out, suffix_lse, self.batch.lse)",
            "merge_attn_states(out, context_out, suffix_lse, suffix_out, context_lse, self.batch.lse)",
        ),
    ),
)
