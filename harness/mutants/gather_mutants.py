"""Faults of the paged gather and of the decoders of quantised rows."""

from __future__ import annotations

from harness.mutants.mutant import mutant

_KERNEL = "gather_kernel.py"
_PATH = "mha_path.py"
_ROW = "row = (position % block_size).to(tl.int64)"
_E4M3 = "value = decode_e4m3(tl.load(src_rows + column, mask=live, other=0)) * scale\n"
_TILE_SCALE = "tile_scale = load_float32(src_rows + (_SCALES_AT + first // _TILE * 4), exists[:, None])"
_TABLE = "self.meta.block_table[chunk.request_slice],"

GATHER_MUTANTS = (
    mutant(
        "gather_narrow_table_wraps",
        "B066",
        "gather",
        "GATHER",
        "gather.rows",
        "A block index past the width of the chunk's own blocks wraps to the front of the table row.",
        (
            _PATH,
            _TABLE,
            "self.meta.block_table[chunk.request_slice, : -(-chunk.max_seq_len // self.meta.block_size)].repeat(\n"
            "                1, self.meta.block_table.shape[1]\n"
            "            ),",
        ),
    ),
    mutant(
        "gather_table_stride_from_shape",
        "B068",
        "gather",
        "GATHER",
        "gather.rows",
        "The row stride of a narrowed block table is taken from its width.",
        (_KERNEL, "block_table.stride(0),", "block_table.shape[1],"),
    ),
    mutant(
        "gather_table_stride_recomputed",
        "B160",
        "gather",
        "GATHER",
        "gather.rows",
        "The row stride of the block table is recomputed from this batch's longest context.",
        (
            _PATH,
            _TABLE,
            "self.meta.block_table[chunk.request_slice].as_strided(\n"
            "                (len(chunk.seq_lens), self.meta.block_table.shape[1]),\n"
            "                (max(-(-max(self.meta.context_lens_cpu) // self.meta.block_size), 1), 1),\n"
            "            ),",
        ),
    ),
    mutant(
        "gather_row_width_baked_in",
        "B085",
        "gather",
        "HEADDIM",
        "gather.rows",
        "The stride of a cache row is taken to be its width.",
        (_KERNEL, "src_cache.stride(1),", "src_cache.shape[2],"),
    ),
    mutant(
        "gather_tiled_layout",
        "B149",
        "gather",
        "GATHER",
        "gather.rows",
        "Blocks of more than 16 rows are read as 16 tiles, although they were written flat.",
        (
            _KERNEL,
            _ROW,
            _ROW + "\n"
            "    lanes = tl.maximum(block_size // 16, 1)\n"
            "    row = tl.where((block_size > 16) & (block_size % 16 == 0), row % lanes * 16 + row // lanes, row)",
        ),
    ),
    mutant(
        "gather_start_ignored",
        "own",
        "gather",
        "CHUNK",
        "gather.rows",
        "A continued context is gathered from its first row again.",
        (_KERNEL, "    if HAS_STARTS:\n", "    if not HAS_STARTS:\n"),
    ),
    mutant(
        "gather_start_rounded_to_block",
        "own",
        "gather",
        "GATHER",
        "gather.rows",
        "A start inside a block is rounded down to the block.",
        (
            _KERNEL,
            "        position += tl.load(seq_starts_ptr + request, mask=exists, other=0)",
            "        position += tl.load(seq_starts_ptr + request, mask=exists, other=0) // block_size * block_size",
        ),
    ),
    mutant(
        "gather_last_row_lost",
        "own",
        "gather",
        "CHUNK",
        "gather.rows",
        "The last row of a chunk is not copied.",
        (_KERNEL, "exists = token < num_tokens", "exists = token < num_tokens - 1"),
    ),
    mutant(
        "gather_block_offset_wraps",
        "B099",
        "gather",
        "INT32",
        "gather.rows",
        "The offset of a block in the cache wraps (at 4,096 elements in place of 2^31).",
        (_KERNEL, "block * src_block_stride", "((block * src_block_stride) & 0xFFF)"),
    ),
    mutant(
        "gather_scale_power_of_two",
        "B080",
        "gather",
        "FP8",
        "gather.rows",
        "The scale of a tile is rounded up to a power of two before use.",
        (
            _KERNEL,
            _TILE_SCALE,
            _TILE_SCALE + "\n"
            "                exponent = (tile_scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000\n"
            "                tile_scale = exponent.to(tl.float32, bitcast=True)",
        ),
        also=("mqa",),
    ),
    mutant(
        "gather_unit_scale_not_decoded",
        "B088",
        "gather",
        "FP8",
        "gather.rows",
        "With a scale of 1 the codes are taken for values.",
        (
            _KERNEL,
            _E4M3,
            "code = tl.load(src_rows + column, mask=live, other=0)\n"
            "                value = tl.where(scale == 1.0, code.to(tl.float32), decode_e4m3(code) * scale)\n",
        ),
    ),
    mutant(
        "gather_divides_by_scale",
        "B091",
        "gather",
        "FP8",
        "gather.rows",
        "Codes are divided by the scale.",
        (_KERNEL, _E4M3, _E4M3.replace("* scale", "/ scale")),
    ),
    mutant(
        "gather_scale_of_first_tile",
        "own",
        "gather",
        "FP8",
        "gather.rows",
        "All tiles of a packed row are scaled by the first tile's scale.",
        (_KERNEL, "(_SCALES_AT + first // _TILE * 4)", "_SCALES_AT"),
    ),
    mutant(
        "decode_rope_as_fp16",
        "B121",
        "gather",
        "DTYPE",
        "gather.rows",
        "The bf16 rope part of a packed row is read as fp16.",
        (
            "fp8.py",
            "    bits = tl.load(ptrs, mask=live, other=0).to(tl.uint32) << 16\n"
            "    bits = bits | (tl.load(ptrs + 1, mask=live, other=0).to(tl.uint32) << 24)\n"
            "    return bits.to(tl.float32, bitcast=True)",
            "    bits = tl.load(ptrs, mask=live, other=0).to(tl.uint16)\n"
            "    bits = bits | (tl.load(ptrs + 1, mask=live, other=0).to(tl.uint16) << 8)\n"
            "    return bits.to(tl.float16, bitcast=True).to(tl.float32)",
        ),
        also=("mqa",),
    ),
    mutant(
        "decode_loses_subnormals",
        "own",
        "gather",
        "FP8",
        "gather.rows",
        "e4m3 codes below the smallest normal number are read as 0.",
        ("fp8.py", "tl.where(exponent == 0, subnormal, normal)", "tl.where(exponent == 0, 0, normal)"),
        also=("mqa",),
    ),
    mutant(
        "table_check_counts_empty_request",
        "B144",
        "gather",
        "EMPTY",
        "prefill.run",
        "The check of the block table takes a request without context to use one block.",
        (
            "kv_cache.py",
            "used = [-(-length // block_size) for length in lens]",
            "used = [-(-max(length, 1) // block_size) for length in lens]",
        ),
    ),
)
