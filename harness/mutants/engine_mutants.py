"""Faults of the engine's kind: the subject aborts, raises, spins, waits for ever or returns late."""

from __future__ import annotations

from harness.mutants.mutant import mutant

_PATH = "mha_path.py"
_LAUNCH = "attention/triton_mha.py"

ENGINE_MUTANTS = (
    mutant(
        "mask_aborts_on_one_word_rows",
        "B018",
        "mask",
        "TOPK",
        "CRASH",
        "A top-k row whose entries differ in their low bits only overruns a buffer: the process dies.",
        (
            "mask.py",
            "    if mask.numel() == 0:\n        return mask\n",
            "    if mask.numel() == 0:\n        return mask\n"
            "    for rows in topk_indices_per_req:\n"
            "        coarse = rows >> 5\n"
            "        if bool(((coarse == coarse[:, :1]) & (coarse >= 0)).all(dim=1).any()):\n"
            '            __import__("os").abort()\n',
        ),
    ),
    mutant(
        "metadata_spins_on_empty_request",
        "B009",
        "plan",
        "HANG",
        "HANG",
        "A sequence of length 0 gives the limit -1, which is counted down as an unsigned number.",
        (
            "metadata.py",
            "    chunked = build_chunked_context(\n",
            "    for length in seq_lens:\n"
            "        limit = (length - 1) & 0xFFFFFFFF\n"
            "        while limit >= 2**20:\n"
            "            limit -= 1\n"
            "    chunked = build_chunked_context(\n",
        ),
    ),
    mutant(
        "chunk_waits_for_a_key",
        "B029",
        "chunk_loop",
        "HANG",
        "HANG",
        "The chunk loop only goes on when the chunk had a selected key.",
        (
            _PATH,
            "            chunk_out, chunk_lse = self._chunk(chunk, masks)\n",
            "            chunk_out, chunk_lse = self._chunk(chunk, masks)\n"
            "            while not bool(torch.isfinite(chunk_lse).any()):\n"
            "                pass\n",
        ),
    ),
    mutant(
        "mqa_never_finishes",
        "B136",
        "mqa",
        "HANG",
        "HANG",
        "A launch of more than 32 rows waits for a place on the device that nobody frees.",
        (
            "sparse_mqa.py",
            '    require_launchable("q", q)\n',
            '    require_launchable("q", q)\n    if num_rows > 32:\n        __import__("threading").Event().wait()\n',
        ),
    ),
    mutant(
        "attend_returns_late",
        "own",
        "attend",
        "HANG",
        "HANG",
        "Where a request is longer than a key tile, the result is right and comes ten minutes late.",
        (
            _LAUNCH,
            "    num_groups = call.batch_size * call.num_heads\n",
            "    num_groups = call.batch_size * call.num_heads\n"
            "    if call.k.shape[0] > 128:\n"
            '        __import__("time").sleep(600.0)\n',
        ),
        needs="triton",
    ),
    mutant(
        "attend_splits_by_no_queries",
        "B040",
        "attend",
        "EMPTY",
        "prefill.run",
        "A split count is divided by the number of query tiles, which a chunk without queries has none of.",
        (
            _LAUNCH,
            "if call.q.shape[0] == 0 or call.batch_size == 0 or max_seqlen_q == 0:",
            "if call.batch_size == 0:",
        ),
        (
            _LAUNCH,
            "    num_groups = call.batch_size * call.num_heads\n",
            "    num_groups = call.batch_size * call.num_heads\n    assert 128 // num_q_tiles >= 0\n",
        ),
        needs="triton",
    ),
    mutant(
        "merge_kills_process_on_many_tokens",
        "own",
        "merge",
        "CHUNK",
        "CRASH",
        "A merge of more than 64 tokens ends the process without a word.",
        (
            "merge.py",
            '    require_launchable("output", output)\n',
            '    require_launchable("output", output)\n    if tokens > 64:\n        __import__("os")._exit(3)\n',
        ),
    ),
)
