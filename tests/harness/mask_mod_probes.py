"""CuTe mask mods for tests of the read-out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute

from harness.checks.mask_mod_python import PythonMaskMod


def hash_of(b: Any, head: Any, row: Any, key: Any, queries: Any, keys: Any) -> Any:
    """Positive everywhere, and differs if any index does."""
    return (b * 7919 + head * 31 + row * 101 + key * 57 + queries * 13 + keys * 3) % 251


@cache
def probe(vec_size: int) -> Callable[..., Any]:
    """A mod whose bit for a key is a hash of all that it was asked with."""
    words = max(1, vec_size // 32)

    @cute.jit
    def mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        out = cute.make_rmem_tensor(words, cutlass.Uint32)
        for c in cutlass.range_constexpr(words):
            out[c] = cutlass.Uint32(0)
            for i in cutlass.range_constexpr(min(vec_size, 32)):
                lane = 32 * c + i
                value = hash_of(
                    batch[lane], head[lane], q_idx[lane], kv_idx[lane], seqlen_info.seqlen_q, seqlen_info.seqlen_k
                )
                out[c] = out[c] | (cutlass.Uint32(value & 1) << cutlass.Uint32(i))
        return out.load()

    @cute.jit
    def scalar(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        out = cute.make_rmem_tensor(1, cutlass.Boolean)
        value = hash_of(batch[0], head[0], q_idx[0], kv_idx[0], seqlen_info.seqlen_q, seqlen_info.seqlen_k)
        out[0] = cutlass.Boolean(value & 1)
        return out.load()

    made: Callable[..., Any] = scalar if vec_size == 1 else mod
    if vec_size > 1:
        made.__vec_size__ = vec_size  # type: ignore[attr-defined]
    return made


def python_probe(vec_size: int) -> PythonMaskMod:
    """The same in plain Python."""

    def mod(batch, head, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        bits = [hash_of(*index, *seqlen_info) & 1 for index in zip(batch, head, q_idx, kv_idx, strict=True)]
        if vec_size == 1:
            return bits
        return [sum(bit << i for i, bit in enumerate(bits[c : c + 32])) for c in range(0, vec_size, 32)]

    return PythonMaskMod(mod, vec_size)


@cute.jit
def one_word_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
    """32 keys from an unaligned key start, taken from one word: loses the keys of the next."""
    mask = aux_tensors[0]
    start = mask[batch[0], 0, cute.size(mask, mode=[2]) - 1]
    bit = start + kv_idx[0]
    out = cute.make_rmem_tensor(1, cutlass.Uint32)
    out[0] = cutlass.Uint32(mask[batch[0], q_idx[0], bit >> 5]) >> cutlass.Uint32(bit & 31)
    return out.load()


one_word_mod.__vec_size__ = 32
