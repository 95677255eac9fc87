"""Do the mask mods give every key its own bit, from any key start, and read nothing but the mask's data?

The bit logic runs here on Python integers. Where CuTe is installed, the mods themselves run too: compiled for the
host, called as SM90 kernels call them (one element) and as SM100 kernels do (adjacent keys, packed words).
"""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch

from optimized.mask_bits import key_bit, key_word
from tests.attention_cases import as_int32

QUERIES = 3
WORDS = 8  # a multiple of 4, as every mask has
KEYS = 32 * (WORDS + 4)  # past the end of the mask, as tiles reach


class Word(int):
    """A 32-bit unsigned integer that refuses to be shifted by its own width."""

    def __lshift__(self, by: int) -> Word:
        assert 0 <= by < 32
        return Word(int.__lshift__(self, by) & 0xFFFFFFFF)

    def __rshift__(self, by: int) -> Word:
        assert 0 <= by < 32
        return Word(int.__rshift__(self, by))

    def __or__(self, other: int) -> Word:
        return Word(int.__or__(self, other))

    def __and__(self, other: int) -> Word:
        return Word(int.__and__(self, other))

    def __sub__(self, other: int) -> Word:
        assert self >= other
        return Word(int.__sub__(self, other))


def row_of(data_words: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + i).getrandbits(32) for i in range(data_words)]


def bits_after(row: list[int], key_start: int, keys: int) -> list[int]:
    """The answer for the segment's keys 0, 1, ...: bits of the row from `key_start` on, and 0 past its data."""
    bits = [(word >> i) & 1 for word in row for i in range(32)]
    return [bits[key_start + n] if 0 <= key_start + n < len(bits) else 0 for n in range(keys)]


def unpack(words: list[int]) -> list[int]:
    return [(word >> i) & 1 for word in words for i in range(32)]


@pytest.mark.parametrize("key_start", [*range(32), 32, 63, 64, 95, 127, 200])
@pytest.mark.parametrize("data_words", [1, 4, 7])
def test_logic_gives_every_key_its_bit(key_start: int, data_words: int) -> None:
    row = row_of(data_words, key_start)

    def read(word: int) -> Word:
        return Word(row[word] if 0 <= word < len(row) else 0)

    expected = bits_after(row, key_start, KEYS)
    assert [key_bit(read, key_start, n) for n in range(KEYS)] == expected
    assert unpack([key_word(read, key_start, n) for n in range(0, KEYS, 32)]) == expected


needs_cute = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs CuTe (cutlass)")


def masks_for(key_starts: list[int]) -> torch.Tensor:
    """[B, QUERIES, WORDS]: random data, the key start in query row 0, all ones where the others have no data."""
    mask = torch.tensor(
        [[[as_int32(w) for w in row_of(WORDS, 31 * b + q)] for q in range(QUERIES)] for b in range(len(key_starts))],
        dtype=torch.int32,
    )
    mask[:, :, -1] = -1
    mask[:, 0, -1] = torch.tensor(key_starts, dtype=torch.int32)
    return mask


def read_out(mask: torch.Tensor, offset: bool, family: int) -> torch.Tensor:
    """[B, QUERIES, KEYS] 0/1: what the mod of that family answers, called the way that family calls it."""
    from tests.optimized.mask_mod_host import run_packed, run_scalar

    # the mask lies in a larger buffer of ones: what is read beside it shows
    guarded = torch.full((mask.shape[0] + 2, QUERIES + 2, WORDS), -1, dtype=torch.int32)
    guarded[1:-1, 1:-1] = mask
    return (run_scalar if family == 90 else run_packed)(guarded[1:-1, 1:-1], offset, KEYS)


def as_words(mask: torch.Tensor, data_words: int) -> list[list[list[int]]]:
    return [[[w & 0xFFFFFFFF for w in row[:data_words]] for row in rows] for rows in mask.tolist()]


@needs_cute
@pytest.mark.parametrize("family", [90, 100])
def test_offset_mod_answers_from_every_key_start(family: int) -> None:
    starts = [*range(32), 33, 95, 160, 223, 224, 300]
    mask = masks_for(starts)
    answers = read_out(mask, True, family)
    for b, rows in enumerate(as_words(mask, WORDS - 1)):
        for q, row in enumerate(rows):
            assert answers[b, q].tolist() == bits_after(row, starts[b], KEYS), (starts[b], q)


@needs_cute
@pytest.mark.parametrize("family", [90, 100])
def test_dense_mod_answers_with_every_word(family: int) -> None:
    mask = masks_for([0, 5])
    answers = read_out(mask, False, family)
    for b, rows in enumerate(as_words(mask, WORDS)):
        for q, row in enumerate(rows):
            assert answers[b, q].tolist() == bits_after(row, 0, KEYS), (b, q)


@needs_cute
@pytest.mark.parametrize("family", [90, 100])
def test_offset_mod_survives_a_key_start_that_is_none(family: int) -> None:
    starts = [-1, -32, -(2**20), 2**30]
    mask = masks_for(starts)
    answers = read_out(mask, True, family)
    for b, rows in enumerate(as_words(mask, WORDS - 1)):
        assert answers[b, 0].tolist() == bits_after(rows[0], starts[b], KEYS), starts[b]


@needs_cute
def test_mods_of_one_family_differ_in_the_key_of_their_compiled_kernels() -> None:
    from optimized.mask_mods import mask_mod_for

    mods: list[Any] = [mask_mod_for(family, offset) for family in (90, 100) for offset in (False, True)]
    assert len({mod.__cute_hash__ for mod in mods}) == len(mods)
    assert [getattr(mod, "__vec_size__", 1) for mod in mods] == [1, 1, 128, 32]
    assert mask_mod_for(90, True) is mask_mod_for(90, True)
    with pytest.raises(ValueError, match="family is 80"):
        mask_mod_for(80, True)
