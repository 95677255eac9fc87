"""Faults of the chunk plan and of the batch's metadata."""

from __future__ import annotations

from harness.mutants.mutant import mutant

_CHUNKS = "chunks.py"
_METADATA = "metadata.py"
_LENS = "lens = query_lens[requests]"
_MAX_QUERY = "max_query_len=max(lens),"
_ROOM = "room = row_budget - sum(lengths)"
_HEADER = "\nMAX_WORKSPACE_ROWS = 65_536\n"

PLAN_MUTANTS = (
    mutant(
        "plan_one_row_over_budget",
        "B065",
        "plan",
        "CHUNK",
        "plan.chunks",
        "The planner allows one row more than the workspace holds; the gather drops it.",
        (_CHUNKS, _ROOM, _ROOM + " + 1"),
        (
            "mha_path.py",
            "            chunk.num_context_tokens,\n            self.layer.kv_cache_dtype,",
            "            min(chunk.num_context_tokens, len(rows)),\n            self.layer.kv_cache_dtype,",
        ),
    ),
    mutant(
        "plan_one_row_under_budget",
        "own",
        "plan",
        "CHUNK",
        "plan.chunks",
        "A context that fits exactly is cut.",
        (_CHUNKS, "if remaining > room:", "if remaining >= room:"),
    ),
    mutant(
        "plan_prefix_not_aligned",
        "own",
        "plan",
        "CHUNK",
        "plan.chunks",
        "The prefix of a cut context is not rounded down to the alignment.",
        (_CHUNKS, "taken = prefix - prefix % split_alignment", "taken = prefix"),
    ),
    mutant(
        "plan_ignores_longest_piece",
        "own",
        "plan",
        "CHUNK",
        "plan.chunks",
        "The limit on one piece of a context is ignored.",
        (_CHUNKS, "prefix = min(room, max_context_chunk)", "prefix = room"),
    ),
    mutant(
        "plan_runs_over_empty_context",
        "own",
        "plan",
        "CHUNK",
        "plan.chunks",
        "A request without context does not end the run of a chunk.",
        (
            _CHUNKS,
            "        if context == 0:\n            close(request)\n",
            "        if context == 0:\n            pass\n",
        ),
    ),
    mutant(
        "plan_skips_one_token_prefills",
        "B159",
        "plan",
        "CHUNK",
        "plan.chunks",
        "A request with one new token counts as a decode and has no context.",
        (
            _METADATA,
            "        list(context_lens),\n        list(query_lens),\n",
            "        [0 if query == 1 else context for context, query in zip(context_lens, query_lens, strict=True)],\n"
            "        list(query_lens),\n",
        ),
        also=("dispatch", "mqa"),
    ),
    mutant(
        "plan_forgets_context_that_fits",
        "B061",
        "plan",
        "CHUNK",
        "plan.chunks",
        "Chunks are planned only if the context is larger than the workspace.",
        (
            _METADATA,
            "        chunked_context=chunked,\n",
            "        chunked_context=chunked if sum(context_lens) > context_row_budget else None,\n",
        ),
        also=("dispatch", "mqa"),
    ),
    mutant(
        "plan_queries_of_first_requests",
        "B142",
        "plan",
        "SPARSE",
        "plan.query_start_loc",
        "A chunk takes the query lengths of the batch's first requests, not of its own.",
        (_CHUNKS, _LENS, "lens = query_lens[: len(planned.lengths)]"),
    ),
    mutant(
        "plan_lengths_of_longest",
        "B112",
        "plan",
        "GATHER",
        "plan.chunks",
        "Every request of a chunk gets the length of the longest.",
        (
            _CHUNKS,
            "        seq_lens=seq_lens,\n",
            "        seq_lens=torch.full_like(seq_lens, max(planned.lengths)),\n",
        ),
    ),
    mutant(
        "plan_stale_query_length",
        "B102",
        "plan",
        "ASYNC",
        "plan.max_query_len",
        "A chunk's longest query length is that of the chunk before, in this call or in the last.",
        (
            _CHUNKS,
            _MAX_QUERY,
            "max_query_len=_STEPS.append(max(lens)) or min(_STEPS[-2], sum(lens)),",
        ),
        (_CHUNKS, _HEADER, _HEADER + "_STEPS = [0]\n"),
    ),
    mutant(
        "plan_token_slice_not_moved",
        "B146",
        "plan",
        "ASYNC",
        "plan.token_slice",
        "A chunk's query offsets are its own, its token slice is the first chunk's.",
        (
            _CHUNKS,
            "tokens = slice(token_starts[requests.start], token_starts[requests.stop])",
            "tokens = slice(0, sum(lens))",
        ),
    ),
    mutant(
        "plan_continuation_not_seen",
        "own",
        "plan",
        "CHUNK",
        "plan.is_continuation",
        "A chunk that continues a context does not say so.",
        (_CHUNKS, "return self.starts[0] > 0", "return self.starts[0] > self.lengths[0]"),
    ),
    mutant(
        "plan_continuation_end_of_chunk",
        "own",
        "plan",
        "CHUNK",
        "plan.continuation_token_end",
        "All tokens of a chunk count as continued, not only its first request's.",
        (_CHUNKS, "(lens[0] if planned.is_continuation else 0)", "(sum(lens) if planned.is_continuation else 0)"),
    ),
    mutant(
        "plan_starts_of_block",
        "own",
        "plan",
        "CHUNK",
        "plan.chunks",
        "The start of a continued context is one row early.",
        (
            _CHUNKS,
            "starts=on_device(planned.starts),",
            "starts=on_device([max(start - 1, 0) for start in planned.starts]),",
        ),
    ),
    mutant(
        "metadata_offsets_of_first_call",
        "B107",
        "prefill",
        "ASYNC",
        "prefill.run",
        "The query offsets of the first batch serve every later batch with as many requests.",
        (
            _METADATA,
            "        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),\n",
            "        query_start_loc=_HELD.setdefault(\n"
            "            len(starts), torch.tensor(starts, dtype=torch.int32, device=device)\n"
            "        ),\n",
        ),
        (
            _METADATA,
            "\n\n@dataclass(frozen=True)",
            "\n_HELD: dict[int, torch.Tensor] = {}\n\n\n@dataclass(frozen=True)",
        ),
        also=("chunk_loop",),  # on a GPU, whose numbers the layer does not read back, the first call that uses them
    ),
)
