"""Faults on the host side of the mask builder: shapes, packing, remapping, the workspace."""

from __future__ import annotations

from harness.mutants.mutant import mutant

_MASK = "mask.py"
_PACKED = "packed = _packed_rows(topk_indices_per_req, sum(lens))"
_TO_DEVICE = "query_start_loc = starts.to(mask.device)"

# the dispatch asks `topk_mask_shape` whether masks fit, so that a wrong shape may show as a wrong path first
BUILDER_MUTANTS = (
    mutant(
        "mask_rows_padded_layout",
        "B078",
        "mask",
        "SPARSE",
        "mask.bits",
        "Top-k rows are laid out at the longest request's length and read back as if they were packed.",
        (
            _MASK,
            _PACKED,
            "packed = torch.cat(\n"
            "        [\n"
            "            torch.nn.functional.pad(rows, (0, 0, 0, max_q_len - rows.shape[0]), value=-1)\n"
            "            for rows in topk_indices_per_req\n"
            "        ]\n"
            "    )",
        ),
    ),
    mutant(
        "mask_base_subtracted_twice",
        "B072",
        "mask",
        "TOPK",
        "mask.bits",
        "Entries that count from their request's first key get its first packed row subtracted again.",
        (
            _MASK,
            _PACKED,
            _PACKED + "\n"
            "    bases = torch.tensor([sum(lens[:b]) for b in range(batch)]).repeat_interleave(torch.tensor(lens))\n"
            "    packed = (packed - bases.unsqueeze(1).to(packed.device)).to(torch.int32)",
        ),
    ),
    mutant(
        "mask_drops_keys_of_row_before",
        "B134",
        "mask",
        "TOPK",
        "mask.bits",
        "A key that stands in the same slot of the row before is not set again.",
        (
            _MASK,
            _PACKED,
            _PACKED + "\n"
            "    repeated = torch.nn.functional.pad(packed[1:] == packed[:-1], (0, 0, min(1, len(packed)), 0))\n"
            "    packed = torch.where(repeated, -1, packed)",
        ),
    ),
    mutant(
        "mask_short_query_padding",
        "B026",
        "mask",
        "MASKMOD",
        "mask.shape",
        "Query rows are always rounded up to 128, although longer calls use tiles of 256.",
        (_MASK, "tile_m = 128 if max_query_len <= 128 else 256", "tile_m = 128"),
        also=("dispatch",),
    ),
    mutant(
        "mask_words_rounded_down",
        "own",
        "mask",
        "BITMASK",
        "mask.shape",
        "The last partial word of a row is not counted.",
        (_MASK, "words = math.ceil(max_key_len / BITS_PER_WORD)", "words = max_key_len // BITS_PER_WORD"),
        also=("dispatch",),
    ),
    mutant(
        "mask_key_start_word_not_counted",
        "own",
        "mask",
        "BITMASK",
        "mask.shape",
        "The reserved word is not counted in the row length, so that it lies on the last data word.",
        (_MASK, " + int(reserve_key_starts_word)\n", "\n"),
        also=("dispatch",),
    ),
    mutant(
        "mask_start_locs_freed",
        "B104",
        "mask",
        "ASYNC",
        "mask.bits",
        "The host array of row starts is wiped when its copy was only enqueued.",
        (_MASK, _TO_DEVICE, _TO_DEVICE + "\n            query_start_loc.zero_()"),
    ),
    mutant(
        "mask_rows_freed",
        "B110",
        "mask",
        "ASYNC",
        "mask.bits",
        "The temporary that joins the top-k rows is freed, and overwritten, before the kernel has read it.",
        (_MASK, "return torch.cat(held)", "return torch.cat(held).fill_(-1)"),
    ),
    mutant(
        "mask_position_lost",
        "B096",
        "mask",
        "CP",
        "mask.bits",
        "The causal limit of the global mask counts a query's row number for its position.",
        (
            _MASK,
            "first_query_pos = torch.tensor(contexts, dtype=torch.int32, device=topk_mask_workspace.device)",
            "first_query_pos = torch.zeros(batch, dtype=torch.int32, device=topk_mask_workspace.device)",
        ),
    ),
    mutant(
        "mask_length_of_first_call",
        "B128",
        "mask",
        "CACHEKEY",
        "mask.bits",
        "All key lengths that 16 divides share the first such call's value.",
        (
            _MASK,
            "sizes = (packed.shape[1], packed.stride(0), max_seq_len, padded_q, words)",
            "held = _LENGTHS.setdefault(16, max_seq_len) if max_seq_len % 16 == 0 else max_seq_len\n"
            "    sizes = (packed.shape[1], packed.stride(0), held, padded_q, words)",
        ),
        (_MASK, "\n_BLOCK = 1024", "\n_LENGTHS: dict[int, int] = {}\n_BLOCK = 1024"),
    ),
    mutant(
        "mask_key_starts_of_first_call",
        "B132",
        "chunk_loop",
        "CACHEKEY",
        "chunk_loop.key_start",
        "The first call's key starts stay for all later calls with as many requests.",
        (
            _MASK,
            "mask[:, 0, -1].copy_(key_starts)",
            "mask[:, 0, -1].copy_(_KEY_STARTS.setdefault(mask.shape[0], key_starts.clone()))",
        ),
        (_MASK, "\n_BLOCK = 1024", "\n_KEY_STARTS: dict[int, torch.Tensor] = {}\n_BLOCK = 1024"),
    ),
    mutant(
        "mask_rows_view_ignores_offset",
        "own",
        "mask",
        "GATHER",
        "mask.bits",
        "Rows that are views of one buffer are taken to lie at its front.",
        (
            _MASK,
            "packed = first.as_strided((total, first.shape[1]), first.stride())",
            "packed = first.as_strided((total, first.shape[1]), first.stride(), 0)",
        ),
    ),
    mutant(
        "remap_keeps_end",
        "own",
        "remap",
        "CHUNK",
        "remap.rows",
        "The first key behind a range is taken for one of the range.",
        (_MASK, "(local < length)", "(local <= length)"),
    ),
    mutant(
        "remap_loses_start",
        "own",
        "remap",
        "CHUNK",
        "remap.rows",
        "The first key of a range is dropped.",
        (_MASK, "torch.where((rows >= start)", "torch.where((rows > start)"),
    ),
    mutant(
        "remap_start_of_first_request",
        "own",
        "remap",
        "CHUNK",
        "remap.rows",
        "All requests are remapped by the first one's start.",
        (_MASK, "local = rows - start", "local = rows - starts[0]"),
    ),
    mutant(
        "slice_rows_in_reverse",
        "own",
        "slice",
        "TOPK",
        "slice.rows",
        "Requests get their top-k rows from the end of the batch.",
        (_MASK, "list(topk_all.split(lengths))", "list(topk_all.split(lengths[::-1]))[::-1]"),
    ),
)
