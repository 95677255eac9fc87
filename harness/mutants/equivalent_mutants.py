"""Changes that no legal input can tell from the original, each with its proof.

They are run like the others, and one that is killed has a wrong proof. They keep the table honest: a judge that
accuses whatever was patched would kill them too.
"""

from __future__ import annotations

from harness.mutants.mutant import mutant

_SCALAR_READER = "    read = _reader(mask, batch[0], q_idx[0], _words(mask) - 1)\n    return _pack([cutlass.Boolean("
_PACKED_READER = "    read = _reader(mask, batch[0], q_idx[0], _words(mask) - 1)\n    return _pack([key_word("
_RESERVED_WORD_UNSEEN = (
    "A mask row has at least ceil(L / 32) + 1 words, L the longest sequence, so that the bits of the reserved word "
    "begin at or behind L. Key n of a call is bit key_start + n, which is below L for every key of the call; a key "
    "behind the call's own length is cut by its length whatever its bit says."
)

EQUIVALENT_MUTANTS = (
    mutant(
        "merge_weights_added_in_other_order",
        "own",
        "merge",
        "MERGE-LSE",
        "merge.lse",
        "The two weights are added in the other order.",
        ("merge.py", "prefix_weight + suffix_weight)", "suffix_weight + prefix_weight)"),
        equivalent="IEEE 754 addition of two numbers commutes, NaN and infinities included.",
    ),
    mutant(
        "remap_wrapped_entries_not_shut_out",
        "own",
        "remap",
        "INT32",
        "remap.rows",
        "An entry below the range is known by the sign of the difference, and not by comparing it with the start.",
        ("mask.py", "torch.where((rows >= start) & (local < length)", "torch.where((local >= 0) & (local < length)"),
        equivalent=(
            "For an entry t < start with t - start >= -2^31 the difference is negative, and both tests refuse it. "
            "Below that the int32 difference wraps to t - start + 2^32 >= 2^31 - start, and this is at least the "
            "length of the range, since start + length <= 2^31: the second test refuses it."
        ),
    ),
    mutant(
        "mask_reserved_word_cleared",
        "own",
        "mask",
        "BITMASK",
        "chunk_loop.key_start",
        "The builder clears the key-start word too.",
        ("mask_kernels.py", "((query[:, None] > 0) | (word < words - 1))", "(word < words)"),
        equivalent=(
            "The layer writes the key starts after the build and before each call that reads them (suffix and "
            "chunks), and no other code reads the word: what the builder left in it is never seen."
        ),
    ),
    mutant(
        "attend_tile_by_query_length",
        "B108",
        "attend",
        "DETERMINISM",
        "attend.out",
        "The key tile depends on the longest query of the batch, so that a neighbour changes a request's last bits.",
        (
            "attention/tiles.py",
            "block_n = min(max(next_power_of_2(max_seqlen_k), 32), 128)",
            "block_n = min(max(next_power_of_2(max_seqlen_k), 32), 128 if max_seqlen_q > 9 else 64)",
        ),
        needs="cpu",
        equivalent=(
            "The contract does not promise bits that are independent of the batch. A smaller tile only orders the "
            "same float32 sums differently, and the bound holds for every order (its chain counts all keys)."
        ),
    ),
    mutant(
        "mask_mod_reserved_word_is_data",
        "own",
        "mask_mod",
        "MASKMOD",
        "attend.lse",
        "The reserved word counts as mask data in the Triton kernel.",
        ("attention/mha_kernels.py", "data_words = words - 1", "data_words = words"),
        needs="triton",
        equivalent=_RESERVED_WORD_UNSEEN,
    ),
    mutant(
        "fa4_mod_reserved_word_is_data",
        "own",
        "mask_mod",
        "MASKMOD",
        "attend.lse",
        "The reserved word counts as mask data in the mask mods.",
        ("mask_mods.py", _SCALAR_READER, _SCALAR_READER.replace(" - 1)", ")")),
        ("mask_mods.py", _PACKED_READER, _PACKED_READER.replace(" - 1)", ")")),
        needs="fa4",
        equivalent=_RESERVED_WORD_UNSEEN,
    ),
)
