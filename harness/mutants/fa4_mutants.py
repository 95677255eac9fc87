"""Faults of the FlashAttention-4 call and of its mask mods, in the scalar (SM90) and the packed (SM100) form."""

from __future__ import annotations

from harness.mutants.mutant import mutant

_CALL = "attention/fa4.py"
_MODS = "mask_mods.py"
_BITS = "mask_bits.py"

FA4_MUTANTS = (
    mutant(
        "fa4_mod_reads_one_word",
        "own",
        "mask_mod",
        "MASKMOD",
        "attend.lse",
        "An unaligned key start reads one word of the mask where 32 keys straddle two.",
        (_BITS, "    return (low >> shift) | ((high << word(1)) << (word(31) - shift))", "    return low >> shift"),
        (_BITS, "    word = read(bit >> 5)\n", "    word = read((key_start + (key >> 5 << 5)) >> 5)\n"),
        needs="fa4",
    ),
    mutant(
        "fa4_mod_local_column",
        "B023",
        "mask_mod",
        "MASKMOD",
        "attend.lse",
        "The mask is asked for a key's place in its tile, not in the segment.",
        (_MODS, "key_bit(read, cutlass.Int32(0), kv_idx[0])", "key_bit(read, cutlass.Int32(0), kv_idx[0] % 128)"),
        (
            _MODS,
            "load = kv_idx[0] // (_WORD_KEYS * _LOAD_WORDS)",
            "load = kv_idx[0] % 128 // (_WORD_KEYS * _LOAD_WORDS)",
        ),
        needs="fa4",
    ),
    mutant(
        "fa4_mod_row_by_group",
        "B024",
        "mask_mod",
        "MASKMOD",
        "attend.lse",
        "Mask rows are looked up as if two heads were packed into the rows.",
        (
            _MODS,
            "return _inside(q_idx, cute.size(mask, mode=[1]))",
            "return _inside(q_idx // 2, cute.size(mask, mode=[1]))",
        ),
        needs="fa4",
    ),
    mutant(
        "fa4_mod_key_start_ignored",
        "B123",
        "mask_mod",
        "SPARSE",
        "attend.lse",
        "The mod without a key start is chosen for every call.",
        (
            _MODS,
            "mod: MaskMod = (_SCALAR if family == 90 else _PACKED)[offset]",
            "mod: MaskMod = (_SCALAR if family == 90 else _PACKED)[False]",
        ),
        needs="fa4",
    ),
    mutant(
        "fa4_mod_key_start_of_first_request",
        "B132",
        "mask_mod",
        "CACHEKEY",
        "attend.lse",
        "All requests are read from the first one's key start.",
        (_MODS, "return mask[batch, 0, _words(mask) - 1]", "return mask[0, 0, _words(mask) - 1]"),
        needs="fa4",
    ),
    mutant(
        "fa4_lse_base2",
        "B051",
        "attend",
        "CP",
        "attend.lse",
        "A base-2 LSE is handed on where a natural one is declared.",
        (_CALL, "    return results[0], results[1]\n", "    return results[0], results[1] * 1.4426950408889634\n"),
        needs="fa4",
    ),
    mutant(
        "fa4_scale_from_width",
        "B082",
        "attend",
        "HEADDIM",
        "attend.lse",
        "The softmax scale is taken from the head dim, not from the argument.",
        (_CALL, "softmax_scale=scale,", "softmax_scale=call.q.shape[2] ** -0.5,"),
        needs="fa4",
    ),
)
