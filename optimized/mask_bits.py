"""How a mask mod finds a key's bit, apart from any hardware: one text for CuTe values and Python's own.

A mask row is a sequence of 32-bit words; the segment's key n is bit `key_start + n` of the row, and bit i is
bit `i & 31` of word `i >> 5`. `read(word)` gives a word of the row as an unsigned 32-bit value, and 0 for a
word that is not data. Words need `>>`, `<<`, `|`, `&`, and must drop what a left shift moves past bit 31.
"""

from collections.abc import Callable
from typing import Any

Read = Callable[[Any], Any]


def key_bit(read: Read, key_start: Any, key: Any) -> Any:
    """1 if the segment's key `key` may be seen, else 0."""
    bit = key_start + key
    word = read(bit >> 5)
    return (word >> type(word)(bit & 31)) & type(word)(1)


def key_word(read: Read, key_start: Any, first_key: Any) -> Any:
    """32 keys from `first_key` on, as one word.

    From an unaligned start they straddle two words of the row, and both contribute.
    `(high << 1) << (31 - r)` is `high << (32 - r)` without ever shifting by 32.
    """
    bit = key_start + first_key
    low, high = read(bit >> 5), read((bit >> 5) + 1)
    word = type(low)
    shift = word(bit & 31)
    return (low >> shift) | ((high << word(1)) << (word(31) - shift))
