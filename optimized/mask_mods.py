"""Mask mods for FlashAttention-4: which keys the top-k mask lets a query see (SPEC 2.2).

FA4 calls `mask_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors)`; `aux_tensors[0]` is the mask
[B, padded_q, words] int32, `q_idx` counts the request's queries and `kv_idx` the keys of the call's segment.
`dense` mods take the segment to start at mask bit 0; `offset` mods add the key start, which is the last word
of query row 0 and is never read as bits.

Kernels for SM90 call a mod once for each element and take a Boolean. Kernels for SM100 call it with
`__vec_size__` adjacent keys and take packed words, one for 32 keys. Tiles reach past the ends of a segment,
so every mod reads only inside the mask, and answers 0 for what is not data.

This module imports CuTe; import it only where FA4 is installed.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cutlass_dsl import max as dsl_max
from cutlass.cutlass_dsl import min as dsl_min

from optimized import mask_bits
from optimized.mask_bits import Read, key_bit, key_word

MaskMod = Callable[..., Any]

_WORD_KEYS = 32
_LOAD_WORDS = 4
"""Words of one 128-bit load. A mask's row length is a multiple of it (`topk_mask_shape`)."""


def _inside(index: Any, size: Any) -> Any:
    return dsl_max(dsl_min(index, size - 1), 0)


def _words(mask: Any) -> Any:
    return cute.size(mask, mode=[2])


def _row(mask: Any, q_idx: Any) -> Any:
    """A query row of the mask; rows of a tile past the last one are never stored, and read that one."""
    return _inside(q_idx, cute.size(mask, mode=[1]))


def _key_start(mask: Any, batch: Any) -> Any:
    return mask[batch, 0, _words(mask) - 1]


def _reader(mask: Any, batch: Any, q_idx: Any, data_words: Any) -> Read:
    """Reads the first `data_words` words of one query row."""
    row = _row(mask, q_idx)

    @cute.jit
    def read(word: Any) -> Any:
        place = _inside(word, data_words)
        bits = cutlass.Uint32(mask[batch, row, place])
        return bits if place == word else cutlass.Uint32(0)

    reader: Read = read
    return reader


def _pack(values: list[Any], dtype: Any) -> Any:
    """Scalars -> the vector that FA4 takes from a mod."""
    out = cute.make_rmem_tensor(len(values), dtype)
    for i, value in enumerate(values):
        out[i] = value
    return out.load()


@cute.jit
def dense_mask_mod(batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    """SM90: one key, a Boolean."""
    mask = aux_tensors[0]
    read = _reader(mask, batch[0], q_idx[0], _words(mask))
    return _pack([cutlass.Boolean(key_bit(read, cutlass.Int32(0), kv_idx[0]))], cutlass.Boolean)


@cute.jit
def offset_dense_mask_mod(batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    """SM90: one key counted from the key start, a Boolean."""
    mask = aux_tensors[0]
    read = _reader(mask, batch[0], q_idx[0], _words(mask) - 1)
    return _pack([cutlass.Boolean(key_bit(read, _key_start(mask, batch[0]), kv_idx[0]))], cutlass.Boolean)


@cute.jit
def dense_mask_mod_packed(batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    """SM100: 128 keys from a multiple of 128 on, one 128-bit load. Right only in tiles of whole 128s."""
    mask = aux_tensors[0]
    load = kv_idx[0] // (_WORD_KEYS * _LOAD_WORDS)
    place = _inside(load, _words(mask) // _LOAD_WORDS)
    row = mask[batch[0], _row(mask, q_idx[0]), None]
    start = (row.iterator + place * _LOAD_WORDS).align(4 * _LOAD_WORDS)
    words = cute.make_rmem_tensor(_LOAD_WORDS, cutlass.Int32)
    cute.autovec_copy(cute.make_tensor(start, cute.make_layout(_LOAD_WORDS)), words)
    keep = cutlass.Uint32(0xFFFFFFFF) if place == load else cutlass.Uint32(0)
    return _pack([cutlass.Uint32(words[i]) & keep for i in range(_LOAD_WORDS)], cutlass.Uint32)


@cute.jit
def offset_dense_mask_mod_packed(
    batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
) -> Any:
    """SM100: 32 keys counted from the key start, one word joined from two."""
    mask = aux_tensors[0]
    read = _reader(mask, batch[0], q_idx[0], _words(mask) - 1)
    return _pack([key_word(read, _key_start(mask, batch[0]), kv_idx[0])], cutlass.Uint32)


dense_mask_mod_packed.__vec_size__ = _WORD_KEYS * _LOAD_WORDS
offset_dense_mask_mod_packed.__vec_size__ = _WORD_KEYS

_SCALAR = {False: dense_mask_mod, True: offset_dense_mask_mod}
_PACKED = {False: dense_mask_mod_packed, True: offset_dense_mask_mod_packed}


def mask_mod_for(family: int, offset: bool) -> MaskMod:
    """The mod for a device's capability family, 90 or 100; `offset` where the mask holds a key start.

    Raises ValueError for another family.
    """
    if family not in (90, 100):
        raise ValueError(f"family is {family}, must be 90 or 100: FA4 takes no mask mod elsewhere")
    mod: MaskMod = (_SCALAR if family == 90 else _PACKED)[offset]
    return mod


def _name_by_source() -> None:
    """FA4 keys its compiled kernels by a mod's own source; ours call helpers, whose source must count too."""
    source = inspect.getsource(mask_bits) + inspect.getsource(sys.modules[__name__])
    for mod in (*_SCALAR.values(), *_PACKED.values()):
        mod.__cute_hash__ = hashlib.sha256(f"{mod.__name__}\n{source}".encode()).hexdigest()


_name_by_source()
