"""Three faults to see the harness work: one in the mask builder, one in the chunk loop, one in the merge."""

from __future__ import annotations

from harness.mutants.mutant import mutant

FIRST_MUTANTS = (
    mutant(
        "mask_bit31_lost",
        "own",
        "mask",
        "BITMASK",
        "mask.bits",
        "Keys whose bit is the sign bit of their word are never set.",
        (
            "mask_kernels.py",
            "chosen = (entry >= 0) & (entry < limit[:, None])",
            "chosen = (entry >= 0) & (entry < limit[:, None]) & ((entry & 31) != 31)",
        ),
    ),
    mutant(
        "chunk_key_start_off_by_one",
        "own",
        "chunk_loop",
        "CHUNK",
        "chunk_loop.key_start",
        "The global mask of a context chunk is read from one key too far.",
        ("mha_path.py", "set_key_starts(mask, chunk.starts)", "set_key_starts(mask, chunk.starts + 1)"),
    ),
    mutant(
        "merge_base2",
        "B048",
        "merge",
        "MERGE-LSE",
        "merge.out",
        "The suffix LSE is taken for base 2 in a natural-log merge.",
        (
            "merge.py",
            "    suffix_lse = _load_lse(",
            "    suffix_lse = 1.4426950408889634 * _load_lse(",
        ),
    ),
    mutant(
        "mask_read_one_word",
        "own",
        "mask_mod",
        "MASKMOD",
        "attend.out",
        "An unaligned key start reads one word of the mask where 32 keys straddle two.",
        (
            "attention/mha_kernels.py",
            "return (low >> shift) | ((high << 1) << (31 - shift))",
            "return low >> shift",
        ),
    ),
)
