"""Faults of the layer around its kernels: the path that a batch takes, its top-k rows, the projection."""

from __future__ import annotations

from harness.mutants.mutant import mutant

_DISPATCH = "dispatch.py"
_PROJECTION = "projection.py"
_LAYER = "sparse_mla.py"
_SPLIT = "k_nope, v = product.view(tokens, num_heads, nope + v_head_dim).split((nope, v_head_dim), dim=-1)"
_ROPE = "k[..., nope:].copy_(k_pe.expand(tokens, heads, rope))"

LAYER_MUTANTS = (
    mutant(
        "dispatch_dense_reads_cleared_topk",
        "B001",
        "dispatch",
        "SPARSE",
        "dispatch.path",
        "A batch that is short enough for dense MHA goes to masked MHA with a cleared top-k buffer.",
        (
            _LAYER,
            "        if path is Path.DENSE:\n",
            "        if path is Path.DENSE and dispatch.batch_fits_mask_workspace(prefill):\n"
            "            topk = torch.full_like(topk, -1)\n"
            "        elif path is Path.DENSE:\n",
        ),
    ),
    mutant(
        "dispatch_masked_on_quantised_cache",
        "B118",
        "dispatch",
        "SPARSE",
        "dispatch.path",
        "Masked MHA claims to serve a cache with one FP8 scale.",
        (_DISPATCH, 'if kv_cache_dtype != "auto":', 'if kv_cache_dtype == "fp8_ds_mla":'),
    ),
    mutant(
        "dispatch_masked_falls_back",
        "B157",
        "dispatch",
        "SPARSE",
        "dispatch.path",
        "Every batch for masked MHA is served by sparse MQA, with the right numbers.",
        (_DISPATCH, "    return Path.MASKED\n", "    return Path.MQA\n"),
    ),
    mutant(
        "dispatch_fits_by_token_sum",
        "B116",
        "dispatch",
        "BITMASK",
        "dispatch.path",
        "Whether the masks fit is judged by the sum of the query lengths, without padding.",
        (
            _DISPATCH,
            "masked_mha_workspace_fits(metadata.num_requests, metadata.max_query_len, longest, workspace.numel())",
            "sum(metadata.query_lens_cpu) * max(-(-longest // 32), 1) <= workspace.numel()",
        ),
    ),
    mutant(
        "dispatch_fits_strictly",
        "own",
        "dispatch",
        "BITMASK",
        "dispatch.path",
        "A workspace that the masks fill exactly counts as too small.",
        (
            "mask.py",
            "topk_mask_shape(batch_size, max_query_len, longest)) <= workspace_numel",
            "topk_mask_shape(batch_size, max_query_len, longest)) < workspace_numel",
        ),
    ),
    mutant(
        "dispatch_dense_one_too_short",
        "own",
        "dispatch",
        "SPARSE",
        "dispatch.path",
        "A sequence exactly as long as a top-k row does not go to dense MHA.",
        (_DISPATCH, "return max_seq_len <= topk_tokens", "return max_seq_len < topk_tokens"),
    ),
    mutant(
        "dispatch_suffix_mask_not_counted",
        "own",
        "dispatch",
        "BITMASK",
        "dispatch.path",
        "Whether the masks fit is judged by the context chunks alone.",
        (
            "mask.py",
            "longest = max(max_query_len, max_context_chunk_seq_len)",
            "longest = max_context_chunk_seq_len or max_query_len",
        ),
    ),
    mutant(
        "topk_rows_start_at_requests",
        "B062",
        "slice",
        "CHUNK",
        "slice.rows",
        "The first top-k row of the prefill is counted in decode requests, not in decode tokens.",
        (_LAYER, "first = prefill.num_decode_tokens\n", "first = min(prefill.num_decode_tokens, 1)\n"),
        also=("slots",),
    ),
    mutant(
        "project_values_first",
        "B120",
        "project",
        "HEADDIM",
        "project.k",
        "The product's columns are read as values first, then keys.",
        (
            _PROJECTION,
            _SPLIT,
            _SPLIT.replace("k_nope, v =", "v, k_nope =").replace("(nope, v_head_dim)", "(v_head_dim, nope)"),
        ),
    ),
    mutant(
        "project_interleaved_heads",
        "B120",
        "project",
        "HEADDIM",
        "project.k",
        "The product's columns are read with the head as the fastest index.",
        (
            _PROJECTION,
            _SPLIT,
            "product = product.view(tokens, nope + v_head_dim, num_heads).transpose(1, 2)\n"
            "    k_nope, v = product.contiguous().split((nope, v_head_dim), dim=-1)",
        ),
    ),
    mutant(
        "project_rope_read_by_head",
        "B034",
        "project",
        "GATHER",
        "project.k_rope",
        "The broadcast key part is read with a head stride, so that each head takes the next token's.",
        (
            _PROJECTION,
            _ROPE,
            "place = torch.arange(tokens).unsqueeze(1) + torch.arange(heads)\n"
            "        k[..., nope:].copy_(k_pe[:, 0][place.clamp(max=max(tokens - 1, 0)).to(k_pe.device)])",
        ),
    ),
    mutant(
        "project_rope_of_first_head_only",
        "own",
        "project",
        "HEADDIM",
        "project.k_rope",
        "The concat kernel gives the key part to even heads only.",
        (
            _PROJECTION,
            "tl.store(k_rows[:, None] + NOPE + rope_column, rope, mask=exists)",
            "tl.store(k_rows[:, None] + NOPE + rope_column, rope, mask=exists & (head % 2 == 0)[:, None])",
        ),
    ),
    mutant(
        "project_value_scale_lost",
        "B090",
        "project",
        "FP8",
        "project.v",
        "The scale of an FP8 cache reaches the keys and not the values.",
        (
            "mha_path.py",
            "        if self.trace is not None:\n            self.trace.events.append(\n                ProjectEvent(",
            '        if name.startswith("chunk"):\n'
            "            v = v / self.layer.kv_cache_scale\n"
            "        if self.trace is not None:\n            self.trace.events.append(\n                ProjectEvent(",
        ),
    ),
    mutant(
        "project_rounds_twice",
        "own",
        "project",
        "DTYPE",
        "project.k",
        "Partial sums of the projection are rounded to 16 bits before they are added.",
        (
            _PROJECTION,
            "return (a.float() @ b.float()).to(a.dtype)",
            "half = a.shape[1] // 2\n"
            "        low = (a[:, :half].float() @ b[:half].float()).to(a.dtype)\n"
            "        return low + (a[:, half:].float() @ b[half:].float()).to(a.dtype)",
        ),
        (
            _PROJECTION,
            "        return a @ b\n",
            "        half = a.shape[1] // 2\n        return a[:, :half] @ b[:half] + a[:, half:] @ b[half:]\n",
        ),
    ),
)
